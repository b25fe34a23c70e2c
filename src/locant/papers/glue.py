"""GLUE with a pretrained model: fine-tuning one scheme on one task is one step, which several papers can share.

An arm is a scheme that is trained cold (added to the pretrained model, or put in place of its table, and fine-tuned
from there), or one that is first fitted to the attention of the pretrained model. Every arm of a seed sees the same
examples in the same order, so the gains are paired by seed.

Fine-tuning that teaches a task nothing shows nothing about arms. So only tasks count on which the original is better
than a constant guess, the most common label of the training set for every test example. Arms have no say in this.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from locant.experiments.statistics import Estimate, estimate
from locant.experiments.tasks import find_task
from locant.experiments.tasks.glue import KINDS, Undefined
from locant.experiments.tasks.rows import spread
from locant.papers.claim import Part
from locant.papers.effects import average_gain, gain, known
from locant.papers.place import Place
from locant.papers.rules import Criterion, Reached
from locant.papers.steps import Fitting, Input, Measuring, Step, Training, made, source
from locant.runs.glue_files import read_folder

ENCODER = source("encoder")
TEXT = source("wikitext")
"""Text that a scheme is fitted on."""


@dataclass(frozen=True)
class GlueSizes:
    """Sizes of the fine-tuning runs."""

    tasks: tuple[str, ...]
    seeds: int
    steps: int
    batch: int  # examples per step
    length: int  # longest input in tokens; a batch is padded to its longest example
    rate: float  # peak learning rate
    evaluated: int = 0  # test examples; 0 for all

    @property
    def preset(self) -> str:
        """The preset of the comparison."""
        return (
            f"small:length={self.length},batch={self.batch},rate={self.rate:g},evaluated={self.evaluated},"
            f"steps={self.steps}"
        )


# One step of all-MiniLM-L6-v2 with 16 examples takes 0.12 s (CoLA), 0.13 s (SST-2), 0.30 s (STS-B) and 0.42 s (MRPC) on
# one core, and the test 5 to 13 s. So an arm costs 270 core-seconds per seed at `small`. With 90 steps at 1e-4 the
# original learned next to nothing (docs/log.md). WNLI is left out: its test set misleads a model that learns its
# training set.
GLUE_SIZES: Mapping[str, GlueSizes] = {
    "quick": GlueSizes(("MRPC", "STS-B"), seeds=2, steps=16, batch=8, length=48, rate=1e-4, evaluated=128),
    "small": GlueSizes(("CoLA", "SST-2", "MRPC", "STS-B"), seeds=5, steps=250, batch=16, length=80, rate=3e-4),
    "paper": GlueSizes(("CoLA", "SST-2", "MRPC", "STS-B", "RTE"), seeds=5, steps=3000, batch=32, length=128, rate=3e-5),
}
"""Sizes of the runs that the papers share, by preset. A step's name has task and scheme only, so its sizes are here."""


@dataclass(frozen=True)
class Arm:
    """A scheme in a pretrained model, trained cold or fitted first."""

    scheme: str  # native, native+tisa:kernels=5, tisa:kernels=5
    fitted: bool = False

    def __post_init__(self) -> None:
        if self.fitted and self.scheme.startswith("native"):
            raise ValueError(f"a fitted scheme takes the place of the model's own positions; got {self.scheme!r}")

    @property
    def label(self) -> str:
        """The arm in words."""
        return f"{self.scheme}, fitted" if self.fitted else self.scheme

    @property
    def slug(self) -> str:
        """The arm in a file name."""
        return slug(self.scheme) + ("-fitted" if self.fitted else "")


NATIVE = Arm("native")


def slug(text: str) -> str:
    """Returns a text as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9=+,._]", "-", text)


def training(
    task: str, arm: Arm, sizes: GlueSizes, *, model: Input = ENCODER, prefix: str = "glue", seeds: int | None = None
) -> Training:
    """Returns the fine-tuning of one arm on one task, called PREFIX-TASK-ARM. `model` is the one to start from."""
    begin = made(fitting(arm.scheme).name) if arm.fitted else model
    return Training(
        f"{prefix}-{task}-{arm.slug}", f"glue:{task}", ("native" if arm.fitted else arm.scheme,),
        sizes.seeds if seeds is None else seeds, sizes.steps, sizes.preset, source(f"glue:{task}"), begin,
    )  # fmt: skip


def fitting(scheme: str) -> Fitting:
    """Returns the fit of a scheme to the pretrained encoder, called fitted-SCHEME."""
    return Fitting(f"fitted-{slug(scheme)}", ENCODER, scheme, TEXT)


@dataclass(frozen=True)
class ConstantGuess:
    """The score of the most common training label, for every test example; 0 where it has no correlation."""

    task: str
    data: Input
    evaluated: int  # test examples; 0 for all

    def __call__(self, at: Place) -> dict[str, Any]:
        parts, _ = read_folder(self.task, self.data.path(at))
        train, test = (parts[name].labels for name in ("train", "dev"))
        labels = [test[number] for number in spread(len(test), self.evaluated)]
        ((guess, _),) = Counter(train).most_common(1)
        try:
            scores = KINDS[self.task].scores([guess] * len(labels), labels)
        except Undefined:
            return {"score": 0.0}
        return {"score": scores[KINDS[self.task].metric]}


def guessing(task: str, sizes: GlueSizes) -> Measuring:
    """Returns the step that scores a constant guess, called glue-TASK-constant, or …-constant-N of N test examples."""
    end = f"-{sizes.evaluated}" if sizes.evaluated else ""
    guess = ConstantGuess(task, source(f"glue:{task}"), sizes.evaluated)
    return Measuring(f"glue-{task}-constant{end}", guess, cost_of_guess)


def cost_of_guess(at: Place) -> float:
    """Floating-point operations of a constant guess; a function of the module, so that equal steps are equal."""
    return 1e9


def enough_learned(asks: str) -> Criterion:
    """Returns the condition that fine-tuning teaches the original two tasks at least."""
    return Criterion(asks, Reached(seeds=1))


def learned_tasks(at: Place, sizes: GlueSizes, original: Scores) -> tuple[str, ...]:
    """Returns the tasks on which the original is better than a constant guess, by its interval over seeds."""
    found = []
    for task, scores in original.items():
        guess = at.measured(guessing(task, sizes).name)["score"]
        low = estimate([score - guess for score in scores.values()]).low
        if low is not None and low > 0:
            found.append(task)
    return tuple(found)


def learned_part(asks: str, tasks: Sequence[str]) -> Part:
    """Returns the part that the condition judges: 0 for one task that was learned."""
    return Part(asks, ", ".join(tasks) or "none", known(len(tasks) - 1))


def of_tasks(scores: Scores, tasks: Sequence[str]) -> Scores:
    """Returns the scores of some tasks."""
    return {task: found for task, found in scores.items() if task in tasks}


def steps_of(sizes: GlueSizes, arms: Sequence[Arm]) -> list[Step]:
    """Returns the fits of the arms that need one, then every arm on every task, and a constant guess of each."""
    return [
        *(guessing(task, sizes) for task in sizes.tasks),
        *(fitting(arm.scheme) for arm in arms if arm.fitted),
        *(training(task, arm, sizes) for task in sizes.tasks for arm in arms),
    ]


def sources_of(sizes: GlueSizes) -> tuple[str, ...]:
    """Returns the names of the sources that the arms read."""
    return ("encoder", "wikitext", *(f"glue:{task}" for task in sizes.tasks))


def scores(at: Place, sizes: GlueSizes, arm: Arm) -> dict[str, dict[int, float]]:
    """Returns task -> seed -> score of one arm: the score of the benchmark, times 100."""
    return {task: _only(training(task, arm, sizes).scores(at)) for task in sizes.tasks}


def _only(found: Mapping[str, dict[int, float]]) -> dict[int, float]:
    (one,) = found.values()
    return one


Scores = Mapping[str, Mapping[int, float]]
"""Task -> seed -> score."""


def gains(better: Scores, than: Scores) -> dict[str, Estimate]:
    """Returns the gain of one arm over another per task, paired by seed, in points."""
    return {
        task: gain(better[task], than[task], higher_is_better=find_task(f"glue:{task}").higher_is_better)
        for task in better
        if task in than
    }


def mean_gain(better: Scores, than: Scores) -> Estimate:
    """Returns the gain averaged over the tasks, with its interval over the seeds that every task of both arms has."""
    tasks = [task for task in better if task in than]
    shared = set.intersection(*({*better[task]} & {*than[task]} for task in tasks)) if tasks else set()
    return average_gain([[better[task][seed] - than[task][seed] for seed in sorted(shared)] for task in tasks])
