"""Scores along an axis (training step, input length or position), averaged over the seeds of a scheme."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from locant.experiments.results import RunResult
from locant.experiments.statistics import estimate

PARTS = 8
"""Number of bins per doubling beyond the trained length. Smaller bins would mostly show variation in the test text."""


@dataclass(frozen=True)
class Average:
    """The mean over runs at each x. `low` and `high` are its interval; both are None where every x has one run."""

    x: list[float]
    mean: list[float]
    low: list[float | None] | None
    high: list[float | None] | None


def average(runs: Sequence[Mapping[float, float]], *, interval: bool = False) -> Average | None:
    """Returns the mean over the runs that have an x, given x -> score of each; None where no run has any.

    The interval goes from the lowest run to the highest, or with `interval=True` is the 95 % interval of the mean.
    """
    places = sorted({x for run in runs for x in run})
    if not places:
        return None
    mean: list[float] = []
    low: list[float | None] = []
    high: list[float | None] = []
    several = False
    for x in places:
        values = [run[x] for run in runs if x in run]
        several = several or len(values) > 1
        at = estimate(values)
        finite = all(map(math.isfinite, values))
        mean.append(at.mean)
        low.append(at.low if interval else min(values) if finite else None)
        high.append(at.high if interval else max(values) if finite else None)
    return Average(places, mean, low if several else None, high if several else None)


def averaged_runs(found: list[RunResult], scheme: str) -> list[RunResult]:
    """Returns the finished runs of a scheme, or where none has finished, those with at least one logged step."""
    own = [each for each in found if each.run.scheme == scheme]
    return [each for each in own if each.state == "done"] or [each for each in own if each.steps]


def by_step(run: RunResult, key: str) -> dict[float, float]:
    """Returns step -> logged value."""
    return {row["step"]: float(row[key]) for row in run.steps if key in row}


def minus(run: Mapping[float, float], baseline: Mapping[float, float]) -> dict[float, float]:
    """Returns the difference of two runs at every x that both have."""
    return {x: value - baseline[x] for x, value in run.items() if x in baseline}


def by_length(run: RunResult, metric: str) -> dict[float, float]:
    """Returns length -> test score, for the lengths that the scheme can read."""
    return {row["length"]: row["values"][metric] for row in run.tests if metric in row["values"]}


def minus_trained(scores: Mapping[float, float], trained: int) -> dict[float, float]:
    """Returns the scores of a run by length, minus its score at the trained length."""
    return {length: score - scores[trained] for length, score in scores.items()}


def longest_read(run: RunResult) -> int | None:
    """Returns the largest tested length with a score for each position; None if there is none."""
    return max((row["length"] for row in run.tests if row["by_position"]), default=None)


def by_position(run: RunResult, length: int, trained: int) -> dict[float, float]:
    """Returns middle of a bin -> score there, in inputs of one length.

    The middle is used, because the first bin starts at 0, which a logarithmic axis cannot show. Beyond the trained
    length bins are joined: every doubling has PARTS of them.
    """
    parts: list[tuple[int, float]] = next((row["by_position"] for row in run.tests if row["length"] == length), [])
    if not parts:
        return {}
    ends = [*(start for start, _ in parts[1:]), length]
    joined: dict[int, list[tuple[int, int, float]]] = {}
    for (start, value), end in zip(parts, ends, strict=True):
        doublings = max(0, math.floor(math.log2(max(start, 1) / trained)))
        width = max(end - start, (trained << doublings) // PARTS)
        joined.setdefault(start - start % width, []).append((start, end, value))
    return {
        (its[0][0] + its[-1][1] + 1) / 2: math.fsum(value for *_, value in its) / len(its) for its in joined.values()
    }
