"""What a scheme adds to the token embeddings, against the reference, for the schemes that do so."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from reliability.fuzz import inputs, maps, reference, tolerance
from reliability.fuzz.case import Case, named
from reliability.fuzz.inputs import Inputs
from reliability.fuzz.problem import Arithmetic

NAMES = ("learned", "sinusoidal", "first")
"""The schemes with an embedding."""


def is_outside(case: Case) -> bool:
    """Whether a position of the keys is outside a table of the scheme, so that `embed` must raise."""
    pos = inputs.full_positions(case)[1]
    for part, mapped in zip(case.spec.split("+"), case.maps, strict=True):
        length = re.match(r"learned:length=(\d+)", part)
        if length and pos.numel():
            at = pos if mapped is None else maps.positions(*mapped, pos)
            if bool((at < 0).any()) or bool((at >= int(length[1])).any()):
                return True
    return False


def expected(case: Case, given: Inputs, a: Arithmetic) -> torch.Tensor:
    """The sum of the embeddings of all parts at the positions of the keys, [B or 1, Lk, d_model], in float64."""
    total = torch.zeros((), dtype=a.dtype)
    for part, _ in inputs.parts_of(given.scheme):
        if part.name in NAMES:
            params = {name: x.detach().to(a.dtype) for name, x in part.params.items()}
            wide = replace(part, params=params)
            total = a.store(total + reference.embedding(wide, given.positions[1], case.d_model, a))
    return total.double()


def plain(case: Case, given: Inputs, wide: torch.dtype) -> list[torch.Tensor]:
    """The same as the plain computation has it."""
    stored = named(case.parameters)
    return [
        expected(case, given, Arithmetic(wide, stored, tolerance.jitter(case.data, n)))
        for n in range(tolerance.STAGES[0])
    ]
