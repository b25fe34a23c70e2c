"""Figures as data: what a page draws and a csv holds. A value that is None or not finite is a gap."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Number = float | None
Label = str | float
Cell = str | float | None


@dataclass(frozen=True)
class Series:
    """One line; `low` and `high` are the edges of a shaded interval, `group` is its model where two are compared.

    `colour` is the number of its colour, for what has the same one in every figure; by default its place in this one.
    `thin` is for parts that are drawn beside their whole.
    """

    name: str
    x: Sequence[Number]
    y: Sequence[Number]
    low: Sequence[Number] | None = None
    high: Sequence[Number] | None = None
    dashed: bool = False
    group: str = ""
    colour: int | None = None
    thin: bool = False

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ValueError(f"series {self.name!r} has only one of low and high: give both or neither")
        for what, values in (("y", self.y), ("low", self.low), ("high", self.high)):
            if values is not None and len(values) != len(self.x):
                raise ValueError(f"series {self.name!r} has {len(self.x)} x but {len(values)} {what}: one per x")


@dataclass(frozen=True)
class Lines:
    """Lines over one axis; `marks` are places on it with a word each, such as the length it was trained at.

    `whiskers` draws intervals as a bar at each point, for lines of few points whose bands would cover each other.
    """

    title: str
    note: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    marks: tuple[tuple[float, str], ...] = ()
    whiskers: bool = False


@dataclass(frozen=True)
class Heat:
    """A matrix as colours, `values[row][column]`; `diverging` is for values whose sign matters: 0 is the middle."""

    title: str
    note: str
    x_label: str
    y_label: str
    rows: Sequence[Label]
    columns: Sequence[Label]
    values: Sequence[Sequence[Number]]
    diverging: bool = False

    def __post_init__(self) -> None:
        widths = sorted({len(row) for row in self.values})
        if len(self.values) != len(self.rows) or any(width != len(self.columns) for width in widths):
            raise ValueError(
                f"heat map {self.title!r} has {len(self.rows)} row and {len(self.columns)} column labels, but "
                f"{len(self.values)} rows of {' or '.join(map(str, widths)) or 'no'} values"
            )


@dataclass(frozen=True)
class Small:
    """Small multiples: one panel per head, say, `columns` of them side by side where there is room."""

    title: str
    note: str
    panels: tuple[Lines | Heat, ...]
    columns: int = 6

    def __post_init__(self) -> None:
        if self.columns < 1:
            raise ValueError(f"figure {self.title!r} has {self.columns} columns: at least 1")


@dataclass(frozen=True)
class Grid:
    """A table of text and numbers."""

    title: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def __post_init__(self) -> None:
        if len(set(self.header)) != len(self.header):
            raise ValueError(f"table {self.title!r} has columns of the same name: {list(self.header)}")
        for number, row in enumerate(self.rows, 1):
            if len(row) != len(self.header):
                raise ValueError(
                    f"table {self.title!r} has {len(self.header)} columns, but row {number} has {len(row)} cells"
                )


@dataclass(frozen=True)
class Interval:
    """One row of `Intervals`: a mean, its interval where there is one, what it is the mean of, and a word about it."""

    name: str
    mean: Number
    low: Number = None
    high: Number = None
    points: Sequence[float] = ()
    word: str = ""
    colour: int = 0


@dataclass(frozen=True)
class Intervals:
    """Means with intervals under each other, along one axis with 0 on it: what matters is which of them reach 0."""

    title: str
    note: str
    x_label: str
    rows: tuple[Interval, ...]


@dataclass(frozen=True)
class Pair:
    """The same figure of two models next to each other; None where a model does not have it."""

    title: str
    note: str
    left_name: str
    right_name: str
    left: Lines | Heat | Small | Grid | Intervals | None
    right: Lines | Heat | Small | Grid | Intervals | None


Figure = Lines | Heat | Small | Grid | Intervals | Pair


def number(value: Number) -> Number:
    """The value, or None for a gap."""
    if value is None or isinstance(value, int):
        return value
    value = float(value)
    return value if math.isfinite(value) else None


def label(value: Label) -> str:
    if isinstance(value, str):
        return value
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def records(figure: Figure) -> list[dict[str, Cell]]:
    """The figure's numbers in long format, one dict per point, cell or row of the table. page.js does the same."""
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
    sides = ((figure.left_name, figure.left), (figure.right_name, figure.right))
    return [{"model": name, **record} for name, side in sides if side is not None for record in records(side)]


def _points(series: Series) -> list[dict[str, Cell]]:
    columns: dict[str, Sequence[Number]] = {"x": series.x, "y": series.y}
    if series.low is not None and series.high is not None:
        columns |= {"low": series.low, "high": series.high}
    named: Mapping[str, Cell] = {"series": series.name, **({"model": series.group} if series.group else {})}
    return [{**named, **{name: number(values[at]) for name, values in columns.items()}} for at in range(len(series.x))]


def write_csv(figure: Figure, path: Path) -> None:
    """`records` as a file; gaps are empty."""
    rows = records(figure)
    names = dict.fromkeys(name for row in rows for name in row)
    if isinstance(figure, Grid):
        names = dict.fromkeys(figure.header)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(names), restval="")
    writer.writeheader()
    writer.writerows(rows)
    replace_file(path, text.getvalue())


def replace_file(path: Path, text: str) -> None:
    """Writes a file in one move: who opens it meanwhile has the old one or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", newline="", encoding="utf-8") as file:
            file.write(text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
