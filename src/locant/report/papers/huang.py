"""Figures of the reproduction of Huang et al. 2020, drawn from the tables of each claim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from locant.papers.claim import Measured, Table
from locant.report.figures import Figure, Grid, Heat, Interval, Intervals, Lines, Series, Small, shortened

METRICS = {"f1": "F1", "exact_match": "exact match"}
REACH = 50
"""Largest offset in the figure of weights, as in the paper."""
SHOWN = 8
"""Coordinates in that figure."""
LAGS = 48
"""Positions on either side of the figure of a_ij."""


def best_on_squad(found: Measured) -> tuple[Figure, ...]:
    """C1: gains of method 4 over every other arm, and the scores behind them."""
    gains, figures = found.tables["gains"], []
    for metric, name in METRICS.items():
        for start in ("warm", "cold"):
            rows = gains.where(metric=metric, start=start)
            figures.append(
                Intervals(
                    f"Method 4 against the others, {name}, {start} start",
                    f"{name} of method 4 minus that of each arm at the trained length, in points, paired by seed, with "
                    f"95 % intervals. Right of 0: method 4 is better. An interval that contains 0 shows no difference.",
                    f"difference in {name}",
                    _intervals(rows, "over"),
                )
            )
    scores = found.tables["scores"]
    table = Grid(
        "Scores on SQuAD",
        "Mean over seeds at the trained length, in per cent, with the 95 % interval. Warm arms were fitted and adapted "
        "first; cold arms start with an untrained scheme.",
        scores.header,
        _rounded(scores),
    )
    return (*figures, table)


def by_length(found: Measured) -> tuple[Figure, ...]:
    """C2: F1 and the share of it that is kept, by length."""
    table = found.tables["lengths"]
    arms = list(dict.fromkeys(table.column("arm")))
    trained = min(table.column("length"))
    marks = ((float(trained), "trained"),)
    of = {arm: table.where(arm=arm) for arm in arms}
    scores = tuple(
        Series(arm, rows.column("length"), rows.column("mean"), rows.column("low"), rows.column("high"), colour=number)
        for number, (arm, rows) in enumerate(of.items())
    )
    shares = tuple(
        Series(arm, rows.column("length"), rows.column("share"), colour=number)
        for number, (arm, rows) in enumerate(of.items())
    )
    return (
        Lines(
            "F1 by length of the test inputs",
            "F1 on the same questions, read in windows of each length; trained at the mark. Longer windows hold more "
            "of the paragraph, so lines may rise. A line that falls is a scheme that does not carry over.",
            "tokens of a window",
            "F1",
            scores,
            marks=marks,
            whiskers=True,
        ),
        Lines(
            "Share of F1 kept",
            "The same, divided by the F1 of the same run at the trained length. Above 1, longer windows help.",
            "tokens of a window",
            "F1 / F1 at the trained length",
            shares,
            marks=marks,
        ),
    )


def by_clip(found: Measured) -> tuple[Figure, ...]:
    """C3: F1 by clip and sharing, and the parameters."""
    table = found.tables["clips"]
    series = []
    for number, kind in enumerate(("shared", "own")):
        rows = sorted(table.where(tables=kind).rows, key=_first)
        part = Table(table.header, rows)
        x, y, low, high = (part.column(name) for name in ("clip", "mean", "low", "high"))
        name = "shared by heads" if kind == "shared" else "one per head"
        series.append(Series(name, x, y, low, high, colour=number))
    return (
        Lines(
            "F1 by clip",
            "Method 4 at the trained length. Offsets beyond the clip share one vector. A flat line means that near "
            "offsets are enough. Bars are 95 % intervals over seeds.",
            "clip",
            "F1",
            tuple(series),
            log_x=True,
            whiskers=True,
        ),
        Grid(
            "Parameters and F1",
            "Parameters of the tables of all layers, and F1 at the trained length with its 95 % interval.",
            table.header,
            _rounded(table),
        ),
    )


def on_glue(found: Measured) -> tuple[Figure, ...]:
    """C4: gains over the original by task."""
    table = found.tables["gains"]
    methods = list(dict.fromkeys(table.column("method")))
    return tuple(
        Intervals(
            f"{method} on GLUE",
            "Score of the fitted method minus that of the original after the same fine-tuning, in points, paired by "
            "seed, with 95 % intervals. Left of 0: the method is worse.",
            "difference in points",
            _intervals(table.where(method=method), "task"),
        )
        for method in methods
    )


def kept_by_budget(found: Measured) -> tuple[Figure, ...]:
    """C5: share of the original's score by steps of adaptation, one figure per test."""
    table = found.tables["kept"].where(seed=0)
    figures: list[Figure] = []
    for test in dict.fromkeys(table.column("test")):
        series = []
        for number, method in enumerate(dict.fromkeys(table.column("method"))):
            rows = Table(table.header, sorted(table.where(test=test, method=method).rows, key=_steps))
            series.append(Series(method, rows.column("steps"), rows.column("share"), colour=number))
        figures.append(
            Lines(
                f"Quality kept on {test}",
                "Score divided by that of the original. 0 steps: the method is fitted to the attention of the original "
                "and nothing is trained. A drop-in replacement is near 1.",
                "steps of adaptation",
                "share of the original's score",
                tuple(series),
            )
        )
    every = found.tables["kept"]
    note = "All models: method, steps of adaptation, seed, score and that of the original."
    return (*figures, Grid("Scores before and after", note, every.header, _rounded(every)))


def identities(found: Measured) -> tuple[Figure, ...]:
    """C6: the differences."""
    table = found.tables["differences"]
    note = "Largest difference between two attention outputs. Identities are at rounding; controls must be far above."
    return (Grid("Method 4 and absolute embeddings", note, table.header, _rounded(table, digits=3)),)


def learned(found: Measured) -> tuple[Figure, ...]:
    """C7: position table, relative weights, vectors by offset and attention, in the manner of the paper's figures."""
    sizes = found.tables["sizes"]
    norms = tuple(
        Series(name, sizes.column("offset"), sizes.column(name), dashed=name == "initial")
        for name in ("trained", "initial")
    )
    return (
        _heat(
            found.tables["positions"],
            "Absolute position embeddings p_i",
            "The position table of the original: a row per position, a column per coordinate (both thinned). Waves "
            "along the positions are what the table has learned.",
            ("coordinate", "position"),
            diverging=True,
        ),
        _pairs(found.tables["scalars"]),
        _weights(found.tables["vectors"]),
        Lines(
            "Length of the vectors by offset",
            "Euclidean length of the first layer's vector for each offset j − i, trained and as it began. Near offsets "
            "that stand out have been learned; a flat dashed line is the random start.",
            "offset",
            "length",
            norms,
        ),
        _heat(
            found.tables["attention"],
            "Attention of the first layer",
            "Mean weights over the heads and over texts: a row per query, a column per key. A bright diagonal is local "
            "attention; a bright first column is attention to the first token.",
            ("key", "query"),
        ),
    )


def _weights(vectors: Table) -> Small:
    rows = [row for row in vectors.rows if abs(_number(row[0])) <= REACH]
    offsets = [_number(row[0]) for row in rows]
    shown = range(min(SHOWN, len(vectors.header) - 1))
    weights = {at: [_number(row[at + 1]) for row in rows] for at in shown}
    panels = tuple(
        Lines(f"coordinate {at}", "", "offset", "weight", (Series("weight", offsets, y),)) for at, y in weights.items()
    )
    note = (
        f"The vectors of method 4 in the first layer for offsets from −{REACH} to {REACH}, one panel per coordinate. A "
        f"coordinate that changes around offset 0 and is level far away carries the order of near tokens."
    )
    return Small("Weights of method 4 by offset", note, panels, columns=4)


def _pairs(scalars: Table) -> Heat:
    """The matrix a_ij of the first head, from its scalars by offset."""
    by_offset = {int(_number(row[0])): _number(row[1]) for row in scalars.rows}
    last = max(by_offset)
    at = list(range(LAGS))
    values = [[shortened(by_offset[max(-last, min(last, j - i))]) for j in at] for i in at]
    return Heat(
        "Relative weights a_ij of method 2",
        "The factor on q_i·k_j in the first layer and head, fitted to the original. It depends on j − i alone, so "
        "every diagonal has one colour.",
        "key j",
        "query i",
        at,
        at,
        values,
    )


def _heat(table: Table, title: str, note: str, labels: tuple[str, str], *, diverging: bool = False) -> Heat:
    rows = [_number(row[0]) for row in table.rows]
    values = [[shortened(_number(value)) for value in row[1:]] for row in table.rows]
    return Heat(title, note, *labels, rows, list(table.header[1:]), values, diverging)


def _intervals(table: Table, name: str) -> tuple[Interval, ...]:
    columns: Any = zip(*(table.column(each) for each in (name, "mean", "low", "high")), strict=True)
    return tuple(
        Interval(str(label), mean, low, high, colour=at) for at, (label, mean, low, high) in enumerate(columns)
    )


def _rounded(table: Table, digits: int = 4) -> list[list[Any]]:
    return [[shortened(cell, digits) if isinstance(cell, float) else cell for cell in row] for row in table.rows]


def _number(cell: Any) -> float:
    return float(cell)


def _first(row: Any) -> float:
    return float(row[0])


def _steps(row: Any) -> float:
    return float(row[1])


FIGURES: dict[str, Callable[[Measured], tuple[Figure, ...]]] = {
    "C1": best_on_squad,
    "C2": by_length,
    "C3": by_clip,
    "C4": on_glue,
    "C5": kept_by_budget,
    "C6": identities,
    "C7": learned,
}
