"""Figures as data, the input of a page and of its csv files. A value that is None or not finite is a gap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Number = float | None
Label = str | float
Cell = str | float | None


@dataclass(frozen=True)
class Series:
    """One line. `low` and `high` are the edges of a shaded interval; `group` names its model where there are two.

    `colour` is an index into the colours of the page; a series that has one keeps it in every figure. The default is
    the index of the series in its figure. `thin` is for the parts of a sum, drawn beside the sum.
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
                raise ValueError(f"series {self.name!r} has {len(self.x)} x but {len(values)} {what}: give one per x")


@dataclass(frozen=True)
class Lines:
    """Lines over one x axis. `marks` are labelled places on that axis, such as the trained length.

    `whiskers` draws each interval as a bar at its point. It suits lines of few points, whose bands would overlap.
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
    """A matrix as colours, `values[row][column]`. `diverging` is for signed values: 0 gets the middle colour."""

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
    """Small multiples, for example one panel per head; at most `columns` panels side by side.

    Panels share one scale. With `own` each begins with its own, for panels of which one would flatten all others. The
    reader can change it.
    """

    title: str
    note: str
    panels: tuple[Lines | Heat, ...]
    columns: int = 6
    own: bool = False

    def __post_init__(self) -> None:
        if self.columns < 1:
            raise ValueError(f"figure {self.title!r} has {self.columns} columns: give at least 1")


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
    """One row of `Intervals`: a mean, its interval if there is one, the values it is the mean of, and a comment."""

    name: str
    mean: Number
    low: Number = None
    high: Number = None
    points: Sequence[float] = ()
    word: str = ""
    colour: int = 0


@dataclass(frozen=True)
class Intervals:
    """Means with intervals, one below the other, along one axis that includes 0: the reader sees which contain 0."""

    title: str
    note: str
    x_label: str
    rows: tuple[Interval, ...]


@dataclass(frozen=True)
class Words:
    """A text with its tokens coloured by a signed number each. A token that begins a word has a space in front."""

    title: str
    note: str
    words: Sequence[str]
    values: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.words) != len(self.values):
            raise ValueError(f"text {self.title!r} has {len(self.words)} tokens but {len(self.values)} values")


@dataclass(frozen=True)
class SideBySide:
    """The same figure of two models next to each other; None for a model that does not have it."""

    title: str
    note: str
    left_name: str
    right_name: str
    left: OneModel | None
    right: OneModel | None


OneModel = Lines | Heat | Small | Grid | Intervals | Words
Figure = OneModel | SideBySide


def number(value: Number) -> Number:
    """Returns the value, or None for a gap."""
    if value is None or isinstance(value, int):
        return value
    value = float(value)
    return value if math.isfinite(value) else None


def shortened(value: Number, digits: int = 5) -> Number:
    """Returns the value with `digits` significant digits, or None for a gap."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def label(value: Label) -> str:
    """Returns a row or column label as text; whole numbers have no decimal point."""
    if isinstance(value, str):
        return value
    return str(int(value)) if float(value).is_integer() else repr(float(value))
