"""Words and cells that several sections and the table in the terminal share."""

from __future__ import annotations

from collections.abc import Sequence

from locant.experiments.results import SchemeResult
from locant.experiments.tasks import Task
from locant.report.numerals import interval_texts

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


def score_intervals(rows: Sequence[SchemeResult]) -> list[str]:
    """Returns the column of the intervals of scores, empty where there is none."""
    return interval_texts([(row.score.low, row.score.high) for row in rows])


def difference_intervals(rows: Sequence[SchemeResult]) -> list[str]:
    """Returns the column of the intervals of differences to the baseline; empty for the baseline itself."""
    gaps = [None if row.against is None else (row.against.estimate.low, row.against.estimate.high) for row in rows]
    return interval_texts(gaps, plus=True)
