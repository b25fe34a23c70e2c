"""One figure as HTML: tables and intervals whole, other figures as the place where page.js draws them."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from locant.report.figures import Cell, Figure, Grid, Interval, Intervals, OneModel, SideBySide, Words, number
from locant.report.numerals import column_texts, decimals, text

COLOURS = 8  # defined in page.css, --c0 to --c7
WIDE = 8  # a table of more columns has less space between them
SHORT = 24  # a column of cells up to this many characters is not broken into lines


def figure_markup(index: int, figure: Figure, csv_name: str) -> str:
    """Returns the HTML of a figure; `index` is its place on the page, from 0."""
    if isinstance(figure, SideBySide):
        sides = ((figure.left_name, figure.left, "left"), (figure.right_name, figure.right, "right"))
        inside = "".join(f"<div><h4>{escape(name)}</h4>{_plot(index, part, side)}</div>" for name, part, side in sides)
        inside = f'<div class="sides">{inside}</div>'
    else:
        inside = _plot(index, figure, "")
    tools = f'<span class="tools"><a class="csv" href="#f{index}" download="{csv_name}">csv</a></span>'
    note = f'<figcaption class="note">{escape(figure.note)}</figcaption>' if figure.note else ""
    kind = type(figure).__name__.lower()
    return (
        f'<figure id="f{index}" class="{kind}"><div class="bar"><h3>{escape(figure.title)}</h3>{tools}</div>'
        f"{inside}{note}</figure>"
    )


def _plot(index: int, figure: OneModel | None, side: str) -> str:
    if figure is None:
        return '<p class="none">This model does not have this figure.</p>'
    if isinstance(figure, Intervals):
        return _intervals(figure)
    if isinstance(figure, Grid):
        return _table(figure)
    if isinstance(figure, Words):
        return _words(figure)
    return f'<div class="plot" data-figure="{index}" data-side="{side}"></div>'


# ---- words -----------------------------------------------------------------------------------------


def _words(figure: Words) -> str:
    """Tokens with a colour behind them: its strength is the size of the number, its hue the sign."""
    known = [abs(value) for value in map(number, figure.values) if value is not None]
    largest = max(known, default=0.0) or 1.0
    parts = []
    for word, value in zip(figure.words, figure.values, strict=True):
        shown = number(value) or 0.0
        kind = "less" if shown < 0 else "more"
        space = " " if word.startswith(" ") else "<wbr>"
        inside = escape(word[1:] if word.startswith(" ") else word) or "&nbsp;"
        strength = f"{abs(shown) / largest:.3f}"
        parts.append(
            f'{space}<mark class="{kind}" style="--a:{strength}" title="{text(shown, 3, 3, plus=True)}">{inside}</mark>'
        )
    legend = (
        f'<p class="key"><mark class="less" style="--a:1">{text(-largest, 3, 3, plus=True)}</mark> <span>0</span> '
        f'<mark class="more" style="--a:1">{text(largest, 3, 3, plus=True)}</mark></p>'
    )
    return f'<p class="coloured">{"".join(parts).strip()}</p>{legend}'


# ---- tables ---------------------------------------------------------------------------------------


def _table(grid: Grid) -> str:
    kinds = [_kind([row[at] for row in grid.rows]) for at in range(len(grid.header))]
    wide = ' class="wide"' if len(kinds) > WIDE else ""
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for kind, name in zip(kinds, grid.header, strict=True))
    columns = [column_texts([row[at] for row in grid.rows]) for at in range(len(kinds))]
    rows = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in zip(*columns, strict=True)
    )
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(grid.title)}">'
        f"<table{wide}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _kind(column: list[Cell]) -> str:
    """The class attribute of a column: numbers are aligned right, short words stay on one line."""
    words = [cell for cell in column if isinstance(cell, str)]
    if not words:
        return ' class="number"' if any(cell is not None for cell in column) else ""
    return ' class="short"' if all(len(word) <= SHORT for word in words) else ""


# ---- intervals ------------------------------------------------------------------------------------


def _intervals(figure: Intervals) -> str:
    """Rows of name, track and words. Places on the track are percentages, so the figure fits any width."""
    shown = [value for row in figure.rows for value in (row.mean, row.low, row.high, *row.points)]
    known = [0.0, *(value for value in map(number, shown) if value is not None)]
    pad = 0.04 * (max(known) - min(known)) or 1.0
    low, high = min(known) - pad, max(known) + pad

    def percent(value: float) -> str:
        return f"{100 * (value - low) / (high - low):.3f}%"

    def width(start: float, end: float) -> str:
        return f"{100 * (end - start) / (high - low):.3f}%"

    places = decimals((value for row in figure.rows for value in (row.mean, row.low, row.high)), 3)
    rows = "".join(_interval(row, percent, width, places) for row in figure.rows)
    ticks = "".join(f'<span style="left:{percent(tick)}">{_signed(tick)}</span>' for tick in _ticks(low, high))
    return (
        f'<div class="means" role="group" aria-label="{escape(figure.title)}">{rows}'
        f'<div class="name"></div><div class="ticks">{ticks}<em>{escape(figure.x_label)}</em></div></div>'
    )


def _interval(row: Interval, percent: Callable[[float], str], width: Callable[[float, float], str], places: int) -> str:
    mean, lower, upper = map(number, (row.mean, row.low, row.high))
    marks, words = [f'<b style="left:{percent(0)}"></b>'], text(mean, places, 3, plus=True)
    if lower is not None and upper is not None:
        marks.append(f'<i style="left:{percent(lower)};width:{width(lower, upper)}"></i>')
        words += f" ({text(lower, places, 3, plus=True)} … {text(upper, places, 3, plus=True)})"
    marks += [f'<u style="left:{percent(point)}"></u>' for point in row.points if number(point) is not None]
    if mean is not None:
        marks.append(f'<s style="left:{percent(mean)}"></s>')
    track = f'<div class="track" style="color:var(--c{row.colour % COLOURS})">{"".join(marks)}</div>'
    comment = f"<div>{words}</div><div>{escape(row.word)}</div>"
    return f'<div class="name">{escape(row.name)}</div>{track}<div class="comment">{comment}</div>'


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers; 0 is one of them."""
    ten: float = 10.0 ** math.floor(math.log10(high - low))
    step = next(part * ten for part in (0.2, 0.5, 1, 2, 5) if (high - low) / (part * ten) <= 5)
    return [count * step for count in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _signed(value: float) -> str:
    return ("0" if value == 0 else f"{value:+.3g}").replace("-", "−")
