"""Averages over seeds as the lines of a figure."""

from __future__ import annotations

from collections.abc import Iterable

from locant.experiments.averages import Average, averaged_runs
from locant.experiments.comparison import Comparison
from locant.experiments.results import RunResult
from locant.report.figures import Series, shortened


def lines(averages: Iterable[tuple[str, int, Average | None]]) -> tuple[Series, ...]:
    """Returns one line for each (name, colour, average); names without an average have none."""
    return tuple(_line(name, colour, average) for name, colour, average in averages if average is not None)


def _line(name: str, colour: int, average: Average) -> Series:
    mean, low, high = (
        None if values is None else [shortened(value) for value in values]
        for values in (average.mean, average.low, average.high)
    )
    return Series(name, average.x, mean or [], low, high, colour=colour)


def seeds_note(comparison: Comparison, found: list[RunResult]) -> str:
    """Returns the part of a note that names the line and the band."""
    several = any(len(averaged_runs(found, scheme)) > 1 for scheme in comparison.schemes)
    return ", mean over seeds; the band goes from the lowest seed to the highest" if several else ", one seed"
