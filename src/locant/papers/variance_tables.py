"""Numbers and tables of the claims on variance, from what their steps have measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from locant.experiments.statistics import Estimate, estimate
from locant.papers.claim import Cell, Table
from locant.papers.effects import gain


def skill(probes: Sequence[dict[str, float]], layer: int) -> float:
    """Returns 1 − error / error of the constant guess of the probe after one layer: 0 knows nothing, 1 everything.

    A probe that is worse than the constant guess has been trained too little and reads nothing: 0, not less. So a weak
    probe cannot contradict a claim.
    """
    row = next(row for row in probes if row["layer"] == layer)
    return max(0.0, 1 - row["error"] / row["constant"])


def slopes(rows: Sequence[dict[str, Any]], which: str = "slope") -> list[float]:
    """Returns the slope of the attention output, layer by layer."""
    return [float(row[which]) for row in sorted(rows, key=lambda row: row["layer"])]


def over_seeds(values: Sequence[Sequence[float]]) -> list[Estimate]:
    """Returns one estimate per column of `values[seed][column]`, such as one per layer."""
    return [estimate([row[at] for row in values]) for at in range(min(map(len, values)))]


def shown(length: int) -> list[int]:
    """Returns the positions of a figure with a logarithmic axis: two per octave, and the last."""
    return sorted({round(2 ** (k / 2)) for k in range(2 * length.bit_length()) if 2 ** (k / 2) <= length} | {length})


def cells(found: Estimate) -> tuple[Cell, Cell, Cell]:
    """Returns mean, low and high of a table row."""
    return found.mean, found.low, found.high


PROBE_HEADER = ("layer", "model", "error", "low", "high")


def probe_table(probes: dict[str, list[list[dict[str, float]]]]) -> Table:
    """Returns the errors by layer of several groups of models, `probes[name][seed]`, with the two controls."""
    rows: list[list[Cell]] = []
    first = next(iter(probes.values()))
    for name, group in probes.items():
        for column, found in enumerate(over_seeds([[row["error"] for row in each] for each in group])):
            rows.append([group[0][column]["layer"], name, *cells(found)])
    for name in ("shuffled", "constant"):
        for column, found in enumerate(over_seeds([[row[name] for row in each] for each in first])):
            rows.append([first[0][column]["layer"], CONTROLS[name], *cells(found)])
    return Table(PROBE_HEADER, rows)


CONTROLS = {"shuffled": "shuffled positions", "constant": "constant guess"}


def curves_by_layer(groups: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]) -> Table:
    """Returns the variance by position and layer, mean over seeds, of several groups `groups[name][seed][layer]`."""
    rows: list[list[Cell]] = []
    for name, group in groups.items():
        for at, row in enumerate(group[0]):
            means = over_seeds([each[at]["values"] for each in group])
            rows += [[name, row["layer"], m, means[m - 1].mean] for m in shown(len(means))]
    return Table(("model", "layer", "m", "variance"), rows)


def slope_row(name: str, layer: int, found: Estimate) -> list[Cell]:
    """Returns one row of a table of slopes."""
    return [name, layer, *cells(found)]


Points = Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]
"""scheme -> seed -> points of a training (start, on the way, end) -> variance and probes"""


def after_training(
    points: Points, stories: Mapping[str, Any], losses: Mapping[str, Mapping[int, float]], bigram: float
) -> tuple[dict[str, Table], list[str]]:
    """Returns the tables and sentences of the claim on trained models."""
    slope_rows: list[list[Cell]] = []
    curves: list[list[Cell]] = []
    probes: list[list[Cell]] = []
    for scheme, seeds in points.items():
        for at, point in enumerate(seeds[0]):
            step, group = point["step"], [each[at] for each in seeds]
            both = [
                over_seeds([slopes(each["variance"], which) for each in group]) for which in ("slope", "later slope")
            ]
            for layer, (whole, later) in enumerate(zip(*both, strict=True), 1):
                slope_rows.append([scheme, step, layer, *cells(whole), later.mean])
            table = curves_by_layer({scheme: [each["variance"] for each in group]})
            curves += [[scheme, step, *row[1:]] for row in table.rows]
            for layer, values in enumerate(point.get("theory", []), 1):
                curves += [[THEORY, step, layer, m, values[m - 1]] for m in shown(len(values))]
            if "probes" in point:
                table = probe_table({scheme: [each["probes"] for each in group]})
                probes += [[scheme, step, *row] for row in table.rows]
    tables = {
        "slopes": Table(("scheme", "step", "layer", "slope", "low", "high", "from position 8"), slope_rows),
        "variance": Table(("scheme", "step", "layer", "m", "variance"), curves),
        "probes": Table(("scheme", "step", *PROBE_HEADER), probes),
        "losses": loss_table({"clm": losses}, bigram),
    }
    if stories:
        tables["stories"] = curves_by_layer({name: [found["variance"]] for name, found in stories.items()})
        tables["stories layers"] = Table(
            ("model", "layer", "slope", "probe error", "constant guess"),
            [
                [name, row["layer"], row["slope"], probe["error"], probe["constant"]]
                for name, found in stories.items()
                for row, probe in zip(found["variance"], found["probes"][1:], strict=True)
            ],
        )
    return tables, [*_training_sentences(points, losses, bigram), *_stories_sentences(stories)]


THEORY = "theory"


def _training_sentences(points: Points, losses: Mapping[str, Mapping[int, float]], bigram: float) -> list[str]:
    said = []
    for scheme, seeds in points.items():
        start, end, later = (
            estimate([_mean(slopes(each[at]["variance"], which)) for each in seeds]).mean
            for at, which in ((0, "slope"), (-1, "slope"), (-1, "later slope"))
        )
        said.append(
            f"{scheme}: the mean slope over the layers is {start:+.3f} before training and {end:+.3f} after it "
            f"({later:+.3f} from position 8 on)."
        )
        loss = estimate(list(losses[scheme].values())).mean
        less = "below" if loss < bigram else "not below"
        said.append(f"{scheme}: the loss is {loss:.3f} nats per token, {less} the {bigram:.3f} of smoothed bigrams.")
    return said


def _stories_sentences(stories: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: the mean slope over the layers is {_mean(slopes(found['variance'])):+.3f}; the best layer's probe "
        f"has {min(row['error'] / row['constant'] for row in found['probes']):.0%} of the error of the constant guess."
        for name, found in stories.items()
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def loss_table(scores: Mapping[str, Mapping[str, Mapping[int, float]]], bigram: float) -> Table:
    """Returns the test losses of all schemes of several tasks, and that of bigrams on the causal tokens."""
    rows: list[list[Cell]] = [
        [task, scheme, *cells(estimate(list(values.values())))]
        for task, schemes in scores.items()
        for scheme, values in schemes.items()
    ]
    return Table(("task", "scheme", "loss", "low", "high"), [*rows, ["clm", "bigrams", bigram, None, None]])


def difference_table(scores: Mapping[str, Mapping[int, float]], baseline: str) -> Table:
    """Returns the loss of each scheme minus that of a baseline, paired by seed: one row per seed and one of means."""
    rows: list[list[Cell]] = []
    for scheme, values in scores.items():
        if scheme != baseline:
            found = gain(values, scores[baseline], higher_is_better=True)  # as it is: a lower loss is negative
            rows.append([scheme, "mean", *cells(found)])
            rows += [
                [scheme, seed, values[seed] - scores[baseline][seed], None, None]
                for seed in sorted(values.keys() & scores[baseline].keys())
            ]
    return Table(("scheme", "seed", f"minus {baseline}", "low", "high"), rows)


def row_of(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of a measurement that has the layer and step of another row."""
    key = (wanted["layer"], wanted["step"])
    return next(row for row in found["rows"] if (row["layer"], row["step"]) == key)


def theory_tables(by_step: dict[Any, Any], attention: dict[int, Any], positions: list[int]) -> dict[str, Table]:
    """Returns the tables of a comparison with theory, from the rows of all models by layer and step."""
    curves = [
        [
            layer,
            m,
            *cells(estimate([row["measured"][at] for row in rows])),
            rows[0]["plain"][at],
            rows[0]["corrected"][at],
        ]
        for layer, rows in attention.items()
        for at, m in enumerate(positions)
    ]
    errors = [
        [layer, step, *(cells(estimate([row[f"{kind} error"] for row in rows]))[0] for kind in ("plain", "corrected"))]
        for (layer, step), rows in by_step.items()
        if all(row["plain error"] is not None for row in rows)
    ]
    slope_rows = [
        [layer, *cells(estimate([row["slope"] for row in rows])), rows[0]["theory slope"]]
        for layer, rows in attention.items()
    ]
    return {
        "attention": Table(("layer", "m", "measured", "low", "high", "plain", "corrected"), curves),
        "errors": Table(("layer", "step", "plain", "corrected"), errors),
        "slopes": Table(("layer", "slope", "low", "high", "corrected theory"), slope_rows),
    }
