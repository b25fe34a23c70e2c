"""FoX, the forgetting transformer: every token has a forget gate, and the log-gates between two tokens are their bias.

    logit_ij = scale · q_i·k_j + c_i − c_j        c_i = Σ_{l ≤ i} ln σ(w_h·x_l + b_h)        j ≤ i

Lin et al. 2025, arXiv 2503.02130. The gates are read from the hidden state, so `attend` needs x of the keys. The bias
is the sum of the log-gates of the tokens after j, up to and including i: a token sees itself without decay. For j > i
the formula would reward distance, so attention must be causal. `two_sided=true` is the form for encoders,

    logit_ij = scale · q_i·k_j − |c_i − c_j|

This form is ours and in no paper. It equals FoX for j ≤ i. The gate of the later of two tokens counts and that of the
earlier does not, so a text read backwards has other biases.

**Order.** If the positions of a row are all different, gates are summed in the order of the positions. If some repeat
(packed sequences, left padding), they are summed in the order given. Where such positions decrease, they must return to
the smallest position of the row: a new sequence starts. Anything else raises ValueError, except in compiled code.
Sequences that share a row need a mask. Tokens that the mask hides from all queries of a call, such as padding, have no
gate. Keys that are dropped from the middle of a cache take their gates with them, which would weaken the decay: a
swapped model notices by the number of keys and raises. `attend` itself sees only the keys that it gets.

**Precision.** The log-gates are float32 or wider and their sums float64. For n tokens the error of c_i − c_j is below
n² · 2⁻⁵³ · max |ln σ|: with log-gates of −1, 1e-6 after 100,000 tokens in the worst case. For random gates the largest
error of 100,000 tokens was 1.3e-9 (tests/schemes/test_frontier.py); sums in float32 are wrong by 6e-3.

**Start.** w = 0 and b such that the gates of a head are e^(−1/T) with T from 16 to 1,024 tokens: ALiBi with slopes 1/T.
With b = 0, half of everything would be forgotten with every token.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_bool, check_int, exact, readable, wide
from locant.schemes.decay_lengths import decay_lengths
from locant.terms import Sides, Terms, Tokens


class Fox(Scheme):
    """Forget gates, read from the tokens. Parameters: (d_model + 1) · n_heads."""

    reads_keys = True
    read_width = 1
    read_parameters = ("gate", "bias")
    has_levels = True
    mappable = False
    pairwise = False  # the gates between two tokens count

    def __init__(self, *, two_sided: bool = False, n_heads: int, d_model: int) -> None:
        super().__init__()
        check_bool(self, "two_sided", two_sided)
        check_int(self, "n_heads", n_heads, at_least=1)
        check_int(self, "d_model", d_model, at_least=1)
        self.two_sided, self.n_heads, self.d_model = two_sided, n_heads, d_model
        self.causal_only = not two_sided
        self.gate = nn.Parameter(torch.zeros(n_heads, d_model))
        # ln σ(b) = −1/T
        self.bias = nn.Parameter(torch.tensor([-math.log(math.expm1(1 / t)) for t in decay_lengths(n_heads)]))

    @property
    def reach(self) -> int:
        return 1

    def terms(self, r: Tensor) -> Terms:
        if not self.two_sided:
            return Terms()
        return Terms(level=(1.0 - 2.0 * (r > 0).to(torch.float32))[None])

    def read(self, x: Tensor) -> Tensor:
        x, weight = wide(x), wide(self.gate)
        dtype = torch.promote_types(x.dtype, weight.dtype)
        gates = F.logsigmoid(F.linear(x.to(dtype), weight.to(dtype), wide(self.bias).to(dtype)))
        return gates.transpose(1, 2).unsqueeze(-1)  # [B, H, L, 1]

    def sides(self, tokens: Tokens) -> Sides:
        assert tokens.read_k is not None
        gates = exact(tokens.read_k[..., 0])
        if tokens.hidden is not None:  # padding between two tokens is not there
            gates = gates.masked_fill(tokens.hidden[:, None], 0.0)
        if tokens.positions is None:
            of_queries, of_keys = _by_index(gates, tokens.q.shape[2])
        else:
            of_queries, of_keys = cumulated(gates, *tokens.positions, str(self))
        return Sides(query_level=of_queries, key_level=of_keys.neg_())

    def parameter_count(self) -> int:
        return (self.d_model + 1) * self.n_heads

    def parameter_scale(self, name: str) -> float:
        """A change of 1/√d_model in w changes the gate like a change of 1 in b, for hidden states of size 1."""
        return 1 / math.sqrt(self.d_model) if name == "gate" else 1.0


def cumulated(gates: Tensor, q_pos: Tensor, k_pos: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Returns c of the queries [B, H, Lq] and of the keys [B, H, Lk], from log-gates [B, H, Lk] of the keys.

    Both are new tensors. Positions are [B or 1, L]. `name` is that of the scheme, for errors.
    """
    known, rows = readable(q_pos) and readable(k_pos), max(len(q_pos), len(k_pos))
    q_pos, k_pos = (x.expand(rows, -1) for x in (q_pos, k_pos))
    if known and bool((k_pos.diff(dim=-1) > 0).all()):
        return _by_position(gates, q_pos, k_pos, None)
    ordered, order = k_pos.sort(dim=-1, stable=True)
    distinct = (ordered.diff(dim=-1) > 0).all(-1)  # [B or 1]
    if known and not bool(distinct.all()):
        _check_restarts(q_pos, k_pos, distinct, name)
    by_position = _by_position(gates, q_pos, ordered, order)
    if (known and bool(distinct.all())) or q_pos.shape[-1] > k_pos.shape[-1]:
        return by_position
    by_index = _by_index(gates, q_pos.shape[-1])
    of_queries, of_keys = (
        torch.where(distinct[:, None, None], *both) for both in zip(by_position, by_index, strict=True)
    )
    return of_queries, of_keys


def _by_index(gates: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """In the order given; the queries are the last of the keys."""
    sums = gates.cumsum(-1)
    return sums[..., sums.shape[-1] - queries :].clone(), sums


def _by_position(gates: Tensor, q_pos: Tensor, ordered: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor]:
    """In the order of the positions, which are all different; a query has the sum up to its own position."""
    if order is not None:
        gates = gates.gather(-1, _heads(order, gates))
    sums = gates.cumsum(-1)
    before = torch.searchsorted(ordered.contiguous(), q_pos.expand(len(ordered), -1).contiguous(), right=True)
    padded = F.pad(sums, (1, 0))
    of_queries = padded.gather(-1, _heads(before, padded))
    if order is None:
        return of_queries, sums
    back = order.argsort(dim=-1)
    return of_queries, sums.gather(-1, _heads(back, sums))


def _heads(index: Tensor, like: Tensor) -> Tensor:
    """[B or 1, L] as an index into the last dimension of [B, H, Lk]."""
    return index[:, None].expand(like.shape[0], like.shape[1], -1)


def _check_restarts(q_pos: Tensor, k_pos: Tensor, distinct: Tensor, name: str) -> None:
    """ValueError where positions repeat and the order of the tokens is not clear, or not that of the queries."""
    repeated = ~distinct[:, None]
    down = k_pos.diff(dim=-1) < 0
    astray = down & (k_pos[:, 1:] != k_pos.amin(-1, keepdim=True)) & repeated
    if bool(astray.any()):
        row = k_pos[int(astray.any(-1).nonzero()[0])].tolist()
        shown = ", ".join(map(str, row[:12])) + (", …" if len(row) > 12 else "")
        raise ValueError(
            f"{name} sums over the tokens in the order of their positions, which is not defined for the positions "
            f"{shown}: some repeat, and they decrease to another than the smallest. Pass positions that are all "
            f"different, or that decrease only to the smallest"
        )
    lq, lk = q_pos.shape[-1], k_pos.shape[-1]
    if lq > lk or bool(((q_pos != k_pos[:, lk - lq :]) & repeated).any()):
        raise ValueError(
            f"{name}: the positions of the keys repeat, so each query must be one of the last keys; got {lq} queries "
            f"at other positions than the last of {lk} keys. Pass q_pos equal to the last of k_pos, or keys at "
            f"different positions"
        )
