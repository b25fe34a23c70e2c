"""Figures as the JSON that page.js reads: what it draws, and the csv file behind each figure's csv link."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

from locant.report.figures import Figure, Heat, Lines, Series, SideBySide, Small, label, number
from locant.report.tables import csv_text


def page_data(figures: Sequence[Figure]) -> str:
    """Returns the figures of a page as JSON in which no text can end the script element that contains it."""
    data = [{**_drawing(figure), "csv": _compressed_csv(figure)} for figure in figures]
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _drawing(figure: Figure) -> dict[str, Any]:
    """What page.js needs to draw a figure. Tables and intervals are HTML already: their kind is enough."""
    shared = {"kind": type(figure).__name__, "title": figure.title}
    if isinstance(figure, Lines):
        axes = {"x_label": figure.x_label, "y_label": figure.y_label, "log_x": figure.log_x, "log_y": figure.log_y}
        style = {"marks": list(figure.marks), "whiskers": figure.whiskers}
        return {**shared, **axes, **style, "series": [line(series) for series in figure.series]}
    if isinstance(figure, Heat):
        return {
            **shared,
            "x_label": figure.x_label,
            "y_label": figure.y_label,
            "rows": [label(row) for row in figure.rows],
            "columns": [label(column) for column in figure.columns],
            "values": [[number(value) for value in row] for row in figure.values],
            "diverging": figure.diverging,
        }
    if isinstance(figure, Small):
        return {
            **shared,
            "columns": figure.columns,
            "own": figure.own,
            "panels": [_drawing(panel) for panel in figure.panels],
        }
    if isinstance(figure, SideBySide):
        sides = {"left": figure.left, "right": figure.right}
        return {**shared, **{side: None if part is None else _drawing(part) for side, part in sides.items()}}
    return shared


def line(series: Series) -> dict[str, Any]:
    """Returns one line of a figure, with None for gaps."""
    numbers = {"x": series.x, "y": series.y, "low": series.low, "high": series.high}
    lists = {name: [number(value) for value in values] for name, values in numbers.items() if values is not None}
    style = {"group": series.group, "dashed": series.dashed, "thin": series.thin, "colour": series.colour}
    return {"name": series.name, **style, **lists}


def _compressed_csv(figure: Figure) -> str:
    """The csv file of a figure, compressed with zlib, in base64. Browsers have a decompressor."""
    return base64.b64encode(zlib.compress(csv_text(figure).encode(), level=9)).decode("ascii")
