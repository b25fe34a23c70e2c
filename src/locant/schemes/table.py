"""Clipped tables over offsets (Shaw, Huang): one row per offset, and the last row for all offsets beyond `clip`."""

from __future__ import annotations

from torch import Tensor

from locant.schemes.base import Scheme, check_choice, check_int, wide

HEADS = ("shared", "own")


def table_heads(scheme: Scheme, clip: int, heads: str, n_heads: int) -> int:
    """Checks the options of a table and returns its number of heads: 1 if all heads share it, else n_heads."""
    check_int(scheme, "clip", clip, at_least=1)
    check_choice(scheme, "heads", heads, HEADS)
    check_int(scheme, "n_heads", n_heads, at_least=1)
    return 1 if heads == "shared" else n_heads


def rows(table: Tensor, r: Tensor, clip: int) -> Tensor:
    """Returns [H, R(, D)] from a table [H, 2·clip + 1(, D)] whose first row is r = −clip."""
    return wide(table)[:, r.clamp(-clip, clip) + clip]
