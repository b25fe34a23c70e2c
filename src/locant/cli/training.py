"""The commands that train: `locant compare`, `locant train`, `locant finetune`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from locant.cli.terminal import console
from locant.experiments import comparison, workers
from locant.experiments.comparison import Comparison
from locant.experiments.presets import find_preset
from locant.experiments.results import RunResult, outcome
from locant.experiments.tasks import find_task
from locant.experiments.work import Run
from locant.hf import trackers
from locant.report.comparison import PAGE, TABLES
from locant.report.comparison.terminal import terminal_table
from locant.runs.budget import Budget
from locant.verbs import comparing


def compare(
    task: str, schemes: str, out: Path, data: str | None, model: str | None, seeds: int, budget: str | None,
    preset: str, ray: str | None, report_to: list[str] | None,
) -> None:  # fmt: skip
    """Trains a model with each scheme and seed, prints a table and writes a page."""
    try:
        with _Screen() as screen:
            found = comparing.compare(
                task, schemes, out=out, data=data, model=model, seeds=seeds, budget=budget, preset=preset, ray=ray,
                report_to=report_to or (), on_stage=screen.stage, on_begin=screen.begin, on_steps=screen.steps,
                on_run=screen.run,
            )  # fmt: skip
    except KeyboardInterrupt:
        console.print("stopped; the same command continues")
        raise SystemExit(130) from None
    console.print(terminal_table(found.comparison, found.schemes, found.sentences, console.width))
    page = out / PAGE
    if page.exists():
        console.print(f"page: {page}\ntables: {page.parent / TABLES}", markup=False, highlight=False)
    if any(row.failed for row in found.schemes) and not any(row.finished for row in found.schemes):
        raise SystemExit(1)


class _Screen:
    """What the terminal shows of runs: a line while they are prepared, then one bar, and a line for each that ended."""

    def __init__(self) -> None:
        self.preparing = console.status("preparing")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
                   TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())  # fmt: skip
        self.bar = Progress(*columns, console=console)
        self.job: TaskID | None = None
        self.runs = 0

    def __enter__(self) -> _Screen:
        self.preparing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.preparing.stop()
        self.bar.stop()

    def stage(self, name: str) -> None:
        if self.job is None:
            self.preparing.update(name)
        else:  # a problem with the page
            console.print(f"[yellow]{escape(name)}[/]")

    def begin(self, found: Comparison) -> None:
        seeded = "1 seed" if len(found.seeds) == 1 else f"{len(found.seeds)} seeds"
        self.preparing.stop()
        console.print(
            f"{found.work.task}: {len(found.schemes)} schemes × {seeded}, {found.work.steps:,} steps each; "
            f"{found.about}", markup=False, highlight=False,
        )  # fmt: skip

    def steps(self, done: int, total: int, left: int) -> None:
        if self.job is None:
            self.preparing.stop()
            self.runs = left
            self.bar.start()
            self.job = self.bar.add_task(_runs(left), total=total)
        words = f"{left} of {_runs(self.runs)} to go" if left else _runs(self.runs)
        self.bar.update(self.job, completed=done, description=words)

    def run(self, ended: RunResult) -> None:
        console.print(_line(ended), highlight=False)


def train(
    task: str, scheme: str, out: Path, data: str | None, model: str | None, seed: int, budget: str | None, preset: str,
    report_to: list[str] | None,
) -> None:  # fmt: skip
    """Trains one model from scratch."""
    _one(task, scheme, out, data, model, seed, budget, preset, report_to)


def finetune(
    task: str, scheme: str, model: str, out: Path, data: str | None, seed: int, budget: str | None, preset: str,
    report_to: list[str] | None,
) -> None:  # fmt: skip
    """Trains one model from a trained one."""
    _one(task, scheme, out, data, model, seed, budget, preset, report_to)


def _one(
    task: str, scheme: str, out: Path, data: str | None, model: str | None, seed: int, budget: str | None, preset: str,
    report_to: list[str] | None,
) -> None:  # fmt: skip
    """Executes one run: in a new process, or in this one if several processes execute it together (torchrun)."""
    wanted = None if budget is None else Budget.parse(budget)
    reported = trackers.checked(report_to or ())
    processes = int(os.environ.get("WORLD_SIZE", 1))
    arguments: dict[str, Any] = {
        "task": task, "schemes": [scheme], "data": data, "model": model, "seeds": [seed], "budget": wanted,
        "preset": preset, "baseline": False,
    }  # fmt: skip
    if processes == 1:
        pool = workers.LocalWorkers(find_preset(preset, find_task(task).presets).threads)
        with _Screen() as screen:
            found = comparison.begin(
                out, **arguments, calibrate=pool.seconds_of_a_step, check=pool.check, progress=screen.stage
            )
            run = Run(found.work, scheme, seed)
            comparing.follow(
                out, comparison.only(found, run), pool, report_to=reported, on_stage=screen.stage, on_steps=screen.steps
            )
        _end(out, run)
        return
    if wanted is not None and wanted.seconds is not None:
        raise ValueError(f"--budget must be in steps if {processes} processes execute one run; got {budget}")
    from accelerate import PartialState

    state = PartialState(cpu=not torch.cuda.is_available())
    with state.main_process_first():  # the first process prepares the data, and the others find it
        found = comparison.begin(out, **arguments, calibrate=lambda *_: 0.0)
    run = Run(found.work, scheme, seed, reported)
    first = state.is_main_process  # read before the run, which ends the process group
    workers.do_run(run, comparison.where(out, run), out / comparison.DATA)
    if first:
        _end(out, run)


def _end(out: Path, run: Run) -> None:
    """Prints the result of a run and where it is saved; exits with code 1 if it did not finish."""
    found = outcome(out, run)
    console.print(_line(found), highlight=False)
    if found.state != "done":
        raise SystemExit(1)
    path = str(comparison.where(out, run))
    console.print(f"saved: {path}    open it with locant.load({path!r})", markup=False, highlight=False, soft_wrap=True)


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def _line(each: RunResult) -> str:
    """Returns the line about a run that has ended."""
    name = escape(f"{each.run.scheme}, seed {each.run.seed}")
    if each.state == "failed":
        return f"[red]✗[/] {name}: {escape(each.reason)}"
    metric = find_task(each.run.work.task).metric
    score, seconds = each.score(metric), sum(each.cost.get("seconds", {}).values())
    if score is None:
        return f"[red]✗[/] {name}: not finished; the same command continues it"
    return f"[green]✓[/] {name}: {metric} {score:.4f} at length {each.tests[0]['length']}, {seconds:.0f} s"
