"""The table that theory and measurement share, and what it says."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from locant.analysis.steps import ATTENTION, INPUT

PLAIN, CORRECTED, MEASURED = "plain", "corrected", "measured"


@dataclass(frozen=True)
class Row:
    """The variance after one step of one layer (from 1), at positions 1, 2, 3, …"""

    layer: int
    step: str
    source: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Variances:
    rows: tuple[Row, ...]

    def row(self, layer: int, step: str, source: str) -> Row:
        for row in self.rows:
            if (row.layer, row.step, row.source) == (layer, step, source):
                return row
        has = sorted({(row.step, row.source) for row in self.rows if row.layer == layer})
        raise KeyError(f"no {source} {step!r} of layer {layer}; of this layer there are {has}")

    def records(self) -> list[dict[str, str | int | float]]:
        """Long form, for a csv file."""
        return [
            {"layer": row.layer, "step": row.step, "source": row.source, "m": m, "variance": value}
            for row in self.rows
            for m, value in enumerate(row.values, start=1)
        ]


def slope(row: Row, first: int = 1, last: int | None = None) -> float:
    """The slope of log variance against log m from position `first` to `last`, where every octave counts the same.

    −1 for the first layer of the plain theory, 0 where position does not show.
    """
    last = len(row.values) if last is None else last
    if not 1 <= first < last <= len(row.values):
        raise ValueError(f"positions {first} to {last} are not a range within 1 … {len(row.values)}")
    values = torch.tensor(row.values[first - 1 : last], dtype=torch.float64)
    if not (values > 0).all():
        raise ValueError(f"{row.source} {row.step!r} of layer {row.layer} has variances that are not positive")
    m = torch.arange(first, last + 1, dtype=torch.float64)
    x, y, weight = m.log(), values.log(), 1 / m / (1 / m).sum()
    x, y = x - (weight * x).sum(), y - (weight * y).sum()
    return float((weight * x * y).sum() / (weight * x * x).sum())


def meets_floor(variances: Variances, layer: int, source: str) -> int | None:
    """The first position where the attention output has no more variance than what it is added to; None if nowhere."""
    signal = variances.row(layer, ATTENTION, source).values
    floor = variances.row(layer, INPUT, source).values
    return next((m for m, (a, b) in enumerate(zip(signal, floor, strict=True), start=1) if a <= b), None)
