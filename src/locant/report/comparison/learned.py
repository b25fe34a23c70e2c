"""What each scheme learned: the curves that its runs stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from locant.analysis.curve import WHAT, Curve
from locant.experiments.learned import Learned, SeedCurve, over_seeds
from locant.experiments.results import RunResult
from locant.experiments.tasks import Task
from locant.report.figures import Figure, Lines, Series, Small, shortened
from locant.report.page import Section

First = list[tuple[RunResult, Learned]]
"""The first finished run of each scheme, and its curves."""


def learned_section(task: Task, learned: First, seeds: Mapping[str, Sequence[Learned]]) -> Section:
    """Returns the section with one figure for each scheme and quantity, and one over the seeds of a scheme.

    seeds   the curves of all finished runs, by scheme.
    """
    causal = "Causal" in task.auto
    figures = [
        figure
        for run, curves in learned
        for figure in [
            *_figures(run, curves, causal),
            *_over_seeds(run.run.scheme, over_seeds(seeds.get(run.run.scheme, ()), causal=causal)),
        ]
    ]
    empty = [run.run.scheme for run, curves in learned if not curves.problem and not curves.curves]
    intro = (
        "What the scheme does with the offset between key and query, computed from the parameters of the first seed "
        "that has finished: one line per head"
        + (", for keys at or before their query, because a causal model attends to no others" if causal else "")
        + ". Smooth curves that differ from head to head are normal."
        + (f" Nothing to draw for {', '.join(empty)}: nothing is added for position there." if empty else "")
    )
    return Section("What each scheme learned", intro, tuple(figures))


def learned_notices(learned: First) -> list[str]:
    """Returns one notice for each scheme whose curves could not be read."""
    return [f"What {run.run.scheme} learned is not shown: {its.problem}" for run, its in learned if its.problem]


def _figures(run: RunResult, learned: Learned, causal: bool) -> list[Figure]:
    seed = "" if run.run.seed == 0 else f", seed {run.run.seed}"
    figures: list[Figure] = []
    for what in dict.fromkeys(curve.what for _, curve in learned.curves):
        panels = tuple(_panel(place, curve, causal) for place, curve in learned.curves if curve.what == what)
        title, note = f"{run.run.scheme}{seed}: {what}", _note(what, learned.fixed)
        one = replace(panels[0], title=f"{title}, {panels[0].title}", note=note)
        figures.append(one if len(panels) == 1 else Small(title, note, panels, columns=min(4, len(panels))))
    return figures


def _over_seeds(scheme: str, found: list[SeedCurve]) -> list[Figure]:
    figures: list[Figure] = []
    for what in dict.fromkeys(each.what for each in found):
        own = [each for each in found if each.what == what]
        panels = tuple(
            Lines(
                each.place, "", "offset (key − query)", what,
                (Series("mean over heads", each.r, _short(each.mean), _short(each.low), _short(each.high)),),
            )
            for each in own
        )  # fmt: skip
        note = (
            f"The mean over the heads of a layer and over {own[0].seeds} seeds, with the 95 % interval of the mean "
            "over seeds. Heads have no common order from seed to seed, so only what does not depend on their order "
            "can be compared. A curve added to the logits is shown without its mean, because a constant has no "
            "effect. Where the band contains no effect, seeds do not agree on one."
        )
        title = f"{scheme}: {what}, over seeds"
        one = replace(panels[0], title=f"{title}, {panels[0].title}", note=note)
        figures.append(one if len(panels) == 1 else Small(title, note, panels, columns=min(4, len(panels))))
    return figures


def _short(values: Sequence[float | None]) -> list[float | None]:
    return [shortened(value, 4) for value in values]


def _note(what: str, fixed: bool) -> str:
    if fixed:
        return (
            "This scheme has nothing to learn: the curve follows from its definition and is the same before and after "
            "training. It is shown for comparison with the learned ones."
        )
    if what == WHAT["embed"]:
        return (
            "Cosine of the vectors of two positions this far apart, one of them in the middle of the table. A fresh "
            "table is 1 at offset 0 and noise around 0 elsewhere; a table that has learned which positions are near "
            "falls off smoothly."
        )
    return (
        "Smooth curves are normal: some heads single out the nearest offsets, others attend far away. A flat line is "
        "a head that has not used the scheme; ragged lines had too little training to be interpreted."
    )


def _panel(title: str, curve: Curve, causal: bool) -> Lines:
    by_offset = curve.axis == "offset"
    kept = [at for at, r in enumerate(curve.r) if not causal or not by_offset or r <= 0]
    heads = len(curve.values)
    return Lines(
        title,
        "",
        "offset (key − query)" if by_offset else f"{curve.axis} of the query",
        curve.what,
        tuple(
            Series(
                f"head {head}" if heads > 1 else "all heads",
                [curve.r[at] for at in kept],
                [shortened(values[at], 4) for at in kept],
            )
            for head, values in enumerate(curve.values, 1)
        ),
    )
