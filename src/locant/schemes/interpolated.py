"""Position interpolation: positions are divided by a factor. Chen et al. 2023, arXiv 2306.15595.

    p → p / factor        r → r / factor

A model that was trained on `length` positions then reads factor · length of them, all within the range it knows.
`rope@interpolated:factor=4` is `rope:scaling=linear,factor=4`, and a table of absolute positions is stretched.
"""

from __future__ import annotations

import math

from torch import Tensor

from locant.schemes.base import Scheme, check_float, exact
from locant.schemes.map import Map

SMALLEST = 1e-6
"""Smaller factors would map positions beyond the range of integers."""


class Interpolated(Map):
    """Positions divided by a factor. Parameters: those of the scheme."""

    monotone = linear = takes_reals = True

    def __init__(self, scheme: Scheme, /, *, factor: float = 4.0) -> None:
        super().__init__(scheme)
        check_float(self, "factor", factor, above=SMALLEST)
        self.factor = factor

    def positions(self, pos: Tensor) -> Tensor:
        return exact(pos) / self.factor

    def offsets(self, r: Tensor) -> Tensor:
        return self.positions(r)

    def first_at(self, limit: int) -> int:
        found = math.ceil(limit * self.factor)
        while found / self.factor < limit:  # the product was rounded down
            found += 1
        while (found - 1) / self.factor >= limit:
            found -= 1
        return found
