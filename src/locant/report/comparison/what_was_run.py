"""What was run: every run with its numbers, and the settings."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from locant.experiments import own_code
from locant.experiments.comparison import Comparison
from locant.experiments.results import RunResult, described
from locant.experiments.tasks import Task, find_task
from locant.report.comparison.cells import STATES
from locant.report.figures import Cell, Grid
from locant.report.page import Section


def what_was_run_section(out: Path, comparison: Comparison, task: Task, found: list[RunResult]) -> Section:
    """Returns the section with all runs and settings."""
    return Section("What was run", "", (_runs(task, found), _settings(out, comparison, task, found)))


def _runs(task: Task, found: list[RunResult]) -> Grid:
    lengths = sorted({row["length"] for each in found for row in each.tests})
    header = ["scheme", "seed", "state", "step", *(f"{task.metric} at {length:,}" for length in lengths), "s/step",
              "MB", "parameters", "of the scheme", "s before", "s training", "s test"]  # fmt: skip
    cells: list[list[Cell]] = []
    for each in found:
        seconds = each.cost.get("seconds", {})
        cells.append(
            [
                each.run.scheme,
                each.run.seed,
                STATES[each.state],
                each.step,
                *(each.score(task.metric, length) for length in lengths),
                each.cost.get("seconds_per_step"),
                each.cost.get("memory_mb"),
                each.cost.get("parameters"),
                each.cost.get("scheme_parameters"),
                *(seconds.get(part) for part in ("before", "training", "test")),
            ]
        )
    note = (
        "All numbers behind the means above. Runs of one seed should have the same number of steps, and similar times."
    )
    return Grid("Every run", note, header, cells)


def _settings(out: Path, comparison: Comparison, task: Task, found: list[RunResult]) -> Grid:
    work = comparison.work
    settings: list[list[Cell]] = [
        ["command", command(comparison, out.resolve().name)],
        ["task", task.name],
        ["model", _from_here(work.model)],
        ["data", work.data or "the default text"],
        ["what it is", comparison.about],
        ["schemes", ", ".join(comparison.schemes)],
        ["seeds", ", ".join(map(str, comparison.seeds))],
        ["steps", f"{work.steps:,}"],
    ]
    for name, value in asdict(work.preset).items():
        if name != "steps":
            settings.append([name, f"{value:,}" if isinstance(value, int) else f"{value:g}"])
    for name, values in described(out, found).items():
        settings.append([name, ", ".join(values)])
    note = "The command repeats this comparison, or continues it where it was stopped."
    return Grid("Settings", note, ("what", "is"), settings)


def command(comparison: Comparison, name: str) -> str:
    """Returns the command of a comparison into folder `name`, with the named preset that needs the fewest changes."""
    work, task = comparison.work, find_task(comparison.work.task)

    def changes(preset: str) -> dict[str, Any]:
        theirs = asdict(task.presets[preset])
        return {key: value for key, value in asdict(work.preset).items() if theirs[key] != value}

    nearest = min(task.presets, key=lambda preset: len(changes(preset)))
    changed = ",".join(f"{key}={value}" for key, value in changes(nearest).items())
    words = ["locant", "compare", work.task, "--schemes", ",".join(comparison.schemes)]
    words += ["--data", work.data] if work.data else []
    words += ["--model", _from_here(work.model)] if work.model != task.shape else []
    words += ["--seeds", str(max(comparison.seeds) + 1), "--budget", f"{work.steps}steps"]
    words += ["--preset", f"{nearest}:{changed}" if changed else nearest]
    for code in work.imports:
        words += ["--import", f"{name}/{own_code.FOLDER}/{code}" if code.endswith(".py") else code]
    return " ".join(map(shlex.quote, [*words, "-o", name]))


def _from_here(path: str) -> str:
    """A path relative to the current folder, if it leads down from it."""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path
