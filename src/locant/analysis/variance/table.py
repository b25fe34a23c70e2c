"""The table that theory and measurement share, and two numbers read from it: `slope` and `meets_floor`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from locant.analysis.steps import ATTENTION, INPUT

PLAIN, CORRECTED, MEASURED = "plain", "corrected", "measured"


@dataclass(frozen=True)
class VarianceRow:
    """The variance after one step of one layer (from 1), at positions 1, 2, 3, …"""

    layer: int
    step: str
    source: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Variances:
    """A table of variances: theory, measurement, or both."""

    rows: tuple[VarianceRow, ...]

    def row(self, layer: int, step: str, source: str) -> VarianceRow:
        """Returns one row; KeyError if the table does not have it."""
        for row in self.rows:
            if (row.layer, row.step, row.source) == (layer, step, source):
                return row
        has = sorted({(row.step, row.source) for row in self.rows if row.layer == layer})
        raise KeyError(f"there is no {source} {step!r} of layer {layer}; this layer has {has}")

    def records(self) -> list[dict[str, str | int | float]]:
        """Returns the long form, for a csv file."""
        return [
            {"layer": row.layer, "step": row.step, "source": row.source, "m": m, "variance": value}
            for row in self.rows
            for m, value in enumerate(row.values, start=1)
        ]


def slope(row: VarianceRow, first: int = 1, last: int | None = None) -> float:
    """Returns the slope of log variance against log m from position `first` to `last`. Octaves have equal weight.

    It is −1 in the first layer of the plain theory, and 0 where position has no effect.
    """
    last = len(row.values) if last is None else last
    if not 1 <= first < last <= len(row.values):
        raise ValueError(f"first and last must be a range within 1 … {len(row.values)}; got {first} and {last}")
    values = torch.tensor(row.values[first - 1 : last], dtype=torch.float64)
    if not (values > 0).all():
        raise ValueError(
            f"a slope needs positive variances; {row.source} {row.step!r} of layer {row.layer} has some that are not "
            f"positive"
        )
    m = torch.arange(first, last + 1, dtype=torch.float64)
    x, y, weight = m.log(), values.log(), 1 / m / (1 / m).sum()
    x, y = x - (weight * x).sum(), y - (weight * y).sum()
    return float((weight * x * y).sum() / (weight * x * x).sum())


def meets_floor(variances: Variances, layer: int, source: str) -> int | None:
    """Returns the first position where the variance of the attention output is at most that of the layer's input.

    None if there is no such position.
    """
    signal = variances.row(layer, ATTENTION, source).values
    floor = variances.row(layer, INPUT, source).values
    return next((m for m, (a, b) in enumerate(zip(signal, floor, strict=True), start=1) if a <= b), None)
