"""Failed runs, and why they failed."""

from __future__ import annotations

from locant.experiments.results import RunResult
from locant.report.figures import Cell, Grid
from locant.report.page import Section


def failures_section(found: list[RunResult]) -> Section:
    """Returns the section on failed runs; it is empty where none failed."""
    failed = [each for each in found if each.state == "failed"]
    if not failed:
        return Section("Failed runs", "", ())
    cells: list[list[Cell]] = [
        [each.run.scheme, each.run.seed, each.reason, each.step, f"runs/{each.run.name}/log.txt"] for each in failed
    ]
    note = (
        "Normally there are none. If you repeat the command, it retries failed runs, except those that diverged: they "
        "would diverge again."
    )
    grid = Grid("Runs that failed", note, ("scheme", "seed", "reason", "last step logged", "more in"), cells)
    return Section("Failed runs", "They count in no score above.", (grid,))
