"""Toeplitz R² of a matrix: the share of its variance that is a function of j − i."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def toeplitz_r2(matrix: Tensor) -> float:
    """Returns R² of the best Toeplitz fit of a square matrix, which is the mean of each diagonal, in float64.

    A constant matrix (up to rounding) scores 1. It has no variance to explain, but it is Toeplitz.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] < 2:
        raise ValueError(f"matrix must be square, 2 × 2 or larger; got {list(matrix.shape)}")
    if not matrix.is_floating_point():
        raise TypeError(f"matrix must have a floating-point dtype; got {matrix.dtype}")
    if not matrix.isfinite().all():
        raise ValueError("matrix contains NaN or infinity")
    return float(r2_of(matrix.detach()))


def r2_of(matrix: Tensor) -> Tensor:
    """Returns `toeplitz_r2` of each matrix of [..., n, n], without its checks."""
    rounding = 8 * torch.finfo(matrix.dtype).eps * matrix.abs().amax((-2, -1)).double()
    matrix = matrix.double()
    matrix = matrix - matrix.mean((-2, -1), keepdim=True)
    n = matrix.shape[-1]
    count = n - (torch.arange(2 * n - 1, device=matrix.device) - n + 1).abs()
    explained = (_diagonals(matrix).sum(-2).square() / count).sum(-1)  # Σ(m_r − m)² = total − residual
    total = matrix.square().sum((-2, -1))
    constant = total <= (n * rounding).square()
    share: Tensor = explained / total.masked_fill(constant, 1.0)
    return share.clamp(max=1.0).masked_fill(constant, 1.0)


def without_diagonal(matrix: Tensor) -> Tensor:
    """Returns a matrix with the mean of all other pairs on its main diagonal: its R² is that of the pairs i ≠ j."""
    n, main = matrix.shape[-1], matrix.diagonal(dim1=-2, dim2=-1)
    mean = (matrix.sum((-2, -1)) - main.sum(-1)) / (n * (n - 1))
    changed: Tensor = matrix + torch.diag_embed(mean[..., None] - main)
    return changed


def _diagonals(matrix: Tensor) -> Tensor:
    """[..., n, n] → [..., n, 2n − 1]: column c holds diagonal j − i = c − (n − 1), zeros elsewhere."""
    n = matrix.shape[-1]
    rows = F.pad(matrix.flip(-2), (0, n)).flatten(-2)  # one column too many: each row starts one place later
    lines: Tensor = rows[..., : n * (2 * n - 1)].unflatten(-1, (n, 2 * n - 1))
    return lines
