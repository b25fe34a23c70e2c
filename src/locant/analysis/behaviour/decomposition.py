"""The variance of hidden states, split into position, sequence and the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Decomposition:
    """Shares of the variance, which add up to 1, and the total."""

    position: float
    error: float  # standard error of `position`: jackknife over sequences
    sequence: float
    rest: float
    variance: float


def decompose(hidden: Tensor) -> Decomposition:
    """Returns the two-way analysis of variance of h[b, m], [B, L, width]: h_bm = μ + p_m + s_b + e_bm.

        σ²_e = MS(h_bm − h̄_b − h̄_m + h̄)    σ²_p = Var_m(mean_b h) − σ²_e/B    σ²_s = Var_b(mean_m h) − σ²_e/M

    The mean over B texts still contains 1/B of the content. The second terms subtract it, without bias whatever the
    correlation between the tokens of a text. A share may therefore be below 0.
    """
    if hidden.ndim != 3 or hidden.shape[0] < 3 or hidden.shape[1] < 2:
        raise ValueError(f"hidden must be [B, L, width] with B ≥ 3 and L ≥ 2; got {list(hidden.shape)}")
    x = hidden.double()
    x = x - x.mean((0, 1))
    b, m, _ = x.shape
    size = x.square().sum((1, 2))  # [B]
    if float(size.sum()) == 0:
        raise ValueError("the hidden states are the same at every position of every sequence: no variance to decompose")
    of_sequence = x.mean(1)  # [B, D]
    every = _components(b, m, size.sum(), x.mean(0), of_sequence.square().sum())
    # Each sequence left out once, from sums alone.
    jackknife = torch.stack(
        [
            _components(
                b - 1, m, size.sum() - size[i], (x.sum(0) - x[i]) / (b - 1),
                of_sequence.square().sum() - of_sequence[i].square().sum(),
            )
            for i in range(b)
        ]
    )  # fmt: skip
    shares = jackknife[:, 0] / jackknife.sum(-1)
    error = math.sqrt((b - 1) ** 2 / b * float(shares.var()))
    position, sequence, rest = (every / every.sum()).tolist()
    return Decomposition(position, error, sequence, rest, float(every.sum()))


def _components(b: int, m: int, size: Tensor, of_place: Tensor, of_sequence: Tensor) -> Tensor:
    """σ²_p, σ²_s, σ²_e from Σ‖h‖², mean_b h [m, D] and Σ_b ‖mean_m h‖²."""
    grand = of_place.mean(0).square().sum()
    places = of_place.square().sum() - m * grand  # Σ_m ‖h̄_m − h̄‖²
    texts = of_sequence - b * grand
    rest = (size - b * m * grand - b * places - m * texts) / ((b - 1) * (m - 1))
    return torch.stack([places / (m - 1) - rest / b, texts / (b - 1) - rest / m, rest])
