"""The four methods of Huang et al. 2020, "Improve Transformer Models with Better Relative Position Embeddings",
Findings of EMNLP, arXiv 2009.13658. Everything is inside the logit scale; r is clipped to ±clip.

    method 1    (q_i·k_j) · a_|r|                     a scalar per distance
    method 2    (q_i·k_j) · a_r                       a scalar per offset
    method 3    Σ_t q_it k_jt a_rt                    a vector per offset, three-way product
    method 4    q_i·k_j + q_i·a_r + k_j·a_r           the same vector on both sides

Gains start at 1 and vectors near 0, so a pretrained model starts nearly as it was without positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_int, wide
from locant.schemes.table import rows, table_heads
from locant.terms import Terms


class Huang1(Scheme):
    """Scalar on q·k by |r| (method 1). Parameters: (clip + 1) · n_heads; (clip + 1) with heads=shared."""

    def __init__(self, *, clip: int = 64, heads: str = "own", n_heads: int) -> None:
        super().__init__()
        h = table_heads(self, clip, heads, n_heads)
        self.clip, self.heads, self.n_heads = clip, heads, n_heads
        self.table = nn.Parameter(torch.ones(h, clip + 1))  # row |r|

    @property
    def reach(self) -> int:
        return self.clip

    def terms(self, r: Tensor) -> Terms:
        return Terms(gain=wide(self.table)[:, r.abs().clamp(max=self.clip)])

    def parameter_count(self) -> int:
        return (1 if self.heads == "shared" else self.n_heads) * (self.clip + 1)


class Huang2(Scheme):
    """Scalar on q·k by r (method 2). Parameters: (2·clip + 1) · n_heads; (2·clip + 1) with heads=shared."""

    def __init__(self, *, clip: int = 64, heads: str = "own", n_heads: int) -> None:
        super().__init__()
        h = table_heads(self, clip, heads, n_heads)
        self.clip, self.heads, self.n_heads = clip, heads, n_heads
        self.table = nn.Parameter(torch.ones(h, 2 * clip + 1))

    @property
    def reach(self) -> int:
        return self.clip

    def terms(self, r: Tensor) -> Terms:
        return Terms(gain=rows(self.table, r, self.clip))

    def parameter_count(self) -> int:
        return (1 if self.heads == "shared" else self.n_heads) * (2 * self.clip + 1)


class _VectorTable(Scheme):
    """A vector of head_dim parameters per offset: the table of methods 3 and 4."""

    start: float  # mean of the initial values
    noise: float  # and their standard deviation

    def __init__(self, *, clip: int = 64, heads: str = "shared", n_heads: int, head_dim: int) -> None:
        super().__init__()
        h = table_heads(self, clip, heads, n_heads)
        check_int(self, "head_dim", head_dim, at_least=1)
        self.clip, self.heads = clip, heads
        self.n_heads, self.head_dim = n_heads, head_dim
        self.table = nn.Parameter(self.start + self.noise * torch.randn(h, 2 * clip + 1, head_dim))

    def parameter_count(self) -> int:
        return (1 if self.heads == "shared" else self.n_heads) * (2 * self.clip + 1) * self.head_dim


class Huang3(_VectorTable):
    """Vector on q·k by r (method 3). Parameters: (2·clip + 1) · head_dim; × n_heads with heads=own."""

    start, noise = 1.0, 0.0

    @property
    def reach(self) -> int:
        return self.clip

    def terms(self, r: Tensor) -> Terms:
        return Terms(gain=rows(self.table, r, self.clip))


class Huang4(_VectorTable):
    """Vector multiplied by q and k (method 4). Parameters: (2·clip + 1) · head_dim; × n_heads with heads=own."""

    start, noise = 0.0, 0.02

    @property
    def reach(self) -> int:
        return self.clip

    def terms(self, r: Tensor) -> Terms:
        vectors = rows(self.table, r, self.clip)
        return Terms(query=vectors, key=vectors)
