"""`compare`: which position scheme is best for this data and these lengths?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from locant import imports as own
from locant.experiments import arms, comparison, results, workers
from locant.experiments.comparison import Comparison
from locant.experiments.presets import find_preset
from locant.experiments.results import RunResult, SchemeResult, outcome
from locant.experiments.tasks import Task, find_task
from locant.hf import trackers
from locant.report.comparison import comparison_page, write_comparison_page
from locant.report.figures import Cell
from locant.report.page import Report
from locant.runs.budget import Budget
from locant.verbs.result import Result

LOOK = 1.0
"""Seconds between two looks at the folders of the runs."""

OnText = Callable[[str], None]
OnSteps = Callable[[int, int, int], None]
"""Called with the steps that were trained, the steps of all runs, and the number of runs that have not ended."""
OnRun = Callable[[RunResult], None]


def _nothing(*_: Any) -> None:
    """The default of a callback."""


class ComparisonResult(Result):
    """The results of the comparison in a folder, as it was when the object was made."""

    def __init__(self, out: Path | str) -> None:
        self.out = Path(out)
        self.comparison: Comparison = comparison.open_folder(self.out)
        self.runs: list[RunResult] = results.outcomes(self.out, self.comparison)
        self.schemes: list[SchemeResult] = results.table(self.comparison, self.runs)

    @property
    def task(self) -> Task:
        """The task; `task.metric` is the name of the score."""
        return find_task(self.comparison.work.task)

    @property
    def sentences(self) -> list[str]:
        """The conclusions that the seeds support."""
        return results.sentences(self.comparison, self.schemes)

    @cached_property
    def report(self) -> Report:
        """The content of the page."""
        return comparison_page(self.out)

    @property
    def table(self) -> list[dict[str, Cell]]:
        """One row per scheme, best first. `low` and `high` are 95 % intervals over seeds; None with one seed."""
        lengths = sorted({length for row in self.schemes for length in (*row.by_length, *row.refused)})
        return [_row(row, lengths) for row in self.schemes]


def _row(row: SchemeResult, lengths: Sequence[int]) -> dict[str, Cell]:
    gap = None if row.against is None else row.against.estimate
    at = {f"score_at_{length}": row.by_length[length].mean if length in row.by_length else None for length in lengths}
    return {
        "scheme": row.scheme, "score": row.score.mean, "low": row.score.low, "high": row.score.high,
        "difference": None if gap is None else gap.mean, "difference_low": None if gap is None else gap.low,
        "difference_high": None if gap is None else gap.high,
        "verdict": "baseline" if row.against is None else row.against.verdict, "test_noise": row.noise, **at,
        "parameters": row.parameters,
        "seconds_per_step": row.seconds_per_step, "memory_mb": row.memory_mb, "finished": row.finished,
        "failed": len(row.failed), "runs": row.wanted,
    }  # fmt: skip


def compare(
    task: str,
    schemes: str | Sequence[str],
    *,
    out: Path | str,
    data: str | Path | None = None,
    model: str | Path | None = None,
    seeds: int | Iterable[int] = 3,
    budget: str | None = None,
    preset: str = "quick",
    ray: str | None = None,
    report_to: str | Sequence[str] = (),
    imports: str | Path | Sequence[str | Path] = (),
    on_stage: OnText = _nothing,
    on_begin: Callable[[Comparison], None] = _nothing,
    on_steps: OnSteps = _nothing,
    on_run: OnRun = _nothing,
) -> ComparisonResult:
    """Trains a model with each scheme and seed: what `locant compare` does. Writes out/report.html on the way.

    task       clm, mlm, glue:CoLA …, squad, algo:copy …, or the name of a task of your own.
    schemes    a list of schemes, or one string with commas between them. The first is the baseline.
    out        the folder of the comparison. After an interruption, the same call resumes in it.
    data       a text file or folder, a GLUE or SQuAD folder, or the name of a data set on the hub.
    model      gpt2, llama, bert or albert from scratch, the folder or hub name of a trained model, or a function of
               your own, `module:function`.
    seeds      how many runs each scheme has, or their seeds.
    budget     training of each run: 10min, 90s, 2000steps. By default that of the preset.
    preset     quick, small or paper; with changes as in small:length=256,batch=8.
    ray        the address of a Ray cluster. By default runs are processes of this machine.
    report_to  trackers that transformers' Trainer reports to: tensorboard, wandb, ….
    imports    files or modules with schemes, tasks or models of your own, such as my_schemes.py; `module:Class` in
               `schemes` works too.
    on_stage   called with the name of each stage before the runs.
    on_begin   called with the settings, before the first run.
    on_steps   called about once a second with the steps trained, the steps of all runs, and the runs left.
    on_run     called with each run that has ended.
    """
    wanted = None if budget is None else Budget.parse(budget)
    own.load(imports)
    specs = arms.specs(own.expanded(schemes if isinstance(schemes, str) else ",".join(schemes)))
    reported = trackers.checked(report_to)
    out = Path(out)
    pool = _pool(ray, find_preset(preset, find_task(task).presets).threads)
    found = comparison.begin(
        out, task=task, schemes=specs, data=_text(data), model=_text(model),
        seeds=range(seeds) if isinstance(seeds, int) else list(seeds), budget=wanted, preset=preset,
        calibrate=pool.seconds_of_a_step, check=pool.check, progress=on_stage,
    )  # fmt: skip
    on_begin(found)
    follow(out, found, pool, report_to=reported, on_stage=on_stage, on_steps=on_steps, on_run=on_run)
    write_page(out, on_stage)
    return ComparisonResult(out)


def _text(path: str | Path | None) -> str | None:
    return None if path is None else str(path)


def _pool(ray: str | None, threads: int) -> Any:
    """Returns the processes that execute runs: of this machine, or of a Ray cluster."""
    if ray is None:
        return workers.LocalWorkers(threads)
    from locant.experiments.ray_cluster import RayCluster

    return RayCluster(ray, threads)


def follow(
    out: Path, found: Comparison, pool: Any, *, report_to: tuple[str, ...] = (), on_stage: OnText = _nothing,
    on_steps: OnSteps = _nothing, on_run: OnRun = _nothing,
) -> None:  # fmt: skip
    """Executes the runs of a comparison that are not done, and writes the page whenever one has ended."""
    runs = [(replace(run, report_to=report_to), comparison.where(out, run)) for run in comparison.pending(out, found)]
    waiting = {run.name: run for run, _ in runs}
    total, last = len(runs) * found.work.steps, 0.0

    def ours_and_others() -> Iterator[None]:
        yield from pool.work(runs, out / comparison.DATA)
        yield from workers.wait_for_others(runs)

    on_steps(0, total, len(waiting))
    for _ in ours_and_others():
        if time.monotonic() - last < LOOK:
            continue
        last = time.monotonic()
        now = [outcome(out, run) for run in waiting.values()]
        for each in now:
            if each.state in workers.ENDED:
                del waiting[each.run.name]
                on_run(each)
                write_page(out, on_stage)
        ended = (len(runs) - len(waiting)) * found.work.steps
        on_steps(ended + sum(each.step for each in now if each.state == "begun"), total, len(waiting))
    for run in waiting.values():
        on_run(outcome(out, run))
    on_steps(total, total, 0)


def write_page(out: Path, on_problem: OnText = _nothing) -> Path | None:
    """Writes the page of a comparison; None if that fails, because a full disk must not stop the runs."""
    try:
        return write_comparison_page(out)
    except OSError as problem:
        on_problem(f"the page could not be written: {problem}")
        return None
