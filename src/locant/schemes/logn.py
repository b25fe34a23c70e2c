"""A temperature that grows with the logarithm of the position, to be added to any scheme: `rope+logn`.

    logit_ij → τ_i · logit_ij        τ_i = max(1, ln(i + 1) / ln n0)

i + 1 is the number of keys that a causal query at position i sees, and n0 the length of training: attention over more
keys stays as sharp as it was. Su 2021 (kexue.fm 8823), with the number of keys of each query as in Qwen. It multiplies
the whole logit, biases of other schemes included. Positions below n0, negative ones too, have τ = 1.

With `learned=true` each head has a factor s, which starts at 1: τ_i = 1 + s_h · (max(1, ln(i + 1) / ln n0) − 1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_bool, check_int, exact, wide
from locant.terms import Sides, Tokens


class Logn(Scheme):
    """Sharper attention at later positions. Parameters: 0; n_heads with learned=true."""

    shift_invariant = False
    mappable = False

    def __init__(self, *, n0: int = 512, learned: bool = False, n_heads: int) -> None:
        super().__init__()
        check_int(self, "n0", n0, at_least=2)
        check_bool(self, "learned", learned)
        check_int(self, "n_heads", n_heads, at_least=1)
        self.n0, self.learned, self.n_heads = n0, learned, n_heads
        if learned:
            self.strength = nn.Parameter(torch.ones(n_heads))

    def sides(self, tokens: Tokens) -> Sides:
        return Sides(temperature=self.temperature(tokens.q_pos))

    def temperature(self, pos: Tensor) -> Tensor:
        """Returns τ at positions [B or 1, L]: [B or 1, 1 or H, L]."""
        keys = exact(pos + 1).clamp(min=1.0)
        growth = (torch.log(keys) / math.log(self.n0)).clamp(min=1.0)[:, None]
        return 1 + wide(self.strength)[:, None] * (growth - 1) if self.learned else growth

    def parameter_count(self) -> int:
        return self.n_heads if self.learned else 0
