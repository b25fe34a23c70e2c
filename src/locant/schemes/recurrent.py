"""Recurrent positions: they start again at 0 after `length`. LongEmbed, Zhu et al. 2024, arXiv 2404.12096, section 4.

    p → p mod length        r → sign(r)·(|r| mod length)

A table of `length` rows then serves texts of any length. Positions repeat, so this map is not monotone: schemes that
need positions in the order of the tokens refuse it.
"""

from __future__ import annotations

from torch import Tensor

from locant.schemes.base import Scheme, check_int
from locant.schemes.map import Map


class Recurrent(Map):
    """Positions modulo `length`. Parameters: those of the scheme."""

    takes_reals = True

    def __init__(self, scheme: Scheme, /, *, length: int = 512) -> None:
        super().__init__(scheme)
        check_int(self, "length", length, at_least=1)
        self.length = length

    def positions(self, pos: Tensor) -> Tensor:
        return pos.remainder(self.length)
