"""Which is best: the ranked table, and the differences to the baseline."""

from __future__ import annotations

from locant.experiments.comparison import Comparison
from locant.experiments.results import SchemeResult, gaps
from locant.experiments.tasks import Task
from locant.report.comparison.cells import difference_intervals, direction, in_words, runs_of, score_intervals
from locant.report.figures import Cell, Figure, Grid, Interval, Intervals
from locant.report.page import Section


def ranking_section(comparison: Comparison, task: Task, rows: list[SchemeResult]) -> Section:
    """Returns the section with the ranking at the trained length."""
    figures: list[Figure] = [_table(comparison, task, rows)]
    baseline = next(row for row in rows if row.baseline)
    compared = tuple(
        Interval(
            row.scheme,
            row.against.estimate.mean,
            row.against.estimate.low,
            row.against.estimate.high,
            points=gaps(row, baseline),
            word=row.against.verdict,
            colour=comparison.schemes.index(row.scheme),
        )
        for row in rows
        if row.against is not None and row.against.estimate.count
    )
    if compared:
        figures.append(_differences(comparison, task, compared))
    intro = (
        f"Best first, by the mean {task.metric} at the trained length over the seeds that have finished. The baseline "
        f"is {comparison.schemes[0]}, the first scheme of the command."
    )
    return Section("Which is best", intro, tuple(figures))


def _table(comparison: Comparison, task: Task, rows: list[SchemeResult]) -> Grid:
    noisy = any(row.noise is not None for row in rows)
    header = ["scheme", task.metric, "95 % interval", f"minus {comparison.schemes[0]}", "its interval", "in words",
              *(["± test set"] if noisy else []), "parameters", "s/step", "MB", "runs"]  # fmt: skip
    cells: list[list[Cell]] = [
        [
            row.scheme,
            row.score.mean,
            interval,
            None if row.against is None else row.against.estimate.mean,
            of_difference,
            in_words(row),
            *([None if row.noise is None else NORMAL * row.noise] if noisy else []),
            row.parameters,
            row.seconds_per_step,
            None if row.memory_mb is None else round(row.memory_mb),
            runs_of(row),
        ]
        for row, interval, of_difference in zip(rows, score_intervals(rows), difference_intervals(rows), strict=True)
    ]
    note = (
        f"Mean {task.metric} over seeds, {direction(task)}, with its 95 % interval, and the difference to the "
        "baseline, seed by seed. Intervals are over seeds: they tell how much another training would change the score "
        f"on the same test set. {_on_noise(noisy)}Parameters are those of the scheme: the model has this many more "
        "than without positions. Seconds per step and peak memory are those of the machine that ran training and test. "
        "They are comparable only if nothing else ran there; differences of a few per cent between schemes are normal."
    )
    return Grid("Ranked", note, header, cells)


def _on_noise(noisy: bool) -> str:
    if not noisy:
        return "They do not contain the noise of the test set. "
    return (
        "Other test examples would change it too: ± test set is the half of a 95 % interval of one run, by a bootstrap "
        "over the test examples. All schemes are tested on the same examples, so differences between them have less of "
        "this noise. A difference far below it may not hold on other data. "
    )


NORMAL = 1.96
"""Standard errors in the half of a 95 % interval."""


def _differences(comparison: Comparison, task: Task, compared: tuple[Interval, ...]) -> Intervals:
    baseline = comparison.schemes[0]
    note = (
        f"{task.metric.capitalize()} minus that of {baseline} with the same seed, which has the same data in the same "
        f"order and the same initial weights. {direction(task).capitalize()}, so "
        f"{'right' if task.higher_is_better else 'left'} of 0 is good. A tick is one seed, the dot their mean"
    )
    if any(row.low is not None for row in compared):
        note += (
            ", the bar the 95 % interval of the mean (Student's t). A bar that contains 0 shows no difference; with "
            "two or three seeds bars are long. Each bar is a test of its own: among twenty schemes without any "
            "difference, expect one bar not to contain 0, by chance."
        )
    else:
        note += ". With one seed there is no interval: another seed may well reverse the order."
    return Intervals(f"Difference to {baseline}", note, f"difference in {task.metric}", compared)
