"""Training: the loss of every scheme, step by step."""

from __future__ import annotations

from locant.experiments.averages import average, averaged_runs, by_step, minus
from locant.experiments.comparison import Comparison
from locant.experiments.results import RunResult
from locant.report.comparison.lines import lines, seeds_note
from locant.report.figures import Figure, Lines
from locant.report.page import Section


def training_section(comparison: Comparison, found: list[RunResult]) -> Section:
    """Returns the section on the training loss."""
    logged = {
        scheme: {run.run.seed: by_step(run, "loss") for run in averaged_runs(found, scheme)}
        for scheme in comparison.schemes
    }
    loss = lines((scheme, at, average(list(runs.values()))) for at, (scheme, runs) in enumerate(logged.items()))
    if not loss:
        return Section("Training", "", ())
    figures: list[Figure] = [
        Lines(
            "Training loss",
            f"Loss on the training batches{seeds_note(comparison, found)}. It falls fast, then slowly. A line above "
            "all others learns more slowly or is less expressive; a line that jumps up or ends early has diverged. "
            "Lines that coincide are normal among good schemes.",
            "step",
            "training loss",
            loss,
        )
    ]
    baseline = logged[comparison.schemes[0]]
    gaps = lines(
        (scheme, at, average([minus(run, baseline[seed]) for seed, run in runs.items() if seed in baseline]))
        for at, (scheme, runs) in enumerate(logged.items())
        if at > 0
    )
    if gaps:
        figures.append(
            Lines(
                f"Training loss minus that of {comparison.schemes[0]}",
                "The same, batch by batch: at every step all schemes are trained on the same sequences, so the "
                "difficulty of a batch cancels. Below 0 a scheme is ahead. An early lead that disappears means "
                "that the scheme only learns faster; a gap that stays or grows would also remain in a longer training.",
                "step",
                "difference in training loss",
                gaps,
            )
        )
    return Section("Training", "Every scheme has the same data in the same order.", tuple(figures))
