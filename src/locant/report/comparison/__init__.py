"""The page of `locant compare`, one file per section. It needs the files of a comparison alone, at any moment."""

from __future__ import annotations

from pathlib import Path

from locant.experiments import results
from locant.experiments.comparison import Comparison, open_folder
from locant.experiments.results import RunResult
from locant.experiments.tasks import Task, find_task
from locant.report.comparison.cells import STATES, direction
from locant.report.comparison.failures import failures_section
from locant.report.comparison.invariance import invariance_section
from locant.report.comparison.learned import learned_notices, learned_section
from locant.report.comparison.lengths import lengths_section
from locant.report.comparison.ranking import ranking_section
from locant.report.comparison.training import training_section
from locant.report.comparison.what_was_run import what_was_run_section
from locant.report.page import Report, write_page

PAGE, TABLES = "report.html", "csv"


def write_comparison_page(out: Path) -> Path:
    """Writes the page of a comparison as it is now, out/report.html, and the numbers of its figures, out/csv/."""
    return write_page(comparison_page(out), out / PAGE, csv_folder=out / TABLES)


def comparison_page(out: Path) -> Report:
    """Returns the page of the comparison in a folder; sections without figures are left out."""
    comparison = open_folder(out)
    found = results.outcomes(out, comparison)
    rows = results.table(comparison, found)
    task = find_task(comparison.work.task)
    done = {scheme: [each for each in found if each.run.scheme == scheme and each.state == "done"]
            for scheme in comparison.schemes}  # fmt: skip
    seeds = {scheme: [results.learned_curves(out, each) for each in runs] for scheme, runs in done.items()}
    learned = [(runs[0], seeds[scheme][0]) for scheme, runs in done.items() if runs]
    sections = (
        ranking_section(comparison, task, rows),
        training_section(comparison, found),
        lengths_section(comparison, task, found, rows),
        learned_section(task, learned, seeds),
        invariance_section(comparison, found),
        failures_section(found),
        what_was_run_section(out, comparison, task, found),
    )
    return Report(
        f"{len(comparison.schemes)} position schemes compared: {_task_name(task)}",
        f"{_model_name(comparison)}. {comparison.about[:1].upper()}{comparison.about[1:]}.",
        tuple(results.sentences(comparison, rows)),
        _facts(comparison, task, found),
        tuple(section for section in sections if section.figures),
        tuple(learned_notices(learned)),
    )


def _task_name(task: Task) -> str:
    known = {"clm": "causal language modelling", "mlm": "masked language modelling"}
    return known.get(task.name, task.name)


def _model_name(comparison: Comparison) -> str:
    work = comparison.work
    if work.preset.width:
        sizes = f"{work.preset.layers} layers, {work.preset.heads} heads, width {work.preset.width}"
        return f"A model of the shape of {work.model}, from scratch: {sizes}"
    return f"Training starts from {Path(work.model).name}"


def _facts(comparison: Comparison, task: Task, found: list[RunResult]) -> dict[str, str]:
    work, count = comparison.work, {state: sum(each.state == state for each in found) for state in STATES}
    runs = ", ".join(f"{number} {STATES[state]}" for state, number in count.items() if number)
    return {
        "ranked by": f"{task.metric}, {direction(task)}",
        "trained at": f"{work.preset.length:,} tokens",
        "training per run": f"{work.steps:,} steps of {work.preset.batch} sequences",
        "baseline": comparison.schemes[0],
        "seeds": str(len(comparison.seeds)),
        "runs": runs,
    }
