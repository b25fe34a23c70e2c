"""CoPE: positions counted by content. Golovneva et al. 2024, arXiv 2405.18719.

    gate_it = σ(scale · q_i·k_t)        p_ij = Σ_{t ≥ j, visible to i} gate_it        logit_ij += q_i·table[p_ij]

p is clipped at positions − 1, and the table is interpolated linearly between integers. In causal attention t runs from
j to i. If a query also attends to later keys, t runs to the last of them, as in the published code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_int, exporting, wide
from locant.schemes.table import table_heads
from locant.terms import Terms


class Cope(Scheme):
    """Contextual positions. Parameters: positions · head_dim, × n_heads with heads=own. Starts without effect."""

    pairwise = False
    takes_reals = ordered = True

    def __init__(self, *, positions: int = 64, heads: str = "shared", n_heads: int, head_dim: int) -> None:
        super().__init__()
        check_int(self, "positions", positions, at_least=2)
        check_int(self, "head_dim", head_dim, at_least=1)
        self.positions, self.heads = positions, heads
        self.n_heads, self.head_dim = n_heads, head_dim
        self.table = nn.Parameter(torch.zeros(table_heads(self, 1, heads, n_heads), positions, head_dim))

    def terms(self, r: Tensor) -> Terms:
        # Taken here, not in `pair`: the backward pass calls `pair` again, perhaps after the parameter has changed.
        table, last = wide(self.table), self.positions - 1

        def pair(q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float, visible: Tensor | None) -> Tensor:
            gates = torch.sigmoid(scale * (q @ k.mT))  # [B, H, Lq, Lk]
            if visible is not None:
                gates = gates * visible
            # Sort keys by position, then sum backwards from the last. Keys with the same position have the same sum:
            # `first` is the index at which the position of a key begins in sorted order.
            order = k_pos.argsort(dim=-1)  # [B or 1, Lk]
            if exporting():  # ONNX has no searchsorted
                first = (k_pos[:, None, :] < k_pos[:, :, None]).sum(-1)
            else:
                first = torch.searchsorted(k_pos.gather(-1, order), k_pos.contiguous())
            gates = gates.gather(-1, _as_keys(order, gates))
            counted = gates.flip(-1).cumsum(-1).flip(-1).gather(-1, _as_keys(first, gates)).clamp(max=last)

            at_whole = q @ table.to(q.dtype).mT  # [B, H, Lq, positions]
            below = counted.detach().floor()
            part = counted - below
            above = (below.long() + 1).clamp(max=last)
            return at_whole.gather(-1, below.long()) * (1 - part) + at_whole.gather(-1, above) * part

        return Terms(pair=pair)

    def parameter_count(self) -> int:
        return (1 if self.heads == "shared" else self.n_heads) * self.positions * self.head_dim


def _as_keys(index: Tensor, like: Tensor) -> Tensor:
    """Expands [B or 1, Lk] to an index into the last dimension of [B, H, Lq, Lk]."""
    return index[:, None, None, :].expand_as(like)
