"""Figures drawn by matplotlib, for notebooks and papers. The page draws the same figures by itself.

It does without pyplot, which would keep every figure and change the caller's settings.
"""

from __future__ import annotations

import io
import math
from typing import Any

from matplotlib.figure import Figure as MatplotlibFigure

from locant.report.figures import (
    Figure,
    Grid,
    Heat,
    Intervals,
    Lines,
    OneModel,
    SideBySide,
    Small,
    Words,
    label,
    number,
)
from locant.report.numerals import column_texts

COLOURS = ("#0072b2", "#c84e00", "#00835f", "#b5528b", "#a97300", "#3d9bd6", "#5b4a9e", "#5a5f66")
"""Those of the page (page.css, --c0 to --c7); the ninth line has the first colour again."""
PANEL = (2.1, 1.7)
"""Inches of a panel among many."""
TICKS = 9
"""Most labels along a side of a heat map."""
CHARACTER, LINE = 0.075, 0.22
"""Inches of a character and of a line in a table."""
LONGEST = 60
"""Most characters of a cell that are shown; `rows` has them all."""
LEGEND = 12
"""A panel with more lines has no legend: it would hide them."""


class Drawing(MatplotlibFigure):
    """A figure of matplotlib that a notebook shows."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=110)
        return picture.getvalue()


def draw(figure: Figure) -> Drawing:
    """Returns a figure as matplotlib draws it; `savefig` writes it to a file."""
    drawn = Drawing(figsize=_size(figure), layout="constrained")
    drawn.suptitle(figure.title, fontsize=11)
    if isinstance(figure, SideBySide):
        sides = ((figure.left_name, figure.left), (figure.right_name, figure.right))
        parts: Any = drawn.subfigures(1, 2)
        for part, (name, inside) in zip(parts, sides, strict=True):
            part.suptitle(name, fontsize=10)
            if inside is None:
                part.text(0.5, 0.5, "this model does not have this figure", ha="center", fontsize=9, color="0.4")
            else:
                _fill(part, inside)
    else:
        _fill(drawn, figure)
    return drawn


def _size(figure: Figure) -> tuple[float, float]:
    if isinstance(figure, SideBySide):
        sizes = [_size(side) for side in (figure.left, figure.right) if side is not None]
        return 2 * max(width for width, _ in sizes), max(height for _, height in sizes)
    if isinstance(figure, Small):
        columns = min(figure.columns, len(figure.panels)) or 1
        return max(4.0, PANEL[0] * columns), max(2.6, PANEL[1] * math.ceil(len(figure.panels) / columns) + 0.6)
    if isinstance(figure, Grid):
        return max(4.0, CHARACTER * sum(map(_width, _columns(figure)))), 0.8 + LINE * (1 + len(figure.rows))
    if isinstance(figure, Intervals):
        return 6.4, 1.4 + 0.4 * len(figure.rows)
    if isinstance(figure, Words):
        return 6.4, 1.2 + LINE * len(figure.words)
    return 6.4, 4.4


def _fill(place: Any, figure: OneModel) -> None:
    """Draws into a figure or a part of one."""
    if isinstance(figure, Small):
        columns = min(figure.columns, len(figure.panels)) or 1
        axes = place.subplots(math.ceil(len(figure.panels) / columns), columns, squeeze=False)
        for axis, panel in zip(axes.flat, figure.panels, strict=False):
            _panel(axis, panel, small=True)
            axis.set_title(panel.title, fontsize=8)
        for axis in axes.flat[len(figure.panels) :]:
            axis.set_visible(False)
        return
    axis = place.subplots()
    if isinstance(figure, Grid):
        _grid(axis, figure)
    elif isinstance(figure, Intervals):
        _intervals(axis, figure)
    elif isinstance(figure, Words):
        _words(axis, figure)
    else:
        _panel(axis, figure, small=False)


def _panel(axis: Any, figure: Lines | Heat, *, small: bool) -> None:
    if isinstance(figure, Lines):
        _lines(axis, figure, legend=not small and 1 < len(figure.series) <= LEGEND)
    else:
        _heat(axis, figure, bar=not small)
    axis.tick_params(labelsize=6 if small else 8)
    if not small:
        axis.set_xlabel(figure.x_label)
        axis.set_ylabel(figure.y_label)


def _lines(axis: Any, figure: Lines, *, legend: bool) -> None:
    for index, series in enumerate(figure.series):
        colour = COLOURS[(index if series.colour is None else series.colour) % len(COLOURS)]
        x, y = _numbers(series.x), _numbers(series.y)
        named = f"{series.name} ({series.group})" if series.group else series.name
        style = {"color": colour, "linestyle": "--" if series.dashed else "-", "linewidth": 0.7 if series.thin else 1.4}
        axis.plot(x, y, label=named, **style, **({"marker": "o", "markersize": 3} if len(x) < 12 else {}))
        if series.low is not None and series.high is not None:
            low, high = _numbers(series.low), _numbers(series.high)
            if figure.whiskers:
                axis.vlines(x, low, high, color=colour, linewidth=1.0)
            else:
                axis.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    for at, words in figure.marks:
        axis.axvline(at, color="0.6", linewidth=0.8, linestyle=":")
        axis.annotate(words, (at, 1.0), xycoords=("data", "axes fraction"), fontsize=7, color="0.4", va="bottom")
    if figure.log_x:
        axis.set_xscale("log", base=2)
    if figure.log_y:
        axis.set_yscale("log")
    axis.spines[["top", "right"]].set_visible(False)
    if legend:
        axis.legend(fontsize=8, frameon=False)


def _heat(axis: Any, figure: Heat, *, bar: bool) -> None:
    values = [_numbers(row) for row in figure.values]
    known = [abs(value) for row in values for value in row if math.isfinite(value)]
    limit = max(known, default=1.0) or 1.0
    style = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit} if figure.diverging else {"cmap": "viridis"}
    image = axis.imshow(values, aspect="auto", interpolation="nearest", **style)
    for names, axis_of in ((figure.columns, axis.xaxis), (figure.rows, axis.yaxis)):
        step = math.ceil(len(names) / TICKS) or 1
        axis_of.set_ticks(range(0, len(names), step), [label(name) for name in names[::step]])
    if bar:
        axis.figure.colorbar(image, ax=axis)


def _grid(axis: Any, figure: Grid) -> None:
    axis.set_axis_off()
    if not figure.rows:
        return
    columns = _columns(figure)
    header, *cells = [list(row) for row in zip(*columns, strict=True)]
    whole = sum(map(_width, columns))
    table = axis.table(
        cells, colLabels=header, colWidths=[_width(column) / whole for column in columns], cellLoc="right",
        edges="horizontal", bbox=(0, 0, 1, 1),
    )  # fmt: skip
    table.auto_set_font_size(False)
    table.set_fontsize(8)


def _columns(figure: Grid) -> list[list[str]]:
    """The columns of a table as text, each with its name first; long texts are cut."""
    columns = [column_texts([row[at] for row in figure.rows]) for at in range(len(figure.header))]
    named = [[name, *column] for name, column in zip(figure.header, columns, strict=True)]
    return [[cell if len(cell) <= LONGEST else f"{cell[: LONGEST - 1]}…" for cell in column] for column in named]


def _width(column: list[str]) -> int:
    """Characters of a column, with the space beside it."""
    return max(map(len, column)) + 2


def _intervals(axis: Any, figure: Intervals) -> None:
    axis.axvline(0, color="0.7", linewidth=0.8)
    for at, row in enumerate(figure.rows):
        colour = COLOURS[row.colour % len(COLOURS)]
        low, high = number(row.low), number(row.high)
        if low is not None and high is not None:
            axis.hlines(at, low, high, color=colour, linewidth=5, alpha=0.35)
        axis.plot(_numbers(row.points), [at] * len(row.points), "|", color=colour, markersize=9)
        if number(row.mean) is not None:
            axis.plot([row.mean], [at], "o", color=colour)
    axis.set_yticks(range(len(figure.rows)), [f"{row.name}\n{row.word}".strip() for row in figure.rows], fontsize=8)
    axis.set_ylim(len(figure.rows) - 0.5, -0.5)
    axis.set_xlabel(figure.x_label)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _words(axis: Any, figure: Words) -> None:
    """A bar per token, from the first at the top."""
    colours = [COLOURS[0] if value < 0 else COLOURS[1] for value in figure.values]
    axis.barh(range(len(figure.words)), _numbers(figure.values), color=colours)
    axis.set_yticks(range(len(figure.words)), [word.strip() for word in figure.words], fontsize=8)
    axis.invert_yaxis()
    axis.axvline(0, color="0.7", linewidth=0.8)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _numbers(values: Any) -> list[float]:
    """Numbers for matplotlib, which draws NaN as a gap."""
    return [math.nan if number(value) is None else float(value) for value in values]
