"""DAPE: a small network turns the logits and biases of all heads into one more bias. Zheng et al. 2024.

    logit_h = s_h + b_h + MLP([s_1 … s_H, b_1 … b_H])_h        s = scale · q_i·k_j,  b = the bias at r, for each pair

arXiv 2405.14722. MLP(z) = W₂ LeakyReLU(W₁ z + c₁) + c₂ of `width` hidden units; `bias` is alibi or kerple (its
logarithmic form). W₂ and c₂ start at 0, so the scheme starts as its bias.

It is slow: the network runs for every pair of tokens, across the heads, and only the back ends `eager` and `sdpa`
compute it. Memory for its hidden units is width / n_heads times that of all logits. s is the product of unrotated
queries and keys: in a sum with `rope` the network does not see the rotation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locant.schemes.alibi import alibi_slopes
from locant.schemes.base import Scheme, check_choice, check_int, exact, wide
from locant.terms import Terms

LEAK = 0.01
"""Slope of LeakyReLU below 0."""


class Dape(Scheme):
    """A network over the heads of a pair. Parameters: (3·width + 1)·n_heads + width, and 2·n_heads of kerple."""

    def __init__(self, *, bias: str = "alibi", width: int = 32, n_heads: int) -> None:
        super().__init__()
        check_choice(self, "bias", bias, ("alibi", "kerple"))
        check_int(self, "width", width, at_least=1)
        check_int(self, "n_heads", n_heads, at_least=1)
        self.bias, self.width, self.n_heads = bias, width, n_heads
        if bias == "kerple":  # as in `kerple`
            self.p = nn.Parameter(2 * torch.rand(n_heads))
            self.a = nn.Parameter(torch.rand(n_heads))
        self.hidden = nn.Linear(2 * n_heads, width)
        self.out = nn.Linear(width, n_heads)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def terms(self, r: Tensor) -> Terms:
        # Taken here, not in `pair`: the backward pass calls `pair` again, perhaps after the parameters have changed.
        w1, b1, w2, b2 = map(wide, (self.hidden.weight, self.hidden.bias, self.out.weight, self.out.bias))
        at_distance = self._bias()

        def pair(q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float, visible: Tensor | None) -> Tensor:
            content = scale * (q @ k.mT)  # [B, H, Lq, Lk]
            distance = (k_pos[:, None, :] - q_pos[:, :, None]).abs()  # [B or 1, Lq, Lk]
            bias = at_distance(exact(distance)[:, None]).to(content.dtype).expand_as(content)
            heads = torch.cat([content, bias], dim=1).movedim(1, -1)  # [B, Lq, Lk, 2·H]
            hidden = F.leaky_relu(F.linear(heads, w1.to(heads.dtype), b1.to(heads.dtype)), LEAK)
            mixed = F.linear(hidden, w2.to(heads.dtype), b2.to(heads.dtype)).movedim(-1, 1)
            return bias + mixed

        return Terms(pair=pair)

    def _bias(self) -> Callable[[Tensor], Tensor]:
        """The bias [B, H, Lq, Lk] as a function of the distances [B, 1, Lq, Lk]."""
        if self.bias == "kerple":
            p, a = (wide(x).abs()[:, None, None] for x in (self.p, self.a))
            return lambda distance: -p * torch.log1p(a * distance)
        slopes = alibi_slopes(self.n_heads)
        return lambda distance: -distance * distance.new_tensor(slopes)[:, None, None]

    def parameter_count(self) -> int:
        return (3 * self.width + 1) * self.n_heads + self.width + (2 * self.n_heads if self.bias == "kerple" else 0)
