"""Gradients of a model's outputs by the parameters of its schemes alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from locant.hf.interrupts import check
from locant.schemes import Scheme


@contextmanager
def gradients_of(model: nn.Module, schemes: list[Scheme]) -> Iterator[None]:
    """Only the parameters of some schemes require gradients; afterwards all require them as before."""
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    wanted = {parameter for scheme in schemes for parameter in scheme.parameters()}
    try:
        for parameter in before:
            parameter.requires_grad_(parameter in wanted)
        with torch.enable_grad():
            yield
    finally:
        for parameter, flag in before.items():
            parameter.requires_grad_(flag)


def gradients(output: Tensor, parameters: list[list[nn.Parameter]], towards: Tensor | None = None) -> list[Tensor]:
    """Returns the gradient [P] of an output, or of its product with `towards`, by each list of parameters."""
    check()
    flat = [parameter for own in parameters for parameter in own]
    grads = torch.autograd.grad(output, flat, towards, retain_graph=True, allow_unused=True)
    by = {p: torch.zeros_like(p) if g is None else g for p, g in zip(flat, grads, strict=True)}
    return [torch.cat([by[parameter].cpu().double().reshape(-1) for parameter in own]) for own in parameters]
