"""The text of csv files. This is the only place that makes it.

A spreadsheet executes a text that begins like a formula. Names of models and files come from others, so such a text
gets an apostrophe in front.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping

Cell = str | float | None

FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r", "\n", "\0")
"""How a text begins that a spreadsheet may execute, after OWASP; some read the wide forms of the signs too."""


def csv_lines(names: Iterable[str], rows: Iterable[Mapping[str, Cell]]) -> str:
    """Returns the text of a csv file with these columns. A missing value is an empty field."""
    names = list(names)
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(map(_inert, names))
    writer.writerows([_inert(row.get(name, "")) for name in names] for row in rows)
    return text.getvalue()


def _inert(cell: Cell) -> Cell:
    """Returns a cell that no spreadsheet executes. Numbers, and texts of nothing but numbers, stay as they are."""
    if not isinstance(cell, str) or not cell.startswith(FORMULA) or all(map(_is_number, cell.split(" "))):
        return cell
    return f"'{cell}"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
