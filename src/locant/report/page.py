"""One HTML page from figures: style, script and numbers are inside, nothing is fetched, nothing is computed."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from locant.report.figures import (
    Cell,
    Figure,
    Grid,
    Heat,
    Intervals,
    Lines,
    Pair,
    Series,
    Small,
    label,
    number,
    records,
    replace_file,
    write_csv,
)  # fmt: skip

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
COLOURS = 8  # that page.css has, --c0 and on
WIDE = 8  # columns from which on they stand closer together
SHORT = 24  # letters of a cell that is not broken into lines


@dataclass(frozen=True)
class Section:
    title: str
    intro: str
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Report:
    """`verdict` is what the page found, a sentence each; `notices` are the parts that could not be made, and why."""

    title: str
    subtitle: str
    verdict: tuple[str, ...]
    facts: dict[str, str]
    sections: tuple[Section, ...]
    notices: tuple[str, ...] = ()


def write(report: Report, path: Path, *, csv_folder: Path | None = None) -> Path:
    """The page, and in `csv_folder` the numbers of each of its figures."""
    path = Path(path)
    replace_file(path, _page(report))
    if csv_folder is not None:
        files = {csv_name(at, figure): figure for at, figure in enumerate(figures_of(report))}
        for name, figure in files.items():
            write_csv(figure, Path(csv_folder) / name)
        for earlier in Path(csv_folder).glob("[0-9][0-9]-*.csv"):
            if earlier.name not in files:  # of a page that had other figures
                earlier.unlink(missing_ok=True)
    return path


def csv_name(at: int, figure: Figure) -> str:
    """The file of the figure that is number `at` on the page, from 0."""
    words = re.findall(r"[a-z0-9]+", figure.title.lower())
    return "-".join([f"{at + 1:02}", *words])[:60] + ".csv"


def side_by_side(left: Report, right: Report) -> Report:
    """Two models on one page: sections and figures with the same title meet, lines over the same axes are overlaid."""
    names = (left.title, right.title) if left.title != right.title else (f"{left.title} (1)", f"{right.title} (2)")
    titles = dict.fromkeys(section.title for report in (left, right) for section in report.sections)
    sections = []
    for title in titles:
        ours, theirs = (_section(report, title) for report in (left, right))
        figures = tuple(_meet(mine, other, names) for mine, other in _matched(ours.figures, theirs.figures))
        sections.append(Section(title, _both(ours.intro, theirs.intro, names), figures))
    facts = {}
    for key in dict.fromkeys([*left.facts, *right.facts]):
        ours_is, theirs_is = left.facts.get(key, "–"), right.facts.get(key, "–")
        facts[key] = ours_is if ours_is == theirs_is else f"{ours_is} | {theirs_is}"
    return Report(
        title=" and ".join(names),
        subtitle=left.subtitle if left.subtitle == right.subtitle else f"{left.subtitle} | {right.subtitle}",
        verdict=_of_each(left.verdict, right.verdict, names),
        facts=facts,
        sections=tuple(sections),
        notices=_of_each(left.notices, right.notices, names),
    )


# Two reports


def _section(report: Report, title: str) -> Section:
    same = [section for section in report.sections if section.title == title]
    if len(same) > 1:
        raise ValueError(
            f"report {report.title!r} has {len(same)} sections {title!r}: titles must differ to be matched"
        )
    return same[0] if same else Section(title, "", ())


def _matched(ours: tuple[Figure, ...], theirs: tuple[Figure, ...]) -> list[tuple[Figure | None, Figure | None]]:
    """Pairs of the same kind and title, in the order of `ours`; what only `theirs` has comes last."""
    rest = list(theirs)
    pairs: list[tuple[Figure | None, Figure | None]] = []
    for figure in ours:
        other = next((f for f in rest if type(f) is type(figure) and f.title == figure.title), None)
        if other is not None:
            rest = [f for f in rest if f is not other]
        pairs.append((figure, other))
    return pairs + [(None, figure) for figure in rest]


def _meet(left: Figure | None, right: Figure | None, names: tuple[str, str]) -> Figure:
    if isinstance(left, Pair) or isinstance(right, Pair):
        raise ValueError("a report that compares two models cannot be compared with a third")
    if isinstance(left, Lines) and isinstance(right, Lines) and _axes(left) == _axes(right):
        return replace(left, note=_both(left.note, right.note, names), series=_overlaid(left, right, names))
    some = left or right
    assert some is not None
    note = _both(left.note if left else "", right.note if right else "", names)
    return Pair(some.title, note, names[0], names[1], left, right)


def _axes(lines: Lines) -> tuple[str, str, bool, bool]:
    return lines.x_label, lines.y_label, lines.log_x, lines.log_y


def _overlaid(left: Lines, right: Lines, names: tuple[str, str]) -> tuple[Series, ...]:
    """Lines of both; one that is the same in both, such as a reference, once and without a name."""
    ours, theirs = ([_json(series) for series in lines.series] for lines in (left, right))
    return (
        *(s if data in theirs else replace(s, group=names[0]) for s, data in zip(left.series, ours, strict=True)),
        *(replace(s, group=names[1]) for s, data in zip(right.series, theirs, strict=True) if data not in ours),
    )


def _both(ours: str, theirs: str, names: tuple[str, str]) -> str:
    if ours == theirs or not theirs:
        return ours
    return f"{names[0]}: {ours} {names[1]}: {theirs}" if ours else theirs


def _of_each(ours: tuple[str, ...], theirs: tuple[str, ...], names: tuple[str, str]) -> tuple[str, ...]:
    return tuple(f"{name}: {line}" for name, lines in zip(names, (ours, theirs), strict=True) for line in lines)


# The page


def figures_of(report: Report) -> list[Figure]:
    return [figure for section in report.sections for figure in section.figures]


def _page(report: Report) -> str:
    here = files("locant.report")
    style, script = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    figures = figures_of(report)
    contents = "".join(
        f'<li><a href="#s{at}">{escape(section.title)}</a></li>' for at, section in enumerate(report.sections)
    )
    body, at = [], 0
    for index, section in enumerate(report.sections):
        drawn = [_figure(at + place, figure) for place, figure in enumerate(section.figures)]
        at += len(section.figures)
        intro = f'<p class="intro">{escape(section.intro)}</p>' if section.intro else ""
        body.append(f'<section id="s{index}"><h2>{escape(section.title)}</h2>{intro}{"".join(drawn)}</section>')
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(report.title)}</title>
<style>
{style}</style>
</head>
<body>
<nav aria-label="Contents"><a class="top" href="#top">{escape(report.title)}</a><ol>{contents}</ol></nav>
<main id="top">
{_head(report)}
{"".join(body)}
</main>
<div id="tip" role="status" hidden></div>
<dialog id="large" aria-label="Enlarged panel"></dialog>
<script type="application/json" id="figures">{_script_safe([_json(figure) for figure in figures])}</script>
<script>
{script}</script>
</body>
</html>
"""


def _head(report: Report) -> str:
    verdict = "".join(f"<li>{escape(line)}</li>" for line in report.verdict)
    facts = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(text)}</dd></div>" for key, text in report.facts.items())
    notices = "".join(f"<li>{escape(line)}</li>" for line in report.notices)
    return "".join(
        [
            f'<header><h1>{escape(report.title)}</h1><p class="subtitle">{escape(report.subtitle)}</p>',
            f'<ul class="verdict">{verdict}</ul>' if verdict else "",
            f'<dl class="facts">{facts}</dl>' if facts else "",
            f'<aside class="notices"><h2>Notes</h2><ul>{notices}</ul></aside>' if notices else "",
            "<noscript><p>The figures are drawn by a script in this file, which is switched off here.</p></noscript>",
            "</header>",
        ]
    )


def _figure(at: int, figure: Figure) -> str:
    if isinstance(figure, Pair):
        sides = ((figure.left_name, figure.left, "left"), (figure.right_name, figure.right, "right"))
        inside = "".join(f"<div><h4>{escape(name)}</h4>{_plot(at, part, side)}</div>" for name, part, side in sides)
        inside = f'<div class="sides">{inside}</div>'
    else:
        inside = _plot(at, figure, "")
    tools = f'<span class="tools"><a class="csv" href="#f{at}" download="{csv_name(at, figure)}">csv</a></span>'
    note = f'<figcaption class="note">{escape(figure.note)}</figcaption>' if figure.note else ""
    kind = type(figure).__name__.lower()
    return (
        f'<figure id="f{at}" class="{kind}"><div class="bar"><h3>{escape(figure.title)}</h3>{tools}</div>'
        f"{inside}{note}</figure>"
    )


def _plot(at: int, figure: Lines | Heat | Small | Grid | Intervals | None, side: str) -> str:
    """A table, intervals, or the place where page.js draws."""
    if figure is None:
        return '<p class="none">does not have this figure</p>'
    if isinstance(figure, Intervals):
        return _intervals(figure)
    if isinstance(figure, Grid):
        return _table(figure)
    return f'<div class="plot" data-figure="{at}" data-side="{side}"></div>'


def _table(grid: Grid) -> str:
    kinds = [_kind([row[at] for row in grid.rows]) for at in range(len(grid.header))]
    wide = ' class="wide"' if len(kinds) > WIDE else ""
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for kind, name in zip(kinds, grid.header, strict=True))
    rows = "".join(
        "<tr>" + "".join(f"<td{kind}>{_cell(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in grid.rows
    )
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(grid.title)}">'
        f"<table{wide}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _kind(column: list[Cell]) -> str:
    """The class of a column: numbers stand right, short words in one line."""
    words = [cell for cell in column if isinstance(cell, str)]
    if not words:
        return ' class="number"' if any(cell is not None for cell in column) else ""
    return ' class="short"' if all(len(word) <= SHORT for word in words) else ""


def _intervals(figure: Intervals) -> str:
    """Rows of name, track and words; places on the track are percentages, so that any width will do."""
    shown = [value for row in figure.rows for value in (row.mean, row.low, row.high, *row.points)]
    known = [0.0, *(value for value in map(number, shown) if value is not None)]
    low, high = min(known), max(known)
    pad = 0.04 * (high - low) or 1.0
    low, high = low - pad, high + pad

    def place(value: float) -> str:
        return f"{100 * (value - low) / (high - low):.3f}%"

    rows = []
    for row in figure.rows:
        mean, lower, upper = map(number, (row.mean, row.low, row.high))
        marks, words = [f'<b style="left:{place(0)}"></b>'], "–" if mean is None else _signed(mean)
        if lower is not None and upper is not None:
            width = f"{100 * (upper - lower) / (high - low):.3f}%"
            marks.append(f'<i style="left:{place(lower)};width:{width}"></i>')
            words += f" ({_signed(lower)} … {_signed(upper)})"
        marks += [f'<u style="left:{place(point)}"></u>' for point in row.points if number(point) is not None]
        if mean is not None:
            marks.append(f'<s style="left:{place(mean)}"></s>')
        track = f'<div class="track" style="color:var(--c{row.colour % COLOURS})">{"".join(marks)}</div>'
        said = f"<div>{words}</div><div>{escape(row.word)}</div>"
        rows.append(f'<div class="name">{escape(row.name)}</div>{track}<div class="said">{said}</div>')
    ticks = "".join(f'<span style="left:{place(tick)}">{_signed(tick)}</span>' for tick in _ticks(low, high))
    return (
        f'<div class="means" role="group" aria-label="{escape(figure.title)}">{"".join(rows)}'
        f'<div class="name"></div><div class="ticks">{ticks}<em>{escape(figure.x_label)}</em></div></div>'
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, three to six of them, 0 among them."""
    ten: float = 10.0 ** math.floor(math.log10(high - low))
    step = next(part * ten for part in (0.2, 0.5, 1, 2, 5) if (high - low) / (part * ten) <= 5)
    return [count * step for count in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _signed(value: float) -> str:
    return ("0" if value == 0 else f"{value:+.3g}").replace("-", "−")


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return escape(cell)
    value = number(cell)
    if value is None:
        return "–"
    return (str(value) if isinstance(value, int) else f"{value:.4g}").replace("-", "−")


def _json(part: Figure | Series | None) -> Any:
    """The figure as page.js reads it."""
    if part is None:
        return None
    if isinstance(part, Series):
        numbers = {"x": part.x, "y": part.y, "low": part.low, "high": part.high}
        lists = {name: [number(value) for value in values] for name, values in numbers.items() if values is not None}
        drawn = {"group": part.group, "dashed": part.dashed, "thin": part.thin, "colour": part.colour}
        return {"name": part.name, **drawn, **lists}
    shared = {"kind": type(part).__name__, "title": part.title}
    if isinstance(part, Lines):
        axes = {"x_label": part.x_label, "y_label": part.y_label, "log_x": part.log_x, "log_y": part.log_y}
        style = {"marks": list(part.marks), "whiskers": part.whiskers}
        return {**shared, **axes, **style, "series": [_json(series) for series in part.series]}
    if isinstance(part, Heat):
        return {
            **shared,
            "x_label": part.x_label,
            "y_label": part.y_label,
            "rows": [label(row) for row in part.rows],
            "columns": [label(column) for column in part.columns],
            "values": [[number(value) for value in row] for row in part.values],
            "diverging": part.diverging,
        }
    if isinstance(part, Small):
        return {**shared, "columns": part.columns, "panels": [_json(panel) for panel in part.panels]}
    if isinstance(part, Grid):
        rows = [[cell if isinstance(cell, str) else number(cell) for cell in row] for row in part.rows]
        return {**shared, "header": list(part.header), "rows": rows}
    if isinstance(part, Intervals):
        return {**shared, "records": records(part)}
    names = {"left_name": part.left_name, "right_name": part.right_name}
    return {**shared, **names, "left": _json(part.left), "right": _json(part.right)}


def _script_safe(data: Any) -> str:
    """JSON in which no text can end the script element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
