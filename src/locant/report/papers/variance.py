"""Figures of the claims of Chi et al. 2023: variance by position, probes by layer, and losses without positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from locant.papers.claim import Measured, Table
from locant.report.figures import Figure, Grid, Interval, Intervals, Lines, Series, Small, shortened

LOG = "Both axes are logarithmic, so a variance that falls as 1/m is a straight line of slope −1."
DASHED = ("constant guess", "shuffled positions", "theory")
"""Series that are controls or theory."""


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _series(
    name: str, table: Table, x: str, y: str, *, colour: int | None = None, dashed: bool | None = None
) -> Series:
    low, high = (
        ([shortened(value) for value in table.column(edge)] if edge in table.header else None)
        for edge in ("low", "high")
    )
    if low is None or high is None or all(value is None for value in [*low, *high]):
        low = high = None
    return Series(
        name, table.column(x), [shortened(value) for value in table.column(y)], low, high,
        dashed=name in DASHED if dashed is None else dashed, colour=colour,
    )  # fmt: skip


def _grid(title: str, note: str, table: Table) -> Grid:
    rows = [[shortened(cell) if isinstance(cell, float) else cell for cell in row] for row in table.rows]
    return Grid(title, note, table.header, rows)


def _probes(title: str, note: str, table: Table) -> Lines:
    series = tuple(
        _series(name, table.where(model=name), "layer", "error") for name in _distinct(table.column("model"))
    )
    return Lines(title, note, "layer", "error in tokens", series)


READING = (
    "Mean absolute error of probes that predict the position of a token from its hidden state after each layer (0: the "
    "embeddings), with the 95 % interval over models. At the dashed lines position is lost; near 0 it is easy to read."
)


def random_models(found: Measured) -> tuple[Figure, ...]:
    """Returns the figure of B1: probe error by layer, of random models, their twins and the controls."""
    note = f"{READING} The twin has the same weights and no causal mask."
    return (_probes("Position read from random models without positions", note, found.tables["probes"]),)


def theory(found: Measured) -> tuple[Figure, ...]:
    """Returns the figures of B2: measured and predicted variance by position, slopes, and errors step by step."""
    table = found.tables["attention"]
    panels = tuple(
        Lines(
            f"layer {layer}",
            "",
            "position m",
            "variance",
            (
                _series("measured", here, "m", "measured", colour=0),
                Series("the paper's theory", here.column("m"), _short(here.column("plain")), dashed=True, colour=1),
                Series("corrected theory", here.column("m"), _short(here.column("corrected")), dashed=True, colour=2),
            ),
            log_x=True,
            log_y=True,
        )
        for layer in _distinct(table.column("layer"))
        for here in (table.where(layer=layer),)
    )
    return (
        Small(
            "Variance of the attention output, measured and predicted",
            f"Random models without positions, mean over models with its 95 % interval. {LOG} The paper's theory is "
            "for the first layer; the corrected one follows the correlation of the tokens through all layers.",
            panels,
            columns=3,
        ),
        _grid(
            "Slopes",
            "Slope of log variance against log position, with its 95 % interval over models.",
            found.tables["slopes"],
        ),
        _grid(
            "Errors of both theories, step by step",
            "Theory / measured − 1, mean over the positions 1, 2, 4, … and over models: −0.1 is a theory that is 10 % "
            "too low. The paper's theory is meant for layer 1.",
            found.tables["errors"],
        ),
    )


def _short(values: Sequence[Any]) -> list[float | None]:
    return [shortened(value) for value in values]


def training(found: Measured) -> tuple[Figure, ...]:
    """Returns the figures of B3: variance, slopes and probes before, during and after training."""
    tables = found.tables
    figures: list[Figure] = [_training_curves(tables["variance"]), _training_slopes(tables["slopes"])]
    figures += [_slopes_at_the_end(tables["slopes"]), _training_probes(tables["probes"])]
    losses = "Test loss in nats per token, with its 95 % interval. Below the bigrams, a model uses longer contexts."
    figures.append(_grid("Losses", losses, tables["losses"]))
    if "stories" in tables:
        note = f"Windows of WikiText-2. {LOG} The adapted model has no positions; the original is rotary."
        figures.append(
            Small("Variance in stories15M, before and after it lost its positions", note, _by_model(tables["stories"]))
        )
        figures.append(
            _grid(
                "stories15M, layer by layer",
                "Slope of log variance against log position, and the error of the probe after the layer in tokens.",
                tables["stories layers"],
            )
        )
    return tuple(figures)


def _training_curves(table: Table) -> Small:
    own, predicted = table.where(scheme="nope"), table.where(scheme="theory")
    panels = []
    for layer in _distinct(own.column("layer")):
        here = own.where(layer=layer)
        steps = _distinct(here.column("step"))
        series = [_series(_when(step, steps), here.where(step=step), "m", "variance") for step in steps]
        if predicted.where(layer=layer).rows:
            series.append(_series("theory", predicted.where(layer=layer), "m", "variance"))
        panels.append(
            Lines(f"layer {layer}", "", "position m", "variance", tuple(series), log_x=True, log_y=True)
        )  # fmt: skip
    note = (
        f"Causal models without positions on windows of WikiText-2, mean over seeds, at points of the training. {LOG} "
        "The dashed line is the corrected theory for the start; it assumes that no token occurs twice."
    )
    return Small("Variance of the attention output during training", note, tuple(panels), columns=2)


def _when(step: int, steps: Sequence[int]) -> str:
    return "before training" if step == 0 else "after training" if step == steps[-1] else f"step {step:,}"


def _training_slopes(table: Table) -> Lines:
    own = table.where(scheme="nope")
    series = tuple(
        _series(f"layer {layer}", own.where(layer=layer), "step", "slope") for layer in _distinct(own.column("layer"))
    )
    note = (
        "Slope of log variance against log position in models without positions, with the 95 % interval over seeds. "
        "Below 0 the variance falls with position; at 0 it carries no trace of it."
    )
    return Lines("Slopes during training", note, "training step", "slope", series, whiskers=True)


def _slopes_at_the_end(table: Table) -> Intervals:
    end = table.where(step=max(table.column("step")))
    schemes = _distinct(end.column("scheme"))
    rows = tuple(
        Interval(f"{scheme}, layer {layer}", _n(slope), _n(low), _n(high), colour=schemes.index(scheme))
        for scheme, _, layer, slope, low, high, _ in end.rows
    )
    note = (
        "Slopes after training, layer by layer, with the 95 % interval over seeds. The claim is about nope; models "
        "with positions are there to compare."
    )
    return Intervals("Slopes after training", note, "slope of log variance against log position", rows)


def _n(value: Any) -> float | None:
    return None if value is None else float(value)


def _training_probes(table: Table) -> Small:
    panels = []
    steps = _distinct(table.column("step"))
    for step in sorted(steps):
        here = table.where(step=step)
        models = [name for name in _distinct(here.column("scheme")) if here.where(scheme=name, model=name).rows]
        series = [_series(name, here.where(scheme=name, model=name), "layer", "error") for name in models]
        series += [
            _series(name, here.where(scheme=models[0], model=name), "layer", "error")
            for name in ("constant guess", "shuffled positions")
        ]
        panels.append(Lines(_when(step, sorted(steps)), "", "layer", "error in tokens", tuple(series)))
    return Small("Probes during training", READING, tuple(panels), columns=2)


def _by_model(table: Table) -> tuple[Lines, ...]:
    panels = []
    for name in _distinct(table.column("model")):
        here = table.where(model=name)
        series = tuple(
            _series(f"layer {layer}", here.where(layer=layer), "m", "variance")
            for layer in _distinct(here.column("layer"))
        )
        panels.append(Lines(name, "", "position m", "variance", series, log_x=True, log_y=True))
    return tuple(panels)


def bidirectional(found: Measured) -> tuple[Figure, ...]:
    """Returns the figures of B4: variance and slopes of bidirectional models beside causal ones, and their probes."""
    slopes = found.tables["slopes"]
    models = _distinct(slopes.column("model"))
    rows = tuple(
        Interval(f"{model}, layer {layer}", _n(slope), _n(low), _n(high), colour=models.index(model))
        for model, layer, slope, low, high in slopes.rows
    )
    return (
        Small(
            "Variance of the attention output without a causal mask",
            f"Mean over models. {LOG} In a bidirectional model every token averages all tokens, so the line is flat.",
            _by_model(found.tables["variance"]),
            columns=3,
        ),
        Intervals(
            "Slopes",
            "Slope of log variance against log position with its 95 % interval; the causal models are for comparison.",
            "slope",
            rows,
        ),
        _probes("Probes of random bidirectional models", READING, found.tables["probes random"]),
        _probes("Probes of trained bidirectional models", READING, found.tables["probes trained"]),
    )


def losses(found: Measured) -> tuple[Figure, ...]:
    """Returns the figures of B5: loss differences of causal and of masked models, and the losses."""
    return (
        _differences(
            "Causal models: loss minus that of learned positions",
            "Left of 0 a scheme is better than a learned table. A tick is one seed, the dot their mean with its 95 % "
            "interval.",
            found.tables["causal differences"],
        ),
        _differences(
            "Masked models: loss minus that of no positions",
            "Left of 0 a scheme is better than no positions.",
            found.tables["masked differences"],
        ),
        _grid("Losses", "Test loss in nats per token, with its 95 % interval over seeds.", found.tables["losses"]),
    )


def _differences(title: str, note: str, table: Table) -> Intervals:
    value = table.header[2]
    rows = []
    for number, scheme in enumerate(_distinct(table.column("scheme"))):
        here = table.where(scheme=scheme)
        ((_, _, mean, low, high),) = here.where(seed="mean").rows
        points = [each for each in map(_n, here.column(value)[1:]) if each is not None]
        rows.append(Interval(str(scheme), _n(mean), _n(low), _n(high), points=points, colour=number))
    return Intervals(title, note, f"loss {value}, nats per token", tuple(rows))


FIGURES: dict[str, Callable[[Measured], tuple[Figure, ...]]] = {
    "B1": random_models,
    "B2": theory,
    "B3": training,
    "B4": bidirectional,
    "B5": losses,
}
"""Claim -> its figures."""
