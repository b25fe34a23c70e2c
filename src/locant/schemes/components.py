"""`Components`: a curve over the offset as a sum of kernels, for schemes that are one (TISA)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Components:
    """The kernels of a scheme at some offsets, and their sum. H heads, R offsets, K kernels."""

    meaning: str  # of the sum, such as "added to the logit"
    total: Tensor  # [H, R]
    kernels: Tensor  # [H, R, K]
    amplitude: Tensor  # [H, K], and so are the two below
    sharpness: Tensor
    offset: Tensor
