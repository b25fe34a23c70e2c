"""The ranked table in the terminal, as wide as the terminal allows."""

from __future__ import annotations

import math

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from locant.experiments.comparison import Comparison
from locant.experiments.results import SchemeResult
from locant.experiments.tasks import find_task
from locant.report.comparison.cells import between, difference_interval, in_words, runs_of, tested_lengths


def terminal_table(comparison: Comparison, rows: list[SchemeResult], sentences: list[str], width: int) -> Group:
    """Returns the ranked table and the sentences on it; a narrow terminal lacks the least important columns."""
    metric = find_task(comparison.work.task).metric
    longer = tested_lengths(rows, but=comparison.work.preset.length)
    minus = f"− {comparison.schemes[0]}"
    columns: dict[str, list[str]] = {
        "scheme": [row.scheme for row in rows],
        metric: [_short(row.score.mean) for row in rows],
        "95 % interval": [between(row.score.low, row.score.high) for row in rows],
        minus: ["" if row.against is None else _short(row.against.estimate.mean, "+.3g") for row in rows],
        "its interval": [difference_interval(row) for row in rows],
        "in words": [in_words(row) for row in rows],
        **{f"at {length:,}": [_short_at(row, length) for row in rows] for length in longer},
        "runs": [runs_of(row) for row in rows],
        "s/step": [_short(row.seconds_per_step, ".3g") for row in rows],
        "MB": [_short(row.memory_mb, ".0f") for row in rows],
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


def _short(value: float | None, shape: str = ".4g") -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:{shape}}".replace("-", "−")


def _short_at(row: SchemeResult, length: int) -> str:
    if length in row.refused:
        return "cannot"
    return _short(row.by_length[length].mean if length in row.by_length else None)
