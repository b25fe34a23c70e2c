"""The offsets r = key position − query position of a call, and the column of a table for each pair."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from locant.schemes.base import readable

FARTHEST = 2**62
"""Positions of a call are at most this far apart: sums of offsets must fit into int64."""


@dataclass(frozen=True)
class Offsets:
    """The offsets r of a call, and for every (query, key) its column: r[column] = k_pos − q_pos.

    Consecutive offsets are lo … lo + count − 1, and `listed` and `inverse` are None.
    """

    lo: int  # the first offset
    count: int
    device: torch.device
    listed: Tensor | None = None  # [R], the offsets if they are not consecutive
    inverse: Tensor | None = None  # [B or 1, Lq, Lk], the column of every pair if they are not consecutive
    # So many offsets of the call are before lo, beyond the reach of the scheme. 0 in compiled code and for positions of
    # the caller's own, which may be billions apart.
    beyond: int = 0

    @property
    def end(self) -> int:
        """The offset after the last, for consecutive offsets."""
        return self.lo + self.count

    @property
    def r(self) -> Tensor:
        """All offsets, [R]; none beyond the reach of the scheme."""
        return torch.arange(self.lo, self.end, device=self.device) if self.listed is None else self.listed

    def columns(self, q_pos: Tensor, k_pos: Tensor, rows: slice) -> Tensor:
        """The column of every pair of these query rows, [B or 1, rows, Lk]."""
        if self.inverse is not None:
            return self.inverse[:, rows]
        return (k_pos[:, None, :] - q_pos[:, rows, None] - self.lo).clamp(0, self.count - 1)


def find_offsets(
    positions: tuple[Tensor, Tensor] | None, lq: int, lk: int, device: torch.device, reach: int | None
) -> Offsets:
    """The offsets of a call. Positions that are None are consecutive: keys 0 … lk−1, queries the last lq."""
    if positions is None or lq == 0 or any(pos.shape[0] == 0 for pos in positions):  # no values to read
        return _between(1 - lk, lq - 1 if lq else 1 - lk, device, reach, default=True)
    q_pos, k_pos = positions
    known = readable(q_pos) and readable(k_pos)
    if not known and reach is not None:
        return _between(-reach, reach, device, reach)
    if not known:  # a column for every pair
        r = k_pos[:, None, :] - q_pos[:, :, None]
        return Offsets(0, r.numel(), device, r.flatten(), torch.arange(r.numel(), device=device).view(r.shape))
    if lq == 1:  # the same in fewer operators: a decoding step
        lo, hi = map(int, torch.aminmax(k_pos - q_pos))
    else:
        lo = int((k_pos.amin(-1) - q_pos.amax(-1)).min())
        hi = int((k_pos.amax(-1) - q_pos.amin(-1)).max())
    if not -FARTHEST <= lo <= hi <= FARTHEST:  # beyond int64 a difference changes its sign
        raise ValueError("positions of queries and keys are more than 2**62 apart; pass positions closer to each other")
    # Tables over all of a range with large gaps would be mostly unused, and may not fit into memory.
    if hi - lo < 4 * (lq + lk) or reach is not None:
        return _between(lo, hi, device, reach)
    r, inverse = torch.unique(k_pos[:, None, :] - q_pos[:, :, None], return_inverse=True)
    return Offsets(int(r[0]), r.shape[0], device, r, inverse)


def _between(lo: int, hi: int, device: torch.device, reach: int | None, default: bool = False) -> Offsets:
    """The offsets lo … hi; none beyond the reach, where terms do not change: `columns` takes the last column there."""
    if reach is None:
        return Offsets(lo, hi + 1 - lo, device)
    if torch.compiler.is_compiling():
        first, last = (torch.sym_min(torch.sym_max(x, -reach), reach) for x in (lo, hi))
        return Offsets(first, last + 1 - first, device)
    first, last = min(max(lo, -reach), reach), min(max(hi, -reach), reach)
    return Offsets(first, last + 1 - first, device, beyond=max(first - lo, 0) if default else 0)
