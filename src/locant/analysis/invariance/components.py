"""Principal components of a table of positions: in trained models few, and sine/cosine pairs (RepL4NLP 2024)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from locant.analysis.invariance.scores import rows_of


@dataclass(frozen=True)
class Component:
    """A principal component of a table, as a function of position."""

    number: int  # from 1, the largest first
    share: float  # of the variance
    frequency: int  # the dominant one, cycles per sequence
    power: float  # the share of the component that is a wave of this frequency
    phase: float  # degrees; cos is 0, sin is −90


@dataclass(frozen=True)
class Structure:
    """The principal components of a table."""

    first: int  # positions that the table was restricted to, both included
    last: int
    width: int
    spectrum: tuple[float, ...]  # the share of the variance of each component, the largest first
    dimensions: dict[int, int]  # components needed for 90, 95 and 99 % of the variance
    components: tuple[Component, ...]  # the leading ones
    pairs: tuple[tuple[int, int], ...]  # numbers of components that are sine and cosine of one frequency

    @property
    def cumulative(self) -> list[float]:
        """Share of the variance that the first 1, 2, 3, … components hold together."""
        return list(itertools.accumulate(self.spectrum))


@torch.no_grad()
def structure(
    table: Tensor, *, first: int = 1, last: int | None = None, components: int = 10, tolerance: float = 30.0
) -> Structure:
    """Returns the principal components of a table: spectrum, dominant frequencies, sine/cosine pairs.

    The centered table is U S Vᵀ; component c is the column U_c S_c over position, c_f its Fourier coefficients. The
    dominant frequency is the f > 0 of largest |c_f|, in whole cycles per sequence. Two components are a pair if they
    have the same dominant frequency and their phases differ by 90°, within `tolerance` degrees. A component is in one
    pair at most.
    """
    rows, first, last = rows_of(table, first, last)
    n = rows.shape[0]
    if n < 4:
        raise ValueError(f"frequencies need at least 4 positions; got {n}")
    u, s, _ = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    variance = s.square()
    if float(variance.sum()) <= (1e-12 * float(rows.abs().max())) ** 2 * rows.numel():
        raise ValueError("the table has no variance: all its rows are the same")
    shares = variance / variance.sum()
    reached = shares.cumsum(0)
    found = []
    for index in range(min(components, int((shares > 1e-12).sum()))):
        waves = torch.fft.rfft(u[:, index])[1:]
        power = waves.abs().square() * 2
        if n % 2 == 0:
            power[-1] /= 2  # the highest frequency has no mirror image
        best = int(power.argmax())
        phase = math.degrees(float(waves[best].angle()))
        found.append(Component(index + 1, float(shares[index]), best + 1, float(power[best] / power.sum()), phase))
    pairs: list[tuple[int, int]] = []
    free = list(found)
    while free:
        one = free.pop(0)
        for other in free:
            apart = (one.phase - other.phase) % 180  # the sign of a component is arbitrary
            if other.frequency == one.frequency and abs(apart - 90) <= tolerance:
                pairs.append((one.number, other.number))
                free.remove(other)
                break
    return Structure(
        first=first,
        last=last,
        width=rows.shape[1],
        spectrum=tuple(shares.tolist()),
        dimensions={percent: int((reached < percent / 100 - 1e-12).sum()) + 1 for percent in (90, 95, 99)},
        components=tuple(found),
        pairs=tuple(pairs),
    )
