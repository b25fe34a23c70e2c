"""GLUE with a pretrained model: fine-tuning one scheme on one task is one step, which several papers can share.

An arm is a scheme that is trained cold (added to the pretrained model, or put in place of its table, and fine-tuned
from there), or one that is first fitted to the attention of the pretrained model. Every arm of a seed sees the same
examples in the same order, so the gains are paired by seed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from locant.experiments.statistics import Estimate
from locant.experiments.tasks import find_task
from locant.papers.effects import average_gain, gain
from locant.papers.place import Place
from locant.papers.steps import Fitting, Input, Step, Training, made, source

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


# One step of all-MiniLM-L6-v2 with 16 examples takes 0.4 s (CoLA), 0.7 s (STS-B), 1.0 s (MRPC) and 1.3 s (RTE) on one
# core, and the test 8 to 20 s. So an arm costs 90 · 3.2 + 50 = 340 core-seconds per seed at `small`. Two cores train
# six seeds in the time of five. WNLI is left out: its test set misleads a model that learns its training set.
GLUE_SIZES: Mapping[str, GlueSizes] = {
    "quick": GlueSizes(("MRPC", "STS-B"), seeds=2, steps=16, batch=8, length=48, rate=1e-4, evaluated=128),
    "small": GlueSizes(("CoLA", "MRPC", "STS-B", "RTE"), seeds=6, steps=90, batch=16, length=80, rate=1e-4),
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


def steps_of(sizes: GlueSizes, arms: Sequence[Arm]) -> list[Step]:
    """Returns the fits of the arms that need one, then every arm on every task."""
    return [
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
