"""The numbers of a figure as a csv file, in long format: one line per point, cell or table row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from locant.report.figures import (
    Cell,
    Figure,
    Grid,
    Heat,
    Intervals,
    Lines,
    Number,
    Series,
    Small,
    Words,
    label,
    number,
)
from locant.runs import files
from locant.runs.csv_text import csv_lines


def records(figure: Figure) -> list[dict[str, Cell]]:
    """Returns one dict per point of a line, cell of a heat map or row of a table."""
    if isinstance(figure, Lines):
        return [record for series in figure.series for record in _points(series)]
    if isinstance(figure, Heat):
        return [
            {"row": label(row), "column": label(column), "value": number(value)}
            for row, values in zip(figure.rows, figure.values, strict=True)
            for column, value in zip(figure.columns, values, strict=True)
        ]
    if isinstance(figure, Small):
        return [{"panel": panel.title, **record} for panel in figure.panels for record in records(panel)]
    if isinstance(figure, Grid):
        return [
            {
                name: cell if isinstance(cell, str) else number(cell)
                for name, cell in zip(figure.header, row, strict=True)
            }
            for row in figure.rows
        ]
    if isinstance(figure, Intervals):
        return _intervals(figure)
    if isinstance(figure, Words):
        both = zip(figure.words, figure.values, strict=True)
        return [{"place": at, "token": word, "value": number(value)} for at, (word, value) in enumerate(both)]
    sides = ((figure.left_name, figure.left), (figure.right_name, figure.right))
    return [{"model": name, **record} for name, side in sides if side is not None for record in records(side)]


def _points(series: Series) -> list[dict[str, Cell]]:
    columns: dict[str, Sequence[Number]] = {"x": series.x, "y": series.y}
    if series.low is not None and series.high is not None:
        columns |= {"low": series.low, "high": series.high}
    named: Mapping[str, Cell] = {"series": series.name, **({"model": series.group} if series.group else {})}
    return [{**named, **{name: number(values[at]) for name, values in columns.items()}} for at in range(len(series.x))]


def _intervals(figure: Intervals) -> list[dict[str, Cell]]:
    return [
        {
            "name": row.name,
            "mean": number(row.mean),
            "low": number(row.low),
            "high": number(row.high),
            "points": " ".join(map(repr, row.points)),
            "word": row.word,
        }
        for row in figure.rows
    ]


def csv_text(figure: Figure) -> str:
    """Returns `records` as the text of a csv file; gaps are empty fields."""
    rows = records(figure)
    names = figure.header if isinstance(figure, Grid) else dict.fromkeys(name for row in rows for name in row)
    return csv_lines(names, rows)


def write_csv(figure: Figure, path: Path) -> None:
    """Writes `csv_text` to a file."""
    files.write(path, csv_text(figure))
