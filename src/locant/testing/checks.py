"""What the laws are written with: an assertion, a distance, and the exception of a law that does not apply."""

from __future__ import annotations

from torch import Tensor

TIGHT = 1e-9  # float64 against float64, where only the order of operations differs
FAR = 100_000


class NotApplicable(Exception):
    """A law does not apply to this scheme."""


def require(holds: bool | Tensor, otherwise: str) -> None:
    """An assertion that python -O does not remove."""
    if not holds:
        raise AssertionError(otherwise)


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors, relative to `b` where it exceeds 1."""
    if a.numel() == 0:
        return 0.0
    return float(((a - b).detach().abs() / b.detach().abs().clamp(min=1.0)).max())
