"""How far a result may be from the truth: one rule for every scheme, back end, dtype and result.

    allowed = FACTOR · (largest error of the plain computation)  +  FLOOR · eps · (largest number of the truth)

The plain computation is `reliability.fuzz.reference` in the dtype of the call. It computes in float32, or in float64 if
q and all parameters are float64. It stores queries and keys as kernels get them (rotated, and times a temperature) and
results in the dtype of q, in half of the runs weights too, and the gradients of parameters in theirs. It runs twelve
times, each time with its inputs moved at random within one unit in the last place, so that one lucky run does not set
the tolerance. eps is that of the dtype of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

FACTOR = 8.0
FLOOR = 8.0
STAGES = (2, 12)
"""Runs of the plain computation. More runs allow more, so a case that passes with 2 passes with 12."""
NEGLIGIBLE = 1e-30  # schemes may cut off what is smaller


def allowed(truth: Tensor, plain: list[Tensor], eps: float, smallest: float) -> float:
    """The largest error that a result may have. `smallest` is the smallest number that its dtype can store."""
    errors = [_largest_error(truth, x) for x in plain]
    return FACTOR * max(errors) + FLOOR * (eps * float(truth.abs().max()) + smallest)


def jitter(seed: int, run: int) -> torch.Generator:
    """The random roundings of a run of the plain computation."""
    return torch.Generator().manual_seed(seed + 10 + run)


def _largest_error(truth: Tensor, x: Tensor) -> float:
    error = (x.double() - truth).abs()
    return float(torch.where(torch.isfinite(x), error, 0.0).max())
