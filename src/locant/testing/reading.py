"""The law of schemes that read hidden states."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch

from locant.attention import attend
from locant.testing.checks import TIGHT, NotApplicable, distance, require
from locant.testing.subject import Subject


def reading(subject: Subject) -> None:
    """`read` returns the right shape and dtype, one token at a time, and wrong hidden states are refused."""
    scheme, x = subject.scheme, subject.x
    if x is None:
        raise NotApplicable("reads no hidden states")
    require(scheme.has_sides, "declares that it reads hidden states, but defines no sides, which would use them")
    require(scheme.read_width >= 1, f"reads hidden states, so read_width must be 1 or more; it is {scheme.read_width}")
    expected = (x.shape[0], subject.q.shape[1], x.shape[1], scheme.read_width)
    for dtype in (torch.float64, torch.bfloat16):
        found = copy.deepcopy(scheme).to(dtype).read(x.to(dtype))
        require(
            found.shape == expected,
            f"read returns {list(found.shape)}; it must be {list(expected)}: batch, heads, tokens, read_width",
        )
        require(
            found.dtype in (torch.float32, torch.float64),
            f"read returns {found.dtype} in a {dtype} model; it must be float32 or wider (locant.schemes.base.wide)",
        )
    _one_token_at_a_time(subject)
    require(
        isinstance(getattr(scheme, "d_model", None), int),
        "reads hidden states but has no attribute d_model, so attention cannot refuse those of another width",
    )
    for what, wrong in (
        ("no x", None),
        ("x of one token too few", x[:, 1:]),
        ("x that is too wide", x.repeat(1, 1, 2)),
    ):
        how: dict[str, Any] = {**subject.how(), "x": wrong}
        with suppress(ValueError):
            attend(subject.q, subject.k, subject.v, scheme, impl="eager", **how)
            raise AssertionError(f"attention accepts {what}")


def _one_token_at_a_time(subject: Subject) -> None:
    """What is read of a token does not depend on the other tokens, their order, or other rows of the batch."""
    scheme, x = subject.scheme, subject.x
    assert x is not None
    whole = scheme.read(x)
    for pick in (torch.tensor([0]), torch.tensor([x.shape[1] - 1]), torch.randperm(x.shape[1])):
        error = distance(scheme.read(x[:, pick]), whole[:, :, pick])
        require(
            error < TIGHT,
            f"what is read of a token differs by {error:.1e} without the others, or in another order: sum over tokens "
            f"in sides, not in read",
        )
    error = distance(scheme.read(x[:1]), whole[:1])
    require(error < TIGHT, f"what is read of a row differs by {error:.1e} without the other rows of the batch")
