"""Words and cells that several sections and the table in the terminal share."""

from __future__ import annotations

from collections.abc import Sequence

from locant.experiments.results import SchemeResult
from locant.experiments.tasks import Task

STATES = {"done": "finished", "failed": "failed", "begun": "under way", "new": "to come"}
"""The states of a run, as the page names them."""


def direction(task: Task) -> str:
    """Returns which direction of the metric is better."""
    return "higher is better" if task.higher_is_better else "lower is better"


def tested_lengths(rows: Sequence[SchemeResult], but: int) -> list[int]:
    """Returns all lengths that any scheme was tested at, except `but`."""
    return sorted({length for row in rows for length in (*row.by_length, *row.refused)} - {but})


def in_words(row: SchemeResult) -> str:
    """Returns the comparison of a scheme with the baseline, in a few words."""
    if row.baseline:
        return "baseline"
    if row.against is None or not row.finished:
        return "failed" if row.failed and len(row.failed) == row.wanted else "not finished"
    return row.against.verdict


def runs_of(row: SchemeResult) -> str:
    """Returns the number of finished and failed runs of a scheme."""
    failed = f", {len(row.failed)} failed" if row.failed else ""
    return f"{row.finished} of {row.wanted}{failed}"


def between(low: float | None, high: float | None, *, plus: bool = False) -> str:
    """Returns an interval as text, empty where there is none; `plus` is for differences, whose signs matter."""
    if low is None or high is None:
        return ""
    sign = "+" if plus else ""
    digits = 3 if plus else 4
    return f"{low:{sign}.{digits}g} … {high:{sign}.{digits}g}".replace("-", "−")


def difference_interval(row: SchemeResult) -> str:
    """Returns the interval of the difference to the baseline; empty for the baseline itself."""
    return "" if row.against is None else between(row.against.estimate.low, row.against.estimate.high, plus=True)
