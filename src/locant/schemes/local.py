"""Local attention: a token attends to its neighbours, and to the first token. To be added to a scheme: `tisa+local`.

    logit_ij → logit_ij − 10⁴        where |r| > window, and neither i nor j is 0

No content overcomes 10⁴, so such a pair has the weight 0. With `first=true` the token at position 0 sees all tokens and
all tokens see it. Heads that find no match attend to it (Xiao et al. 2023, arXiv 2309.17453); without it, tokens beyond
the window of the first one have nowhere to look. Beltagy et al. 2020, arXiv 2004.05150, call it a global token.

An encoder that was trained on short texts then reads a long one, in one pass, as it reads its pieces. A query that sees
no key inside its window, because a mask hides them, attends to the others as if there were no window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locant.schemes.base import Scheme, check_bool, check_int
from locant.terms import Sides, Terms, Tokens

HIDDEN = 1e4
"""Subtracted from the logit of a pair that is too far apart. A larger number would cost digits of the logits."""


class Local(Scheme):
    """A limit on the distance. Parameters: 0."""

    has_levels = hides = True
    mappable = False

    def __init__(self, *, window: int = 128, first: bool = True) -> None:
        super().__init__()
        check_int(self, "window", window, at_least=0)
        check_bool(self, "first", first)
        self.window, self.first = window, first
        self.shift_invariant = not first

    @property
    def reach(self) -> int:
        return self.window + 1

    def terms(self, r: Tensor) -> Terms:
        return Terms(level=(r.abs() > self.window).float()[None])

    def sides(self, tokens: Tokens) -> Sides:
        queries, keys = (self._is_first(pos)[:, None].double() for pos in (tokens.q_pos, tokens.k_pos))
        # −HIDDEN, and 0 where either is first. If both are, the offset is 0 and the table has 0 there.
        return Sides(query_level=HIDDEN * (queries - 1), key_level=HIDDEN * keys)

    def _is_first(self, pos: Tensor) -> Tensor:
        return pos == 0 if self.first else torch.zeros_like(pos, dtype=torch.bool)
