"""A comparison: every scheme with every seed, in one folder. The same command can be repeated at any time.

comparison.json    the settings; a folder with other settings is refused
data/              tokens and tokenizer, made once for all runs
imports/           copies of the files with code of the user's own, see `own_code`
runs/NAME/         one folder per run, see `locant.runs.run_folder`
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from locant import imports
from locant.experiments import arms, own_code
from locant.experiments.presets import find_preset
from locant.experiments.run import load_setting, quiet
from locant.experiments.tasks import Task, find_task
from locant.experiments.tasks.task import Setting
from locant.experiments.timing import TIMED_STEPS
from locant.experiments.work import Run, Work
from locant.imports import Code
from locant.runs import files, run_folder
from locant.runs.budget import Budget
from locant.runs.untrusted import shortened

FILE, DATA, RUNS = "comparison.json", "data", "runs"


@dataclass(frozen=True)
class Comparison:
    """The settings of a comparison."""

    work: Work
    schemes: tuple[str, ...]  # the first one is the baseline
    seeds: tuple[int, ...]
    about: str  # a description of the data

    def runs(self) -> list[Run]:
        """Returns all runs, seed by seed: a comparison that is stopped early has complete seeds to compare."""
        return [Run(self.work, scheme, seed) for seed, scheme in itertools.product(self.seeds, self.schemes)]

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of comparison.json."""
        return {
            "work": self.work.to_dict(),
            "schemes": list(self.schemes),
            "seeds": list(self.seeds),
            "about": self.about,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Comparison:
        """Returns the comparison of a comparison.json; ValueError if it is not one."""
        if data.keys() != {"work", "schemes", "seeds", "about"} or not isinstance(data["work"], dict):
            raise ValueError(f"expected the entries work, schemes, seeds and about; got {shortened(sorted(data))}")
        for name, kind in (("schemes", str), ("seeds", int)):
            values = data[name]
            if not isinstance(values, list) or not values or not all(type(value) is kind for value in values):
                raise ValueError(f"{name} must be a list of {kind.__name__}, got {shortened(values)}")
        return cls(Work.from_dict(data["work"]), tuple(data["schemes"]), tuple(data["seeds"]), str(data["about"]))


def open_folder(out: Path) -> Comparison:
    """Returns the comparison in a folder."""
    if not (out / FILE).exists():
        raise ValueError(f"{out} holds no comparison: there is no {FILE}")
    data = files.read_json(out / FILE)
    try:
        return Comparison.from_dict(data)
    except ValueError as problem:
        raise ValueError(
            f"{out / FILE} is damaged or from another version of locant: {problem}. Name a new folder"
        ) from None


def only(comparison: Comparison, run: Run) -> Comparison:
    """Returns a comparison with one of its runs."""
    return replace(comparison, schemes=(run.scheme,), seeds=(run.seed,))


def where(out: Path, run: Run) -> Path:
    """Returns the folder of a run."""
    return out / RUNS / run.name


def check_here(work: Work, schemes: Sequence[str], data: Path) -> None:
    """Raises ValueError where one of the schemes cannot be trained. It builds the models in this process."""
    quiet()
    own_code.load(work, data)
    arms.check_all(find_task(work.task), load_setting(work, data), work.model, schemes)


def begin(
    out: Path, *, task: str, schemes: list[str], data: str | None, model: str | None, seeds: Iterable[int],
    budget: Budget | None, preset: str, calibrate: Callable[[Work, str, Path], float], baseline: bool = True,
    check: Callable[[Work, Sequence[str], Path], None] = check_here,
    progress: Callable[[str], None] = lambda stage: None,
) -> Comparison:  # fmt: skip
    """Checks the settings, prepares the data and writes comparison.json; or returns the comparison that is there.

    calibrate   returns the seconds of a training step, for a budget in time
    baseline    whether the first scheme must be the baseline of the comparison that is there
    check       raises ValueError where a scheme cannot be trained
    progress    receives the name of each stage
    """
    wanted = find_task(task)
    sizes = find_preset(preset, wanted.presets)
    if model is not None and model not in arms.SHAPES and Path(model).exists():
        model = str(Path(model).absolute())  # another process or machine may have another working directory
    budget = budget or Budget(steps=sizes.steps)
    work = Work(wanted.name, model or wanted.shape, data, sizes, budget.steps or TIMED_STEPS, budget.seconds)
    code = _own_code(wanted, model, schemes)
    run_folder.check(out, FILE, DATA, own_code.FOLDER)
    with run_folder.held(out, wait=True, resumes=(out / FILE).exists):
        if (out / FILE).exists():
            there = open_folder(out)
            work = own_code.remember(out, work, code, there.work.imports)
            wanted_now = Comparison(work, tuple(schemes), tuple(seeds), "")
            return _extend(out, there, wanted_now, check, baseline=baseline)
        quiet()
        progress("preparing the data")
        setting, about = _prepare(out / DATA, work)
        work = own_code.remember(out, work, code)
        check(work, schemes, out / DATA)
        if budget.seconds is not None:
            progress("timing a step")
            work = replace(work, steps=max(1, round(budget.seconds / calibrate(work, schemes[0], out / DATA))))
            about = wanted.prepare(work.data, setting, work.steps * work.preset.batch)
        comparison = Comparison(work, tuple(schemes), tuple(seeds), about)
        names = [run.name for run in comparison.runs()]
        if len(set(names)) < len(names):
            raise ValueError("two of the schemes have the same folder name; change the options of one")
        files.write_json(out / FILE, comparison.to_dict())
    return comparison


def _extend(
    out: Path,
    there: Comparison,
    wanted: Comparison,
    check: Callable[[Work, Sequence[str], Path], None],
    *,
    baseline: bool,
) -> Comparison:
    """Returns the comparison in the folder, with the new seeds and schemes; ValueError if other settings differ."""
    new = wanted.work
    if new.seconds is not None and new.seconds == there.work.seconds:
        new = replace(new, steps=there.work.steps)  # a time budget is converted to steps once
    differing = [
        f"{key}: {before!r} there, {after!r} now"
        for (key, before), after in zip(_settings(there.work), (value for _, value in _settings(new)), strict=True)
        if before != after
    ]
    if differing:
        raise ValueError(f"{out} holds another comparison ({'; '.join(differing)}); name a new folder")
    if baseline and wanted.schemes[0] != there.schemes[0]:
        raise ValueError(
            f"{out} compares with {there.schemes[0]}, not with {wanted.schemes[0]}: the first scheme is the baseline"
        )
    added = [scheme for scheme in wanted.schemes if scheme not in there.schemes]
    if added:
        check(new, added, out / DATA)
    grown = replace(
        there,
        work=replace(there.work, imports=new.imports),
        schemes=(*there.schemes, *added),
        seeds=tuple(sorted({*there.seeds, *wanted.seeds})),
    )
    if grown != there:
        files.write_json(out / FILE, grown.to_dict())
    return grown


def _own_code(task: Task, model: str | None, schemes: Sequence[str]) -> list[Code]:
    """Returns the imported code of the task, of the model and of the schemes. A model `module:function` is imported."""
    found = [imports.code_of(type(task))]
    if model is not None and arms.is_own(model):
        found.append(imports.find(model, load_module=True)[1])
    every = [*found, *imports.needed(schemes).values()]
    return list({code.source: code for code in every if code is not None}.values())


def _settings(work: Work) -> list[tuple[str, Any]]:
    """Returns all settings by name, those of the preset included."""
    settings = work.to_dict()
    own = ((key, value) for key, value in settings.items() if key not in ("preset", "imports"))
    return [*own, *settings["preset"].items()]


def _prepare(data: Path, work: Work) -> tuple[Setting, str]:
    """Writes tokenizer and examples; from the beginning, should an earlier attempt have left a part of them."""
    task = find_task(work.task)
    shutil.rmtree(data, ignore_errors=True)
    scratch = work.model in arms.SHAPES or arms.is_own(work.model)
    tokenizer = task.tokenizer(work.data, work.preset) if scratch else _pretrained_tokenizer(work)
    data.mkdir(parents=True)
    setting = Setting(work.preset, tokenizer, data)
    about = task.prepare(work.data, setting, work.steps * work.preset.batch)
    tokenizer.save_pretrained(data)
    return setting, about


def _pretrained_tokenizer(work: Work) -> Any:
    from transformers import AutoTokenizer  # takes seconds

    try:
        return AutoTokenizer.from_pretrained(work.model, trust_remote_code=False)
    except Exception as problem:  # transformers raises a different class for each kind of missing model
        shapes = ", ".join(arms.SHAPES)
        raise ValueError(
            f"unknown model {work.model!r}: no such shape ({shapes}), and no folder or hub name of a model with a "
            f"tokenizer: {problem}"
        ) from None


def pending(out: Path, comparison: Comparison) -> Iterator[Run]:
    """Yields the runs that are left. A run that diverged would do so again; any other failed run is tried again.

    Checkpoints of runs that are done are deleted: a process that was killed at its end has left them.
    """
    for run in comparison.runs():
        here = where(out, run)
        state = run_folder.state(here)
        if state == "failed" and not _failed_for_good(here):
            (here / run_folder.FAILED).unlink(missing_ok=True)
            state = "begun"
        if state == "done":
            run_folder.delete_checkpoints(here)
        if state not in ("done", "failed"):
            yield run


def _failed_for_good(here: Path) -> bool:
    try:
        return bool(files.read_json(here / run_folder.FAILED).get("final", False))
    except FileNotFoundError:  # another process is trying it again
        return False
