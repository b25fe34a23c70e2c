"""Figures of the claims of Wennberg & Henter 2021."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from locant.papers.claim import Measured, Table
from locant.report.figures import Figure, Grid, Heat, Interval, Intervals, Lines, Series, Small, shortened


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _grid(title: str, note: str, table: Table) -> Grid:
    cells = [[shortened(cell) if isinstance(cell, float) else cell for cell in row] for row in table.rows]
    return Grid(title, note, table.header, cells)


def tables(found: Measured) -> tuple[Figure, ...]:
    """A1: the heat maps, and R² with its control."""
    maps, r2 = found.tables["maps"], found.tables["r2"]
    panels = []
    for name in _distinct(maps.column("table")):
        own = maps.where(table=name)
        places = _distinct(own.column("row"))
        values = own.column("value")
        matrix = [values[at : at + len(places)] for at in range(0, len(values), len(places))]
        panels.append(Heat(name, "", "position", "position", places, places, matrix, diverging=True))
    header = list(r2.header)
    rows = []
    for row in r2.rows:
        cell: dict[str, Any] = dict(zip(header, row, strict=True))
        word = f"control {cell['control']:.3f}"
        rows.append(Interval(cell["table"], cell["R²"], cell["low"], cell["high"], word=word,
                             colour=0 if cell["kind"] == "learned" else 1))  # fmt: skip
    return (
        Small(
            "E Eᵀ of every table",
            "Inner products of the vectors of any two positions, for every n-th position from 1 on, in units of the "
            "median squared norm. Stripes along the diagonal "
            "mean that only the offset matters; blocks and edges mean that absolute positions matter. The map of a "
            "sinusoidal table shows perfect stripes.",
            tuple(panels),
            columns=4,
        ),
        Intervals(
            "Translation invariance of every table",
            "R² of the best fit by a function of the offset, without the main diagonal: 1 is translation-invariant. "
            "The word beside a row is the R² of random rows with the same norms. Bars are 95 % intervals over "
            "positions. The sinusoidal table is a positive control: it must reach 1.",
            "R² of E Eᵀ, i ≠ j",
            tuple(rows),
        ),
        _grid(
            "Tables",
            "With the diagonal, random rows score high as well, so the column without it decides.",
            r2,
        ),
        _grid("Left out", "What the files also hold, and why it is not a table to measure.", found.tables["left out"]),
    )


def heads(found: Measured) -> tuple[Figure, ...]:
    """A2: R² of every head, and its control."""
    table = found.tables["heads"]
    series = []
    for at, model in enumerate(_distinct(table.column("model"))):
        own = table.where(model=model)
        number = own.column("head")
        series.append(Series(model, number, own.column("R²"), colour=at))
        series.append(Series(f"{model}, control", number, own.column("control"), dashed=True, colour=at))
    return (
        Lines(
            "Translation invariance of the heads of the first layer",
            "R² of E W_Q W_Kᵀ Eᵀ. 1 means that the table makes this head depend on the offset alone. Dashed lines are "
            "random tables with the same row norms through the same weights. Heads have no order; the lines only help "
            "to compare models. A head near its control uses absolute positions, or none.",
            "head",
            "R²",
            tuple(series),
        ),
        _grid("Heads", "The last column applies the layer norm of the embeddings to the table first.", table),
    )


def rises(found: Measured) -> tuple[Figure, ...]:
    """A3: R² by step."""
    table = found.tables["by step"]
    series = []
    for at, shape in enumerate(_distinct(table.column("shape"))):
        own = table.where(shape=shape)
        for seed in _distinct(own.column("seed")):
            run = own.where(seed=seed)
            series.append(Series(f"{shape}, seed {seed}", run.column("step"), run.column("R²"), colour=at))
    return (
        Lines(
            "Translation invariance during training",
            "R² of E Eᵀ without its diagonal, one line per model; models of one shape (layers x width) have one "
            "colour. A fresh table is noise, with R² of about 2 divided by the number of positions. A rise means that "
            "the model learns to use its table as if it were relative.",
            "step",
            "R² of E Eᵀ, i ≠ j",
            tuple(series),
        ),
        _grid(
            "Start and end",
            "Means over the first and the last tenth of the logged steps. The trend is the rank correlation of R² with "
            "the step.",
            found.tables["rise"],
        ),
    )


def performs(found: Measured) -> tuple[Figure, ...]:
    """A4: R² against the loss, and the correlations."""
    table = found.tables["models"]
    series = []
    for at, shape in enumerate(_distinct(table.column("shape"))):
        own = table.where(shape=shape)
        for steps in _distinct(own.column("steps")):
            points = sorted(
                zip(own.where(steps=steps).column("loss"), own.where(steps=steps).column("R²"), strict=True)
            )
            x, y = [x for x, _ in points], [y for _, y in points]
            series.append(Series(f"{shape}, {steps} steps", x, y, colour=at, thin=True))
    rows = [Interval(str(name), mean, low, high) for name, mean, low, high, _ in found.tables["correlations"].rows]  # type: ignore[arg-type]
    return (
        Lines(
            "Translation invariance against test loss",
            "One short line joins the seeds of one size and one budget, ordered by loss; colours are sizes. If more "
            "invariant tables go with better models, the lines lie on a path from the upper left to the lower right.",
            "test loss (lower is better)",
            "R² of E Eᵀ, i ≠ j",
            tuple(series),
        ),
        Intervals(
            "Rank correlation of R² with minus the loss",
            "The first row decides. The second leaves out what size and training time explain; the third looks along "
            "the steps of single runs, where both change with time. Bars are 95 % intervals.",
            "Spearman's correlation",
            tuple(rows),
        ),
    )


def glue(found: Measured) -> tuple[Figure, ...]:
    """A5: gains per task and arm."""
    table = found.tables["gains"]
    figures: list[Figure] = []
    for model in _distinct(table.column("model")):
        own = table.where(model=model)
        arms = _distinct(own.column("arm"))
        rows = []
        for _, arm, task, mean, low, high, seeds in own.rows:
            rows.append(
                Interval(f"{task}, {arm}", mean, low, high, word=f"{seeds} seeds", colour=arms.index(arm))  # type: ignore[arg-type]
            )
        figures.append(
            Intervals(
                f"GLUE: {model}, gain over the position table",
                "Difference of the scores, paired by seed; bars are 95 % intervals. Right of 0 the scheme is better "
                "than the table. `native+` is the table with TISA beside it; the others have no table. Colours are "
                "schemes; `mean` is the mean over the tasks.",
                "gain in points",
                tuple(sorted(rows, key=lambda row: not row.name.startswith("mean,"))),
            )
        )
    figures.append(_grid("Scores", "Every run: the score of the benchmark, times 100.", found.tables["scores"]))
    return tuple(figures)


def parameters(found: Measured) -> tuple[Figure, ...]:
    """A6: counts."""
    return (
        _grid(
            "Positional parameters",
            "Parameters of the position table of a base model, and of TISA in its place. In ALBERT all layers share "
            "their kernels, in BERT each layer has its own.",
            found.tables["parameters"],
        ),
    )


def lengths(found: Measured) -> tuple[Figure, ...]:
    """A7: loss by length."""
    table = found.tables["lengths"]
    trained = float(min(table.column("length")))
    figures: list[Figure] = []
    for title, label, columns, note in (
        ("Loss by length", "test loss (lower is better)", ("loss", "low", "high"),
         "Mean test loss at each length over the same text; bars are 95 % intervals over seeds. A scheme that "
         "extrapolates stays level. The position table has a single dot: it cannot read longer inputs."),
        ("Loss by length, minus that at the trained length", "change of the loss",
         ("change", "change low", "change high"),
         "Each model minus itself at the trained length. Below 0, longer inputs help; above 0, the scheme does not "
         "extrapolate."),
    ):  # fmt: skip
        series = []
        for at, scheme in enumerate(_distinct(table.column("scheme"))):
            own = table.where(scheme=scheme)
            y, low, high = (own.column(name) for name in columns)
            series.append(Series(scheme, own.column("length"), y, low, high, colour=at))
        figures.append(
            Lines(title, note, "length in tokens", label, tuple(series), log_x=True,
                  marks=((trained, "trained length"),), whiskers=True)
        )  # fmt: skip
    return (*figures, _grid("Loss at each length", "The numbers of both figures.", table))


def curves(found: Measured) -> tuple[Figure, ...]:
    """A8: f(r) per head, and the shares of the labels."""
    table = found.tables["curves"]
    panels = []
    for layer in _distinct(table.column("layer")):
        of_layer = table.where(layer=layer)
        for head in _distinct(of_layer.column("head")):
            own = of_layer.where(head=head)
            r = own.column("r")
            panels.append(
                Lines(f"{layer}, head {head}: {own.column('kind')[0]}", "", "r = key − query", "f(r)",
                      (Series("trained", r, own.column("f")),
                       Series("at initialisation", r, own.column("initial f"), dashed=True)))
            )  # fmt: skip
    rows = [
        Interval(f"{kind}, {when}", mean, low, high, colour=0 if when == "trained" else 1)  # type: ignore[arg-type]
        for when, kind, mean, low, high in found.tables["shares"].rows
    ]
    return (
        Small(
            "f(r) of every head",
            "The curve that TISA adds to the logits, for the first seed; dashed before training. A peak near 0 is a "
            "local head: it attends to neighbours. A flat curve is a global head. A peak left of 0 attends to earlier "
            "tokens, right of 0 to later ones.",
            tuple(panels),
            columns=4,
        ),
        Intervals(
            "Local and global heads",
            "Share of the heads with each label; bars are 95 % intervals over seeds. Local: at least half of "
            "softmax(f) lies within three tokens. Global: at most twice the share of uniform attention.",
            "share of heads",
            tuple(rows),
        ),
        _grid("Labels", "`near` is the share of softmax(f) within three tokens.", found.tables["heads"]),
    )


FIGURES: dict[str, Callable[[Measured], tuple[Figure, ...]]] = {
    "A1": tables,
    "A2": heads,
    "A3": rises,
    "A4": performs,
    "A5": glue,
    "A6": parameters,
    "A7": lengths,
    "A8": curves,
}
"""Claim id -> the function that draws its figures."""
