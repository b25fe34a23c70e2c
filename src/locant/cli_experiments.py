"""The commands that train: `locant compare`, `locant train`, `locant finetune`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from locant.terminal import console, plain_errors

Task = Annotated[str, typer.Argument(help="clm, mlm, glue:CoLA …, squad, algo:copy …")]
Data = Annotated[
    str | None, typer.Option(help="A text file or folder, a GLUE or SQuAD folder, or a name of the hub; by default, "
                             "the source of Python's standard library.")
]  # fmt: skip
Model = Annotated[str | None, typer.Option(help="gpt2, llama, bert or albert from scratch, or a trained model.")]
BudgetText = Annotated[str | None, typer.Option(help="Training of each run: 10min, 90s, 2h or 2000steps.")]
PresetText = Annotated[str, typer.Option(help="quick, small or paper; changed as in small:length=256,batch=8.")]


def compare(
    task: Task,
    schemes: Annotated[str, typer.Option(help="Schemes with commas between them; the first is the baseline.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the comparison; give it again to go on.")],
    data: Data = None,
    model: Model = None,
    seeds: Annotated[int, typer.Option(help="Runs of each scheme.", min=1)] = 3,
    budget: BudgetText = None,
    preset: PresetText = "quick",
    ray: Annotated[str | None, typer.Option(help="Address of a Ray cluster; by default, this machine.")] = None,
) -> None:
    """Which position scheme is best for my data and my lengths? Trains each, and writes a table and a page."""
    with plain_errors():
        need()
        from locant.experiments import arms
        from locant.experiments.comparison import begin
        from locant.experiments.presets import find_preset
        from locant.experiments.tasks import find_task
        from locant.runs.budget import Budget

        wanted = Budget.parse(budget) if budget is not None else None
        specs = arms.specs(schemes)
        threads = find_preset(preset, find_task(task).presets).threads
        workers = _workers(ray, threads)
        with console.status("preparing") as status:
            found = begin(
                out, task=task, schemes=specs, data=data, model=model, seeds=range(seeds), budget=wanted,
                preset=preset, calibrate=workers.seconds_of_a_step, check=workers.check, progress=status.update,
            )  # fmt: skip
        seeded = "1 seed" if len(found.seeds) == 1 else f"{len(found.seeds)} seeds"
        what = f"{task}: {len(found.schemes)} schemes × {seeded}, {found.work.steps:,} steps each; {found.about}"
        console.print(what, markup=False, highlight=False)
        _follow(out, found, workers)
        _conclude(out, found)


def train(
    task: Task,
    scheme: Annotated[str, typer.Argument(help="A scheme, such as tisa:kernels=5, or native.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the run, or of a comparison it is a part of.")],
    data: Data = None,
    model: Model = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights and the order of the data.")] = 0,
    budget: BudgetText = None,
    preset: PresetText = "quick",
) -> None:
    """One run, from scratch. Also under torchrun or accelerate launch: python -m locant train …"""
    _one(task, scheme, out, data, model, seed, budget, preset)


def finetune(
    task: Task,
    scheme: Annotated[str, typer.Argument(help="native, a scheme in its place, or native+SCHEME beside it.")],
    model: Annotated[str, typer.Option(help="A folder or hub name of a trained model.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the run, or of a comparison it is a part of.")],
    data: Data = None,
    seed: Annotated[int, typer.Option(help="Seed of the head and the order of the data.")] = 0,
    budget: BudgetText = None,
    preset: PresetText = "quick",
) -> None:
    """One run from a trained model. Also under torchrun or accelerate launch: python -m locant finetune …"""
    _one(task, scheme, out, data, model, seed, budget, preset)


def _one(
    task: str, scheme: str, out: Path, data: str | None, model: str | None, seed: int, budget: str | None, preset: str
) -> None:
    with plain_errors():
        need()
        from locant.experiments.comparison import DATA, begin, only, where
        from locant.experiments.presets import find_preset
        from locant.experiments.tasks import find_task
        from locant.experiments.work import Run
        from locant.experiments.workers import LocalWorkers, do_run
        from locant.runs.budget import Budget

        wanted = Budget.parse(budget) if budget is not None else None
        processes = int(os.environ.get("WORLD_SIZE", 1))
        arguments: dict[str, Any] = {
            "task": task, "schemes": [scheme], "data": data, "model": model, "seeds": [seed], "budget": wanted,
            "preset": preset, "baseline": False,
        }  # fmt: skip
        if processes == 1:
            local = LocalWorkers(find_preset(preset, find_task(task).presets).threads)
            with console.status("preparing") as status:
                found = begin(
                    out, **arguments, calibrate=local.seconds_of_a_step, check=local.check, progress=status.update
                )
            run = Run(found.work, scheme, seed)
            _follow(out, only(found, run), local)
            _end(out, run)
            return
        if wanted is not None and wanted.seconds is not None:
            raise ValueError(f"--budget must be in steps where {processes} processes do one run; got {budget}")
        # The first process prepares; the others find it done.
        from accelerate import PartialState

        state = PartialState(cpu=not torch.cuda.is_available())
        with state.main_process_first():
            found = begin(out, **arguments, calibrate=lambda *_: 0.0)
        run = Run(found.work, scheme, seed)
        first = state.is_main_process  # asked for now: the processes part at the end of the run
        do_run(run, where(out, run), out / DATA)
        if first:
            _end(out, run)


def _end(out: Path, run: Any) -> None:
    from locant.experiments.comparison import where
    from locant.experiments.results import outcome

    found = outcome(out, run)
    console.print(_line(found), highlight=False)
    if found.state != "done":
        raise typer.Exit(1)
    path = str(where(out, run))
    console.print(f"saved: {path}    open it with locant.load({path!r})", markup=False, highlight=False, soft_wrap=True)


def need() -> None:
    """Looks without importing, which takes seconds: the fork server does it at the same time."""
    for name in ("accelerate", "datasets", "scipy", "torchmetrics", "transformers"):
        if find_spec(name) is None:
            raise ImportError(f"training needs {name}; install it with: pip install 'locant[compare]'")


def _workers(ray: str | None, threads: int) -> Any:
    if ray is None:
        from locant.experiments.workers import LocalWorkers

        return LocalWorkers(threads)
    from locant.experiments.ray_cluster import RayCluster

    return RayCluster(ray, threads)


def _follow(out: Path, comparison: Any, workers: Any) -> None:
    """Does what is to be done, with a bar over all of it and a line for each run that ends."""
    from locant.experiments.comparison import DATA, pending, where
    from locant.experiments.results import outcome
    from locant.experiments.workers import wait_for_others

    runs = [(run, where(out, run)) for run in pending(out, comparison)]
    waiting = {run.name: run for run, _ in runs}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
               TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())  # fmt: skip

    def both() -> Iterator[None]:
        yield from workers.work(runs, out / DATA)
        yield from wait_for_others(runs)

    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(_runs(len(runs)), total=len(runs) * comparison.work.steps)
        last = 0.0
        ended = 0  # steps of runs that are over
        for _ in both():
            if time.monotonic() - last < 1:
                continue
            last = time.monotonic()
            now = [outcome(out, run) for run in list(waiting.values())]
            for each in now:
                if each.state in ("done", "failed"):
                    del waiting[each.run.name]
                    ended += comparison.work.steps
                    progress.console.print(_line(each), highlight=False)
                    _write_page(out)
            going = [each for each in now if each.state == "begun"]
            progress.update(
                bar,
                completed=ended + sum(each.step for each in going),
                description=f"{len(waiting)} of {_runs(len(runs))} to go",
            )
        for run in list(waiting.values()):
            progress.console.print(_line(outcome(out, run)), highlight=False)
        progress.update(bar, completed=len(runs) * comparison.work.steps, description=_runs(len(runs)))


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def _line(each: Any) -> str:
    from locant.experiments.tasks import find_task

    name = escape(f"{each.run.scheme}, seed {each.run.seed}")
    if each.state == "failed":
        return f"[red]✗[/] {name}: {escape(each.reason)}"
    metric = find_task(each.run.work.task).metric
    score, seconds = each.score(metric), sum(each.cost.get("seconds", {}).values())
    if score is None:
        return f"[red]✗[/] {name}: did not end; give the command again to go on"
    return f"[green]✓[/] {name}: {metric} {score:.4f} at length {each.tests[0]['length']}, {seconds:.0f} s"


def _write_page(out: Path) -> Path | None:
    from locant.report.comparison import write_comparison_page

    try:
        return write_comparison_page(out)
    except OSError as problem:  # a full disk does not stop the runs
        console.print(f"[yellow]the page could not be written:[/] {escape(str(problem))}")
        return None


def _conclude(out: Path, comparison: Any) -> None:
    from locant.experiments import results
    from locant.report.comparison.terminal import terminal_table

    rows = results.table(comparison, results.outcomes(out, comparison))
    console.print(terminal_table(comparison, rows, results.sentences(comparison, rows), console.width))
    path = _write_page(out)
    if path is not None:
        console.print(f"page: {path}\ntables: {path.parent / 'csv'}", markup=False, highlight=False)
    if any(row.failed for row in rows) and not any(row.finished for row in rows):
        raise typer.Exit(1)
