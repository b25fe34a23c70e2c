"""The work of the claims on variance: random models, trainings, and the traces of position in the trained models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from locant.papers.cost import Shape
from locant.papers.glue import slug
from locant.papers.place import Place
from locant.papers.random_models import CompareWithTheory, CompareWithTwin, ReadPositions
from locant.papers.small_models import SINES
from locant.papers.steps import Adapting, Measuring, Step, Training, made, source
from locant.papers.traces import Bigrams, TraceOfModels, TraceOfRun

if TYPE_CHECKING:
    from locant.papers.variance import Sizes

NOPE, BASELINE = "nope", "learned"
CAUSAL = (BASELINE, NOPE, SINES, "alibi", "rope")
MASKED = (BASELINE, NOPE, SINES, "alibi")
TRACED = (NOPE, "rope", BASELINE)
"""Schemes of the causal models whose variance is measured."""
STORIES = {"rope": "stories15M", NOPE: "stories15M, adapted to nope"}


def reading(at: Place) -> list[Measuring]:
    """Returns one step per random model: probes of it and its twin."""
    size: Sizes = at.size
    work = [ReadPositions(size.random, size.probing, seed) for seed in range(size.models)]
    return [_measuring(f"variance-random-s{each.seed}", each) for each in work]


def twins(at: Place) -> list[Measuring]:
    """Returns one step per random model: the variance of it and its twin."""
    size: Sizes = at.size
    work = [CompareWithTwin(size.random, size.sequences, seed) for seed in range(size.models)]
    return [_measuring(f"variance-twin-s{each.seed}", each) for each in work]


def comparing(at: Place) -> list[Measuring]:
    """Returns one step per random model: every step of every layer beside theory."""
    size: Sizes = at.size
    work = [CompareWithTheory(size.theory, size.sequences, seed) for seed in range(size.models)]
    return [_measuring(f"variance-theory-s{each.seed}", each) for each in work]


def training(at: Place, task: str, scheme: str) -> Training:
    """Returns the training of one scheme on one task, `clm` or `mlm`: one step each, so that its models can be measured
    before the next scheme begins."""
    size: Sizes = at.size
    causal = task == "clm"
    preset = (
        f"quick:length={size.length},batch={size.batch},rate={size.rate:g},layers={size.layers},heads={size.heads},"
        f"width={size.width},vocabulary={size.vocabulary},evaluated={size.evaluated},longest=1,"
        f"kept={size.kept if causal else 0}"
    )
    return Training(
        f"variance-{task}-{slug(scheme)}", task, (scheme,), size.seeds,
        size.causal_steps if causal else size.masked_steps, preset, source("wikitext"), keep_models=True,
    )  # fmt: skip


def losses(at: Place, task: str) -> dict[str, dict[int, float]]:
    """Returns scheme -> seed -> test loss."""
    schemes = CAUSAL if task == "clm" else MASKED
    return {scheme: training(at, task, scheme).scores(at)[scheme] for scheme in schemes}


def tracing(at: Place, task: str, scheme: str) -> list[Measuring]:
    """Returns one step per seed: variance and probes of the models of a run, before, during and after training."""
    size: Sizes = at.size
    shape, kept = Shape(size.layers, size.width), size.kept if task == "clm" else 0
    work = [
        TraceOfRun(
            training(at, task, scheme).model_of(scheme, seed), scheme, seed, size.windows, size.probing, scheme == NOPE,
            shape, size.length, kept,
        )
        for seed in range(size.seeds)
    ]  # fmt: skip
    return [_measuring(f"variance-trace-{task}-{slug(scheme)}-s{each.seed}", each) for each in work]


def bigram_step(at: Place) -> Measuring:
    """Returns the step that computes the loss of bigrams on the tokens of the causal models."""
    return _measuring("variance-bigrams", Bigrams(training(at, "clm", NOPE).model_of(NOPE, 0)))


def adapting(at: Place) -> list[Step]:
    """Returns the adaptation of stories15M to `nope`, and the measurement of both models."""
    size: Sizes = at.size
    if not size.adapt_steps:
        return []
    name, text = "variance-stories-nope", source("wikitext")
    models = ((STORIES["rope"], source("stories")), (STORIES[NOPE], made(name)))
    return [
        Adapting(name, source("stories"), NOPE, text, size.adapt_steps, size.adapt_length),
        _measuring("variance-stories", TraceOfModels(models, text, size.adapt_length, size.windows, size.probing)),
    ]


@dataclass(frozen=True)
class _Cost:
    """A number as a function. Two steps are equal if their fields are, and two lambdas never are."""

    operations: float

    def __call__(self, at: Place) -> float:
        return self.operations


def _measuring(name: str, work: Any) -> Measuring:
    return Measuring(name, work, _Cost(work.operations))
