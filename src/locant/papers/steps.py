"""The work of a reproduction, in steps: trainings, fits, adaptations, analyses. Each resumes after an interruption.

A step returns the numbers that claims read, and may leave models or texts that later steps read. The numbers are kept;
the rest can be deleted, and is made again if a step that is not done needs it.

No step trains anything itself: comparisons come from `locant.experiments`, adaptations from `locant.adaptation`.

Functions import what loads transformers: it takes seconds, and the command must start sooner.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locant.experiments import comparison, workers
from locant.experiments.presets import find_preset
from locant.experiments.results import RunResult, outcomes
from locant.experiments.tasks import find_task
from locant.experiments.work import Run
from locant.papers.cost import Shape, shape_of
from locant.papers.digest import digest_of
from locant.papers.place import MODELS, TEXTS, Place
from locant.runs import files, run_folder, text_source
from locant.runs.budget import Budget

WEIGHTS = "model.safetensors"
GUESSES = {"minilm": Shape(6, 384), "bert": Shape(12, 768)}
"""Shapes of pretrained encoders, for the estimate where the model, or one made from it, is not there yet."""
Progress = Callable[[float], None]
"""Receives the share of a step that is done, from 0 to 1."""


@dataclass(frozen=True)
class Input:
    """A model or a text that a step reads: of the data folder, of a step, or of one run of a training."""

    kind: str  # source, model, text, or the name of a folder below `runs`
    name: str

    def path(self, at: Place) -> Path:
        """Returns its path."""
        if self.kind == "source":
            return at.source(self.name)
        folder = {"model": MODELS, "text": TEXTS}.get(self.kind)
        if folder is not None:
            return at.work / folder / self.name
        return at.runs(self.kind) / comparison.RUNS / self.name

    @property
    def step(self) -> str | None:
        """The name of the step that makes it; None if it is of the data folder."""
        if self.kind == "source":
            return None
        return self.name if self.kind in ("model", "text") else self.kind


def source(name: str) -> Input:
    """Returns a data set or model of the data folder."""
    return Input("source", name)


def made(name: str) -> Input:
    """Returns the model of a `Fitting` or `Adapting` step."""
    return Input("model", name)


def joined(name: str) -> Input:
    """Returns the text of a `Joining` step."""
    return Input("text", name)


class Step(ABC):
    """One piece of work. Its name is unique in a reproduction; two claims that return equal steps share it."""

    name: str

    @abstractmethod
    def run(self, at: Place, progress: Progress) -> dict[str, Any]:
        """Does the work, or what is left of it; returns the numbers that claims read."""

    @abstractmethod
    def operations(self, at: Place) -> float:
        """Returns the floating-point operations of the whole step, by the formulas of cost.py."""

    def memory(self, at: Place) -> int:
        """Returns the bytes that one process of the step needs at most, roughly."""
        return 2**30

    @property
    def parallel(self) -> bool:
        """Whether the step uses one process per core."""
        return False

    @property
    def digest(self) -> str:
        """A digest of its fields. Numbers of a step with other ones, such as fewer training steps, are not its own."""
        return digest_of(self)

    @property
    def reads(self) -> frozenset[str]:
        """The names of the steps whose models, texts or tokens this one reads."""
        return frozenset(each.step for each in _inputs(self) if each.step is not None)

    def is_there(self, at: Place) -> bool:
        """Whether what later steps read of this one has not been deleted."""
        return True


def _inputs(thing: Any) -> Iterator[Input]:
    """All inputs among the fields of a step and of the function that it calls."""
    if isinstance(thing, Input):
        yield thing
    elif isinstance(thing, tuple):
        for each in thing:
            yield from _inputs(each)
    elif dataclasses.is_dataclass(thing):
        for field in dataclasses.fields(thing):
            yield from _inputs(getattr(thing, field.name))


@dataclass(frozen=True)
class Training(Step):
    """A comparison: every scheme with every seed."""

    name: str
    task: str
    schemes: tuple[str, ...]  # the first one is the baseline
    seeds: int
    steps: int
    preset: str  # as for `locant compare`: small:length=128,batch=16
    data: Input
    model: str | Input | None = None  # a shape made from scratch, or a trained model; None for the task's default
    keep_models: bool = False  # whether the weights are needed after the test; else they are deleted
    keep_log: bool = False  # whether claims read what was logged during training
    shape: Shape | None = None  # of a model that another step makes: the estimate comes before it is there

    def run(self, at: Place, progress: Progress) -> dict[str, Any]:
        out = at.runs(self.name)
        pool = workers.LocalWorkers(self._sizes().threads)
        found = comparison.begin(
            out, task=self.task, schemes=list(self.schemes), data=str(self.data.path(at)), model=self._model(at),
            seeds=range(self.seeds), budget=Budget(steps=self.steps), preset=self.preset,
            calibrate=pool.seconds_of_a_step, check=pool.check,
        )  # fmt: skip
        runs = [(run, comparison.where(out, run)) for run in comparison.pending(out, found)]
        self._follow(out, found, pool, runs, progress)
        done = outcomes(out, found)
        failed = [each for each in done if each.state != "done"]
        if failed:
            reasons = "; ".join(f"{each.run.name}: {each.reason or 'not finished'}" for each in failed[:3])
            raise RuntimeError(f"{len(failed)} of {len(found.runs())} runs of {self.name} did not finish ({reasons})")
        if not self.keep_models:
            for run in found.runs():
                (comparison.where(out, run) / WEIGHTS).unlink(missing_ok=True)
        return {"runs": [self._numbers(each) for each in done]}

    def _numbers(self, done: RunResult) -> dict[str, Any]:
        log = {"log": done.steps} if self.keep_log else {}
        return {"scheme": done.run.scheme, "seed": done.run.seed, "tests": done.tests, "cost": done.cost, **log}

    def _follow(
        self, out: Path, found: comparison.Comparison, pool: Any, runs: list[tuple[Run, Path]], progress: Progress
    ) -> None:
        total, last = len(found.runs()) * self.steps, 0.0
        earlier = (len(found.runs()) - len(runs)) * self.steps
        for _ in itertools.chain(pool.work(runs, out / comparison.DATA), workers.wait_for_others(runs)):
            if time.monotonic() - last > 2:
                last = time.monotonic()
                done = sum(self.steps if each.state == "done" else each.step for each in outcomes(out, found))
                progress(min(1.0, max(done, earlier) / total))

    def results(self, at: Place) -> list[RunResult]:
        """Returns the runs. Those that do not keep their log have no steps."""
        return [
            RunResult(_run(each["scheme"], each["seed"]), "done", "", each.get("log", []), each["tests"], each["cost"])
            for each in at.measured(self.name)["runs"]
        ]

    def scores(self, at: Place, metric: str = "", length: int | None = None) -> dict[str, dict[int, float]]:
        """Returns scheme -> seed -> score, at one length (default: the trained one)."""
        metric = metric or find_task(self.task).metric
        found: dict[str, dict[int, float]] = {scheme: {} for scheme in self.schemes}
        for each in self.results(at):
            score = each.score(metric, length)
            if score is not None and each.run.scheme in found:
                found[each.run.scheme][each.run.seed] = score
        return found

    def model_of(self, scheme: str, seed: int) -> Input:
        """Returns the trained model of one run; the step must keep its models."""
        return Input(self.name, _run(scheme, seed).name)

    def is_there(self, at: Place) -> bool:
        runs = [self.model_of(scheme, seed).path(at) for scheme in self.schemes for seed in range(self.seeds)]
        file = WEIGHTS if self.keep_models else run_folder.DONE
        return (at.runs(self.name) / comparison.DATA).exists() and all((run / file).exists() for run in runs)

    def operations(self, at: Place) -> float:
        sizes, task = self._sizes(), find_task(self.task)
        shape, length = self._shape(at), task.positions(sizes)
        runs = len(self.schemes) * self.seeds
        trained = self.steps * sizes.batch * length
        tested = sizes.evaluated * (1 if task.name in ("clm", "mlm") else length) or trained / 4
        lengths = max(1, sizes.longest).bit_length()
        return runs * (shape.training(trained, length) + shape.reading(tested * lengths, length * sizes.longest // 2))

    def memory(self, at: Place) -> int:
        sizes = self._sizes()
        length = find_task(self.task).positions(sizes)
        return 2**29 + self._shape(at).memory(sizes.batch * length, length)

    @property
    def parallel(self) -> bool:
        return True

    def _sizes(self) -> Any:
        return find_preset(self.preset, find_task(self.task).presets)

    def _model(self, at: Place) -> str | None:
        return str(self.model.path(at)) if isinstance(self.model, Input) else self.model

    def _shape(self, at: Place) -> Shape:
        if self.shape is not None:
            return self.shape
        sizes = self._sizes()
        if isinstance(self.model, Input):
            return shape_of_input(self.model, at)
        return Shape(sizes.layers, sizes.width, sizes.vocabulary if self.task in ("clm", "mlm") else 0)


@dataclass(frozen=True)
class Fitting(Step):
    """A pretrained model with another scheme, fitted to its attention on a text; no training."""

    name: str
    model: Input
    spec: str
    text: Input
    seed: int = 0

    def run(self, at: Place, progress: Progress) -> dict[str, Any]:
        from locant.adaptation import fit, sample
        from locant.hf import load
        from locant.hf.saving import save_tokenizer

        path, out = self.model.path(at), at.model(self.name)
        model: Any = load(str(path)).base_model
        tokenizer = sample.tokenizer_of(model, None)
        found = fit(model, self.spec, prose(self.text.path(at)), tokenizer=tokenizer, seed=self.seed)
        model.save_pretrained(out)
        save_tokenizer(tokenizer, model, out)
        return {"spec": self.spec, "explained": found.explained, "notices": found.notices}

    def is_there(self, at: Place) -> bool:
        return (at.model(self.name) / WEIGHTS).exists()

    def operations(self, at: Place) -> float:
        return 8 * shape_of_input(self.model, at).training(10_000, 128)  # measured: 40 to 90 s for MiniLM on one core


@dataclass(frozen=True)
class Adapting(Step):
    """A pretrained model with another scheme, fitted and then trained for a while to agree with its original."""

    name: str
    model: Input
    spec: str
    text: Input
    steps: int
    length: int = 256
    train: str = "all"
    seed: int = 0

    def run(self, at: Place, progress: Progress) -> dict[str, Any]:
        if not (at.model(self.name) / run_folder.DONE).exists():  # else killed after it, before the step's own mark
            self._adapt(at, progress)
        return files.read_json(self._numbers(at))

    def _numbers(self, at: Place) -> Path:
        """A file beside the model: `adapt` is done before its step is."""
        return at.model(self.name).parent / f"{self.name}.json"

    def _adapt(self, at: Place, progress: Progress) -> None:
        from locant.adaptation import adapting, sample

        model, tokenizer = open_model(self.model.path(at))
        lines = sample.pieces(prose(self.text.path(at)))

        def keep(done: Any) -> None:
            rows = [{"state": r.state, "agreement": r.agreement, "parameters": r.parameters} for r in done.rows]
            found = {"measure": done.measure, "rows": rows, "explained": done.fit.explained}
            files.write_json(self._numbers(at), found)

        adapting.adapt(
            model, self.spec, lines, budget=f"{self.steps}steps", train=self.train, tokenizer=tokenizer,
            out=at.model(self.name), length=self.length, seed=self.seed,
            on_evaluation=lambda found, steps: progress(found.step / max(1, steps)), on_result=keep,
        )  # fmt: skip

    def operations(self, at: Place) -> float:
        shape = shape_of_input(self.model, at)
        # The fit, and agreement in four states.
        return 13 * shape.training(10_000, 128) + 1.4 * shape.training(self.steps * 4096, self.length)

    def is_there(self, at: Place) -> bool:
        return (at.model(self.name) / WEIGHTS).exists()


@dataclass(frozen=True)
class Measuring(Step):
    """An analysis. Its function is a dataclass if it reads what other steps made: the inputs are among its fields."""

    name: str
    function: Callable[[Place], dict[str, Any]]
    cost: Callable[[Place], float]  # floating-point operations

    def run(self, at: Place, progress: Progress) -> dict[str, Any]:
        return self.function(at)

    def operations(self, at: Place) -> float:
        return self.cost(at)


@dataclass(frozen=True)
class Joining(Step):
    """One text of several sources: their training parts in train.txt, their test parts in valid.txt."""

    name: str
    texts: tuple[Input, ...]

    def run(self, at: Place, progress: Progress) -> dict[str, Any]:
        found = [text_source.text(str(each.path(at))) for each in self.texts]
        out = at.work / TEXTS / self.name
        files.write(out / "train.txt", "\n".join(text.train for text in found))
        files.write(out / "valid.txt", "\n".join(text.test for text in found))
        return {}

    def is_there(self, at: Place) -> bool:
        return (at.work / TEXTS / self.name / "valid.txt").exists()

    def operations(self, at: Place) -> float:
        return 1e9


def _run(scheme: str, seed: int) -> Run:
    """A run by its scheme and seed, without settings: enough for its name."""
    return Run(None, scheme, seed)  # type: ignore[arg-type]


def shape_of_input(model: Input, at: Place) -> Shape:
    """Returns the shape of a pretrained model; of one that is not there yet, a guess."""
    try:
        return shape_of(model.path(at))
    except (FileNotFoundError, ValueError):
        return GUESSES[getattr(at.size, "encoder", "minilm")]


def open_model(path: Path) -> tuple[Any, Any]:
    """Returns a model and its tokenizer: a folder of transformers, of locant or of llama2.c."""
    from locant.adaptation import sample
    from locant.hf import llama2c, load

    weights = list(path.glob("*15M.bin*"))
    if weights:
        return llama2c.load(weights[0], next(iter(path.glob("*tokenizer.bin*"))))
    model = load(str(path))
    if (path / "modules.json").exists():
        model = model.base_model  # type: ignore[assignment]  # SentenceTransformer opens no head either
    return model, sample.tokenizer_of(model, None)


def prose(path: Path) -> str:
    """Returns the training part of a text."""
    return text_source.text(str(path)).train


def unique(steps: Iterator[Step]) -> list[Step]:
    """Returns every step once, in order; ValueError if two different steps have one name."""
    found: dict[str, Step] = {}
    for step in steps:
        if found.setdefault(step.name, step) != step:
            raise ValueError(f"two different steps are called {step.name}")
    return list(found.values())
