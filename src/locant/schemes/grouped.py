"""Grouped positions: tokens in a row share a position. LongEmbed, Zhu et al. 2024, arXiv 2404.12096, section 4.

    p → ⌊p / size⌋        r → sign(r)·⌊|r| / size⌋

For rotations the offset of a pair becomes ⌊j / size⌋ − ⌊i / size⌋, which depends on where the groups begin. For tables
it is a function of r. The offsets of rotations and of tables differ by at most one.
"""

from __future__ import annotations

from torch import Tensor

from locant.schemes.base import Scheme, check_int
from locant.schemes.map import Map, floor_divided


class Grouped(Map):
    """Groups of `size` tokens share a position. Parameters: those of the scheme."""

    monotone = takes_reals = True

    def __init__(self, scheme: Scheme, /, *, size: int = 4) -> None:
        super().__init__(scheme)
        check_int(self, "size", size, at_least=1)
        self.size, self.linear = size, size == 1

    def positions(self, pos: Tensor) -> Tensor:
        return floor_divided(pos, self.size)

    def first_at(self, limit: int) -> int:
        return limit * self.size
