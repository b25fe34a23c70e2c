"""SQuAD with a pretrained model: arms that start cold, and arms that are fitted and adapted first.

A cold arm has its new scheme put in place of the pretrained table and is fine-tuned from there. A warm arm starts from
a model whose scheme was fitted to the original attention and that was distilled from the original for a few steps. Arms
of one seed have the same examples in the same order and the same new head, so gains are paired by seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from locant.experiments.arms import NATIVE
from locant.papers.glue import ENCODER, TEXT, fitting, slug
from locant.papers.place import Place
from locant.papers.steps import Adapting, Fitting, Step, Training, made, source

SQUAD = source("squad")

Scores = Mapping[int, float]
"""Seed -> score."""


@dataclass(frozen=True)
class SquadSizes:
    """Sizes of the fine-tuning runs on SQuAD."""

    seeds: int  # of the original and the warm arms
    cold_seeds: int  # of the cold arms, which decide nothing
    steps: int
    batch: int  # windows per step
    rate: float  # peak learning rate
    length: int  # tokens of a training window
    longest: int  # longest test windows, as a multiple of `length`
    also: int  # a test length between the doubled ones
    questions: int  # test questions; 0 for all

    @property
    def preset(self) -> str:
        """The preset of the comparison."""
        also = f",also={self.also}" if self.also else ""
        return (
            f"quick:length={self.length},batch={self.batch},rate={self.rate:g},steps={self.steps},"
            f"evaluated={self.questions},longest={self.longest}{also}"
        )


def native(sizes: SquadSizes) -> Training:
    """Returns the fine-tuning of the original, with its own position table."""
    return Training("huang-squad-native", "squad", (NATIVE,), sizes.seeds, sizes.steps, sizes.preset, SQUAD, ENCODER)


def cold(sizes: SquadSizes, scheme: str) -> Training:
    """Returns the fine-tuning of one cold arm."""
    name, seeds = f"huang-squad-cold-{slug(scheme)}", sizes.cold_seeds
    return Training(name, "squad", (scheme,), seeds, sizes.steps, sizes.preset, SQUAD, ENCODER)


def warm(sizes: SquadSizes, scheme: str, budget: int) -> Training:
    """Returns the fine-tuning of one arm that was adapted for `budget` steps first."""
    return Training(
        f"huang-squad-warm-{slug(scheme)}", "squad", (NATIVE,), sizes.seeds, sizes.steps, sizes.preset, SQUAD,
        made(adapted(scheme, budget).name),
    )  # fmt: skip


def adapted(scheme: str, budget: int, seed: int = 0) -> Fitting | Adapting:
    """Returns the model with another scheme: fitted if the budget is 0, else adapted for `budget` steps."""
    if budget == 0:
        return fitting(scheme)
    name = f"huang-adapted-{slug(scheme)}-{budget}steps-s{seed}"
    return Adapting(name, ENCODER, scheme, TEXT, budget, seed=seed)


def warm_steps(sizes: SquadSizes, schemes: tuple[str, ...], budget: int) -> list[Step]:
    """Returns the adaptation and the fine-tuning of every warm arm."""
    return [step for scheme in schemes for step in (adapted(scheme, budget), warm(sizes, scheme, budget))]


def scores(at: Place, training: Training, metric: str = "f1", length: int | None = None) -> dict[str, Scores]:
    """Returns scheme -> seed -> score in per cent, at one length (default: the trained one)."""
    return {scheme: dict(found) for scheme, found in training.scores(at, metric, length).items()}


def only(found: Mapping[str, Scores]) -> Scores:
    """Returns the scores of a training with one scheme."""
    (one,) = found.values()
    return one


def lengths(at: Place, training: Training) -> list[int]:
    """Returns the tested lengths, the trained one first."""
    return [int(row["length"]) for row in training.results(at)[0].tests]


def parameters(at: Place, training: Training, scheme: str = NATIVE) -> int:
    """Returns the parameters of a scheme in all layers."""
    return next(int(run.cost["scheme_parameters"]) for run in training.results(at) if run.run.scheme == scheme)
