"""What maps do to positions and offsets (SCHEME@MAP), as the reference has them. Nothing is shared with the library."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reliability.fuzz.problem import Options

FORMULAS = (
    "alibi", "cope", "fade", "fire", "fope", "grape", "kerple", "pope", "rope", "sandwich", "sinusoidal", "tisa",
    "tisa2", "xl", "xpos",
)  # fmt: skip
"""Schemes that are formulas: they take real positions and offsets. The tables of all others are interpolated."""


def positions(name: str, o: Options, pos: Tensor) -> Tensor:
    """The positions that a mapped scheme has, integers or float64."""
    if name == "interpolated":
        return pos.double() / o["factor"]
    if name == "grouped":
        return torch.div(pos, int(o["size"]), rounding_mode="floor")
    if name == "recurrent":
        length = int(o["length"])
        return pos - length * torch.div(pos, length, rounding_mode="floor")
    raise ValueError(f"{name} maps offsets, not positions")


def offsets(name: str, o: Options, r: Tensor) -> Tensor:
    """The offsets that a mapped scheme has: an odd function of r."""
    if name == "interpolated":
        return r.double() / o["factor"]
    distance, sign = r.abs(), torch.sign(r)
    if name == "selfextend":
        window, size = int(o["window"]), int(o["size"])
        beyond = window + torch.div(distance - window, size, rounding_mode="floor")
        return sign * torch.where(distance <= window, distance, beyond)
    return sign * positions(name, o, distance)


def far_positions(o: Options, q_pos: Tensor, k_pos: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The positions of SelfExtend beyond its window, for keys before (side = 1) or after the query (side = −1)."""
    shift = int(o["window"]) - int(o["window"]) // int(o["size"])
    queries, keys = (torch.div(pos, int(o["size"]), rounding_mode="floor") for pos in (q_pos, k_pos))
    return queries + side * shift, keys


def reach(name: str, o: Options, limit: int) -> int | None:
    """The distance from which on a map gives `limit` or more; None if it does not stay there."""
    if name == "recurrent":
        return None
    if name == "interpolated":
        return math.ceil(limit * o["factor"])
    if name == "grouped":
        return limit * int(o["size"])
    window, size = int(o["window"]), int(o["size"])
    return limit if limit <= window else window + (limit - window) * size
