"""The commands that train: `locant compare`, `locant train`, `locant finetune`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from locant.cli.terminal import console
from locant.experiments import arms, comparison, results, workers
from locant.experiments.comparison import Comparison
from locant.experiments.presets import find_preset
from locant.experiments.results import RunResult, outcome
from locant.experiments.tasks import find_task
from locant.experiments.work import Run
from locant.report.comparison import write_comparison_page
from locant.report.comparison.terminal import terminal_table
from locant.runs.budget import Budget


def compare(
    task: str, schemes: str, out: Path, data: str | None, model: str | None, seeds: int, budget: str | None,
    preset: str, ray: str | None,
) -> None:  # fmt: skip
    """Trains a model with each scheme and seed, prints a table and writes a page."""
    wanted = None if budget is None else Budget.parse(budget)
    specs = arms.specs(schemes)
    pool = _pool(ray, find_preset(preset, find_task(task).presets).threads)
    with console.status("preparing") as status:
        found = comparison.begin(
            out, task=task, schemes=specs, data=data, model=model, seeds=range(seeds), budget=wanted,
            preset=preset, calibrate=pool.seconds_of_a_step, check=pool.check, progress=status.update,
        )  # fmt: skip
    seeded = "1 seed" if len(found.seeds) == 1 else f"{len(found.seeds)} seeds"
    what = f"{task}: {len(found.schemes)} schemes × {seeded}, {found.work.steps:,} steps each; {found.about}"
    console.print(what, markup=False, highlight=False)
    _follow(out, found, pool)
    _conclude(out, found)


def train(
    task: str, scheme: str, out: Path, data: str | None, model: str | None, seed: int, budget: str | None, preset: str
) -> None:
    """Trains one model from scratch."""
    _one(task, scheme, out, data, model, seed, budget, preset)


def finetune(
    task: str, scheme: str, model: str, out: Path, data: str | None, seed: int, budget: str | None, preset: str
) -> None:
    """Trains one model from a trained one."""
    _one(task, scheme, out, data, model, seed, budget, preset)


def _one(
    task: str, scheme: str, out: Path, data: str | None, model: str | None, seed: int, budget: str | None, preset: str
) -> None:
    """Executes one run: in a new process, or in this one if several processes execute it together (torchrun)."""
    wanted = None if budget is None else Budget.parse(budget)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    arguments: dict[str, Any] = {
        "task": task, "schemes": [scheme], "data": data, "model": model, "seeds": [seed], "budget": wanted,
        "preset": preset, "baseline": False,
    }  # fmt: skip
    if processes == 1:
        pool = workers.LocalWorkers(find_preset(preset, find_task(task).presets).threads)
        with console.status("preparing") as status:
            found = comparison.begin(
                out, **arguments, calibrate=pool.seconds_of_a_step, check=pool.check, progress=status.update
            )
        run = Run(found.work, scheme, seed)
        _follow(out, comparison.only(found, run), pool)
        _end(out, run)
        return
    if wanted is not None and wanted.seconds is not None:
        raise ValueError(f"--budget must be in steps if {processes} processes execute one run; got {budget}")
    from accelerate import PartialState

    state = PartialState(cpu=not torch.cuda.is_available())
    with state.main_process_first():  # the first process prepares the data, and the others find it
        found = comparison.begin(out, **arguments, calibrate=lambda *_: 0.0)
    run = Run(found.work, scheme, seed)
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


def _pool(ray: str | None, threads: int) -> Any:
    """Returns the processes that execute runs: of this machine, or of a Ray cluster."""
    if ray is None:
        return workers.LocalWorkers(threads)
    from locant.experiments.ray_cluster import RayCluster

    return RayCluster(ray, threads)


def _follow(out: Path, found: Comparison, pool: Any) -> None:
    """Executes the runs that are not done, with one bar for all of them, and prints a line when a run ends."""
    runs = [(run, comparison.where(out, run)) for run in comparison.pending(out, found)]
    waiting = {run.name: run for run, _ in runs}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
               TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())  # fmt: skip

    def ours_and_others() -> Iterator[None]:
        yield from pool.work(runs, out / comparison.DATA)
        yield from workers.wait_for_others(runs)

    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(_runs(len(runs)), total=len(runs) * found.work.steps)
        last = 0.0
        ended = 0  # steps of runs that have ended
        for _ in ours_and_others():
            if time.monotonic() - last < 1:
                continue
            last = time.monotonic()
            now = [outcome(out, run) for run in list(waiting.values())]
            for each in now:
                if each.state in ("done", "failed"):
                    del waiting[each.run.name]
                    ended += found.work.steps
                    progress.console.print(_line(each), highlight=False)
                    _write_page(out)
            begun = [each for each in now if each.state == "begun"]
            progress.update(
                bar,
                completed=ended + sum(each.step for each in begun),
                description=f"{len(waiting)} of {_runs(len(runs))} to go",
            )
        for run in list(waiting.values()):
            progress.console.print(_line(outcome(out, run)), highlight=False)
        progress.update(bar, completed=len(runs) * found.work.steps, description=_runs(len(runs)))


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


def _write_page(out: Path) -> Path | None:
    try:
        return write_comparison_page(out)
    except OSError as problem:  # a full disk does not stop the runs
        console.print(f"[yellow]the page could not be written:[/] {escape(str(problem))}")
        return None


def _conclude(out: Path, found: Comparison) -> None:
    """Prints the table, writes the page, and exits with code 1 if no run has finished."""
    rows = results.table(found, results.outcomes(out, found))
    console.print(terminal_table(found, rows, results.sentences(found, rows), console.width))
    path = _write_page(out)
    if path is not None:
        console.print(f"page: {path}\ntables: {path.parent / 'csv'}", markup=False, highlight=False)
    if any(row.failed for row in rows) and not any(row.finished for row in rows):
        raise SystemExit(1)
