"""Schemes with terms of each token, for attention.py: side vectors, levels and temperatures that are given.

They are the attention of `inkling`, `fox` and `logn` without the projections of hidden states, and beside them the
dense bias [B, H, L, L] that transformers gathers for Inkling, on the same tensors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import locant
from locant.analysis import speed
from locant.terms import Sides, Terms, Tokens

EXTENT, WIDTH = 1024, 16


class Vectors(locant.Scheme):
    """Inkling: every query mixes WIDTH curves over the distance, which are 0 from EXTENT on and for later keys."""

    reach = EXTENT
    cacheable = True

    def __init__(self, batch: int, heads: int, queries: int) -> None:
        super().__init__()
        self.mixture = torch.nn.Parameter(torch.randn(batch, heads, queries, WIDTH))
        self.curves = torch.nn.Parameter(torch.randn(EXTENT, WIDTH))

    def terms(self, r: Tensor) -> Terms:
        inside = (r <= 0) & (r > -EXTENT)
        return Terms(query_side=(self.curves[(-r).clamp(0, EXTENT - 1)] * inside[:, None])[None])

    def sides(self, tokens: Tokens) -> Sides:
        return Sides(query=self.mixture)

    def dense(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same by a bias for every pair, causal."""
        lq, lk, scale = q.shape[2], k.shape[2], q.shape[3] ** -0.5
        distance = torch.arange(lk - lq, lk)[:, None] - torch.arange(lk)
        inside = (distance >= 0) & (distance < EXTENT)
        by_distance = scale * self.mixture @ self.curves.T
        column = distance.clamp(0, EXTENT - 1).expand(*by_distance.shape[:2], -1, -1)
        bias = by_distance.gather(-1, column).masked_fill(~inside, 0.0).masked_fill(distance < 0, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class Levels(locant.Scheme):
    """FoX: sums of log-gates."""

    def __init__(self, batch: int, heads: int, queries: int, keys: int) -> None:
        super().__init__()
        self.queries = queries
        self.gates = torch.nn.Parameter(-torch.rand(batch, heads, keys) / 100)

    def sides(self, tokens: Tokens) -> Sides:
        total = self.gates.double().cumsum(-1)
        return Sides(query_level=total[..., -self.queries :], key_level=-total)


class Temperature(locant.Scheme):
    """A temperature of every query."""

    def __init__(self, queries: int) -> None:
        super().__init__()
        self.temperature = torch.nn.Parameter(1 + torch.rand(1, 1, queries))

    def sides(self, tokens: Tokens) -> Sides:
        return Sides(temperature=self.temperature)


def timed_sides(batch: int, heads: int, length: int, size: int, causal: bool) -> dict[str, speed.TimedAttention]:
    """The attentions of a comparison at one length, by name."""
    tisa = locant.scheme("tisa", n_heads=heads, head_dim=size)
    vectors = Vectors(batch, heads, length)
    schemes = {
        "side vectors (inkling)": vectors,
        "tisa": tisa,
        "tisa, temperature": locant.schemes.Sum(tisa, Temperature(length)),
    }
    if causal:
        schemes["levels (fox)"] = Levels(batch, heads, length, length)
    found = {
        f"{name}, causal" if causal else name: speed.with_scheme(each, causal=causal) for name, each in schemes.items()
    }
    return {**found, "peer: inkling's bias of every pair, causal": vectors.dense} if causal else found


def decoded_sides(batch: int, heads: int, length: int, size: int) -> dict[str, speed.TimedAttention]:
    """The attentions of one query against `length` keys, by name."""
    schemes = {"side vectors (inkling)": Vectors(batch, heads, 1), "levels (fox)": Levels(batch, heads, 1, length)}
    return {name: speed.with_scheme(each, causal=True) for name, each in schemes.items()}
