"""The ranked table in the terminal, as wide as the terminal allows."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from locant.experiments.comparison import Comparison
from locant.experiments.results import SchemeResult
from locant.experiments.tasks import find_task
from locant.report.comparison.cells import difference_intervals, in_words, runs_of, score_intervals, tested_lengths
from locant.report.figures import Cell
from locant.report.numerals import column_texts


def terminal_table(comparison: Comparison, rows: list[SchemeResult], sentences: list[str], width: int) -> Group:
    """Returns the ranked table and the sentences on it; a narrow terminal lacks the least important columns."""
    metric = find_task(comparison.work.task).metric
    longer = tested_lengths(rows, but=comparison.work.preset.length)
    minus = f"− {comparison.schemes[0]}"
    columns: dict[str, list[str]] = {
        "scheme": [row.scheme for row in rows],
        metric: column_texts([row.score.mean for row in rows]),
        "95 % interval": score_intervals(rows),
        minus: column_texts(["" if row.against is None else row.against.estimate.mean for row in rows], plus=True),
        "its interval": difference_intervals(rows),
        "in words": [in_words(row) for row in rows],
        **{f"at {length:,}": column_texts([_at(row, length) for row in rows]) for length in longer},
        "runs": [runs_of(row) for row in rows],
        "s/step": column_texts([row.seconds_per_step for row in rows], 3),
        "MB": column_texts([None if row.memory_mb is None else round(row.memory_mb) for row in rows]),
        "parameters": ["–" if row.parameters is None else f"{row.parameters:,}" for row in rows],
    }
    lengths = [f"at {length:,}" for length in longer]
    by_importance = ["in words", minus, *lengths[-1:], "95 % interval", "s/step", "runs", *lengths[:-1],
                     "its interval", "parameters", "MB"]  # fmt: skip
    chosen = ["scheme", metric]
    for name in by_importance:
        if any(columns[name]) and _width(_table({key: columns[key] for key in [*chosen, name]})) <= width:
            chosen.append(name)
    table = _table({name: cells for name, cells in columns.items() if name in chosen})
    return Group(table, *(Padding(Text(sentence), (0, 0, 0, 1)) for sentence in sentences))


def _table(columns: dict[str, list[str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in columns:
        words = name in ("scheme", "in words", "runs")
        table.add_column(Text(name), justify="left" if words else "right", overflow="fold", no_wrap=name != "scheme")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, cells))
    return table


def _width(table: Table) -> int:
    console = Console(width=10_000)
    return Measurement.get(console, console.options, table).maximum


def _at(row: SchemeResult, length: int) -> Cell:
    if length in row.refused:
        return "cannot"
    return row.by_length[length].mean if length in row.by_length else None
