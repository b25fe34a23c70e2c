"""Longer inputs: scores by length and by position."""

from __future__ import annotations

from collections.abc import Mapping

from locant.experiments.averages import average, by_length, by_position, longest_read, minus_trained
from locant.experiments.comparison import Comparison
from locant.experiments.results import RunResult, SchemeResult
from locant.experiments.tasks import Task
from locant.report.comparison.cells import direction, tested_lengths
from locant.report.comparison.lines import lines, seeds_note
from locant.report.figures import Cell, Figure, Grid, Lines
from locant.report.page import Section

Runs = Mapping[str, list[RunResult]]


def lengths_section(comparison: Comparison, task: Task, found: list[RunResult], rows: list[SchemeResult]) -> Section:
    """Returns the section on inputs of other lengths; without those, on positions within the input."""
    trained = comparison.work.preset.length
    done = {
        scheme: [each for each in found if each.run.scheme == scheme and each.state == "done"]
        for scheme in comparison.schemes
    }
    figures: list[Figure] = []
    longer = tested_lengths(rows, but=trained)
    if longer and any(done.values()):
        figures += [*_by_length(task, trained, done), _table(task, rows)]
    figures += _by_position(task, trained, done, seeds_note(comparison, found))
    if not longer:
        return Section("By position", "The score by the position in the input.", tuple(figures))
    intro = f"Trained at {trained:,} tokens: the scores on inputs longer than any training input."
    return Section("Longer inputs", intro, tuple(figures))


def _marks(trained: int) -> tuple[tuple[float, str], ...]:
    return ((float(trained), "trained length"),)


def _by_length(task: Task, trained: int, done: Runs) -> list[Figure]:
    """The scores, and their change from the trained length."""
    seeds = "bars are 95 % intervals over seeds" if max(map(len, done.values())) > 1 else "one seed, no interval"
    scores = {scheme: [by_length(run, task.metric) for run in runs] for scheme, runs in done.items()}
    changes = {
        scheme: [minus_trained(run, trained) for run in runs if trained in run] for scheme, runs in scores.items()
    }
    metric, better = task.metric.capitalize(), direction(task)
    figures: list[Figure] = []
    for title, label, values, note in (
        (
            f"{metric} by length",
            f"{task.metric} ({better})",
            scores,
            f"Mean {task.metric} on test inputs of each length; {seeds}. Every length is made of the same test text. A "
            "scheme that extrapolates stays level or improves with more context; one that does not gets worse right of "
            "the mark. A scheme with a single dot has no positions beyond it.",
        ),
        (
            f"{metric} by length, minus that at {trained:,}",
            f"change in {task.metric} ({better})",
            changes,
            f"Each model minus itself at the trained length; {seeds}. Differences between seeds cancel, so the bars "
            f"are shorter than above. {'Above' if task.higher_is_better else 'Below'} 0, longer inputs help. A scheme "
            "that extrapolates stays near 0 or on the good side of it; otherwise the line departs from 0 within one or "
            "two doublings.",
        ),
    ):
        drawn = lines((scheme, at, average(runs, interval=True)) for at, (scheme, runs) in enumerate(values.items()))
        if drawn:
            axis = "length in tokens"
            figures.append(
                Lines(title, note, axis, label, drawn, log_x=True, marks=_marks(trained), whiskers=True),
            )
    return figures


def _table(task: Task, rows: list[SchemeResult]) -> Grid:
    lengths = tested_lengths(rows, but=0)
    cells: list[list[Cell]] = [[row.scheme, *(_at(row, length) for length in lengths)] for row in rows if row.finished]
    return Grid(
        f"Mean {task.metric} at each length",
        "In the order of the ranking at the trained length. Where the order changes from left to right, the best "
        "scheme depends on your lengths.",
        ("scheme", *(f"{length:,}" for length in lengths)),
        cells,
    )


def _at(row: SchemeResult, length: int) -> Cell:
    if length in row.refused:
        return f"cannot: {row.refused[length]}"
    return row.by_length[length].mean if length in row.by_length else None


def _by_position(task: Task, trained: int, done: Runs, seeds: str) -> list[Figure]:
    read = {scheme: [length for run in runs if (length := longest_read(run))] for scheme, runs in done.items()}
    drawn = lines(
        (scheme, at, average([by_position(run, min(read[scheme]), trained) for run in runs]))
        for at, (scheme, runs) in enumerate(done.items())
        if read[scheme]
    )
    if not drawn:
        return []
    metric = task.metric.capitalize()
    return [
        Lines(
            f"{metric} by position",
            f"{metric} at each position within the longest inputs that a scheme can read{seeds}. Right of the mark, "
            "positions are averaged in eight parts per doubling. The first tokens have little context and are the "
            "hardest; then the score should improve and stay. A scheme that turns worse at the mark fails at "
            "positions that it was never trained at. Wiggles that all schemes share come from the test text.",
            "position in the input (middle of each part)",
            f"{task.metric} ({direction(task)})",
            drawn,
            log_x=True,
            marks=_marks(trained),
        )
    ]
