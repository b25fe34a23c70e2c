"""A comparison: every scheme with every seed, in one folder, from one command that can be given again and again.

comparison.json    what is compared; the folder takes no other
data/              the tokens and the tokenizer, made once for all runs
runs/NAME/         one folder per run, see folder.py
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from locant.experiments import arms
from locant.experiments import preset as presets
from locant.experiments.run import Run, Work, quiet, setting
from locant.experiments.tasks import task as find_task
from locant.experiments.tasks.task import Setting
from locant.runs import files, run_folder
from locant.runs.budget import Budget

TIMED_STEPS = 8
"""Steps that are timed where the budget is in minutes."""
FILE, DATA, RUNS = "comparison.json", "data", "runs"


@dataclass(frozen=True)
class Comparison:
    work: Work
    schemes: tuple[str, ...]  # the first one is the baseline
    seeds: tuple[int, ...]
    about: str  # what the data is, in words

    def runs(self) -> list[Run]:
        """Seed by seed: a comparison that is stopped early has whole seeds to compare."""
        return [Run(self.work, scheme, seed) for seed, scheme in itertools.product(self.seeds, self.schemes)]

    def to_dict(self) -> dict[str, Any]:
        return {
            "work": self.work.to_dict(),
            "schemes": list(self.schemes),
            "seeds": list(self.seeds),
            "about": self.about,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Comparison:
        return cls(Work.from_dict(data["work"]), tuple(data["schemes"]), tuple(data["seeds"]), data["about"])


def open_folder(out: Path) -> Comparison:
    """The comparison that a folder holds."""
    if not (out / FILE).exists():
        raise ValueError(f"{out} holds no comparison: there is no {FILE}")
    return Comparison.from_dict(files.read_json(out / FILE))


def only(comparison: Comparison, run: Run) -> Comparison:
    """A part of a comparison: one run."""
    return replace(comparison, schemes=(run.scheme,), seeds=(run.seed,))


def where(out: Path, run: Run) -> Path:
    return out / RUNS / run.name


def begin(
    out: Path, *, task: str, schemes: list[str], data: str | None, model: str | None, seeds: Iterable[int],
    budget: Budget | None, preset: str, calibrate: Callable[[Work, str, Path], float], baseline: bool = True,
    say: Callable[[str], None] = lambda stage: None,
) -> Comparison:  # fmt: skip
    """Checks what was asked for, prepares the data, and writes down what is compared; or finds it as it was before."""
    wanted = find_task(task)
    sizes = presets.preset(preset, wanted.presets)
    if model is not None and model not in arms.SHAPES and Path(model).exists():
        model = str(Path(model).absolute())  # runs may be done elsewhere
    budget = budget or Budget(steps=sizes.steps)
    quiet()
    work = Work(wanted.name, model or wanted.shape, data, sizes, budget.steps or TIMED_STEPS, budget.seconds)
    run_folder.check(out, FILE, DATA)
    with run_folder.held(out, wait=True):
        if (out / FILE).exists():
            asked = Comparison(work, tuple(schemes), tuple(seeds), "")
            return _again(out, asked, baseline=baseline)
        say("preparing the data")
        about = _prepare(out / DATA, work)
        here = setting(work, out / DATA)
        for spec in schemes:
            arms.check(wanted, here, work.model, spec)
        if budget.seconds is not None:
            say("timing a step")
            work = replace(work, steps=max(1, round(budget.seconds / calibrate(work, schemes[0], out / DATA))))
            about = wanted.prepare(work.data, here, work.steps * work.preset.batch)
        comparison = Comparison(work, tuple(schemes), tuple(seeds), about)
        names = [run.name for run in comparison.runs()]
        if len(set(names)) < len(names):
            raise ValueError("two of the schemes have the same name in the file system; name fewer options of one")
        files.write_json(out / FILE, comparison.to_dict())
    return comparison


def _again(out: Path, wanted: Comparison, *, baseline: bool) -> Comparison:
    """The comparison that is there already, if it is this one; more seeds and more schemes may be asked for."""
    there = open_folder(out)
    new = wanted.work
    if new.seconds is not None and new.seconds == there.work.seconds:
        new = replace(new, steps=there.work.steps)  # time was made steps then, and stays so
    differing = [
        f"{key}: {before!r} there, {after!r} now"
        for (key, before), after in zip(_flat(there.work), (value for _, value in _flat(new)), strict=True)
        if before != after
    ]
    if differing:
        raise ValueError(f"{out} holds another comparison ({'; '.join(differing)}); name a new folder with -o")
    if baseline and wanted.schemes[0] != there.schemes[0]:
        raise ValueError(
            f"{out} compares with {there.schemes[0]}, not with {wanted.schemes[0]}: the first scheme is the baseline"
        )
    task, here = find_task(new.task), setting(new, out / DATA)
    added = [scheme for scheme in wanted.schemes if scheme not in there.schemes]
    for spec in added:
        arms.check(task, here, new.model, spec)
    grown = replace(there, schemes=(*there.schemes, *added), seeds=tuple(sorted({*there.seeds, *wanted.seeds})))
    if grown != there:
        files.write_json(out / FILE, grown.to_dict())
    return grown


def _flat(work: Work) -> list[tuple[str, Any]]:
    """What a work says, with what its preset says."""
    said = work.to_dict()
    return [*((key, value) for key, value in said.items() if key != "preset"), *said["preset"].items()]


def _prepare(data: Path, work: Work) -> str:
    """Tokenizer and examples; anew if a former attempt was stopped in the middle."""
    from transformers import AutoTokenizer

    task = find_task(work.task)
    shutil.rmtree(data, ignore_errors=True)
    if work.model in arms.SHAPES:
        tokenizer = task.tokenizer(work.data, work.preset)
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(work.model)
        except Exception as problem:  # transformers has one for each way of not being there
            shapes = ", ".join(arms.SHAPES)
            raise ValueError(
                f"--model {work.model}: no such shape ({shapes}), and no model with a tokenizer there: {problem}"
            ) from None
    data.mkdir(parents=True)
    about = task.prepare(work.data, Setting(work.preset, tokenizer, data), work.steps * work.preset.batch)
    tokenizer.save_pretrained(data)
    return about


def pending(out: Path, comparison: Comparison) -> Iterator[Run]:
    """Runs that are to be done: those that diverged would do so again, other failures get another chance."""
    for run in comparison.runs():
        here = where(out, run)
        state = run_folder.state(here)
        if state == "failed" and not _failed_for_good(here):
            (here / run_folder.FAILED).unlink(missing_ok=True)
            state = "begun"
        if state not in ("done", "failed"):
            yield run


def _failed_for_good(here: Path) -> bool:
    try:
        return bool(files.read_json(here / run_folder.FAILED)["final"])
    except FileNotFoundError:  # another comparer gives it another chance
        return False
