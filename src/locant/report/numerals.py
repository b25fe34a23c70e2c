"""Numbers as text. All numbers of a column have the same decimals: 0.50 below 0.25, not 0.5."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from locant.report.figures import Cell, Number, number

DIGITS = 4
"""Significant digits of the largest number of a column."""
LARGE = 1e7
"""Numbers from here on have an exponent."""
GAP = "–"
"""Stands where there is no number."""


def column_texts(cells: Sequence[Cell], digits: int = DIGITS, *, plus: bool = False) -> list[str]:
    """Returns the cells of a column as text. `plus` is for differences, whose signs matter."""
    places = decimals((cell for cell in cells if not isinstance(cell, str)), digits)
    return [cell if isinstance(cell, str) else text(cell, places, digits, plus=plus) for cell in cells]


def decimals(values: Iterable[Number], digits: int = DIGITS) -> int:
    """Returns how many decimals the numbers of a column have."""
    known = [value for value in map(number, values) if isinstance(value, float)]
    written = [f"{value:.{digits}g}" for value in known]
    most = max((len(each.partition(".")[2]) for each in written if "e" not in each), default=0)
    before_the_point = max((len(str(int(abs(x)))) for x in known if 1 <= abs(x) < LARGE), default=0)
    return max(0, min(most, digits - before_the_point))


def text(value: Number, places: int, digits: int = DIGITS, *, plus: bool = False) -> str:
    """Returns a number with a fixed number of decimals; one that would keep fewer than two digits, with its own."""
    value = number(value)
    if value is None:
        return GAP
    sign = "+" if plus and value else ""
    if isinstance(value, int):
        return f"{value:{sign}d}".replace("-", "−")
    own = 0 < abs(value) < 10.0 ** (1 - places) or abs(value) >= LARGE
    shape = f"{sign}.{digits}g" if own else f"{sign}.{places}f"
    return f"{value:{shape}}".replace("-", "−")


def interval_texts(
    pairs: Sequence[tuple[Number, Number] | None], digits: int = DIGITS, *, plus: bool = False
) -> list[str]:
    """Returns a column of intervals as text, empty where there is none."""
    known = [value for pair in pairs if pair is not None for value in pair]
    places = decimals(known, digits)

    def spelt(pair: tuple[Number, Number] | None) -> str:
        if pair is None or None in pair:
            return ""
        return " … ".join(text(value, places, digits, plus=plus) for value in pair)

    return [spelt(pair) for pair in pairs]
