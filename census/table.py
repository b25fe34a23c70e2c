"""The table of a census: census/results/census.csv."""

from __future__ import annotations

import csv
from pathlib import Path

import transformers

from census.campaign import RIGHT, Result
from census.checks import CHECKS
from census.outcome import NOT_RUN, OK, Outcome

PATH = Path(__file__).parent / "results" / "census.csv"
FIELDS = ("architecture", "kind", "class", "verdict", "positions", *CHECKS, "reason", "seconds", "transformers")


def positions(result: Result) -> str:
    """Returns how positions enter the model, if locant could read them: absolute, rotary, bias."""
    read = result.outcomes.get("read", Outcome(NOT_RUN))
    return read.reason if read.state == OK else ""


def write(results: list[Result], path: Path = PATH) -> None:
    """Writes one line for each architecture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, FIELDS, lineterminator="\n")
        table.writeheader()
        for result in results:
            states = {name: result.outcomes.get(name, Outcome(NOT_RUN)).state for name in CHECKS}
            table.writerow(
                {
                    "architecture": result.architecture.name,
                    "kind": result.architecture.kind,
                    "class": result.architecture.model_class,
                    "verdict": result.verdict,
                    "positions": positions(result),
                    **states,
                    "reason": result.reason,
                    "seconds": f"{result.seconds:.1f}",
                    "transformers": transformers.__version__,
                }
            )


def read(path: Path = PATH) -> dict[str, dict[str, str]]:
    """Returns the lines of a table by architecture."""
    with path.open(newline="", encoding="utf-8") as file:
        return {line["architecture"]: line for line in csv.DictReader(file)}


def lost(results: list[Result], lines: dict[str, dict[str, str]]) -> list[str]:
    """Returns what was right in a table and is not any more: a verdict, or a single check."""
    found = []
    for result in results:
        line = lines.get(result.architecture.name, {})
        name, why = result.architecture.name, result.reason
        if line.get("verdict") == RIGHT and result.verdict != RIGHT:
            found.append(f"{name} was right and is {result.verdict}: {why}")
        for check in CHECKS:
            now = result.outcomes.get(check, Outcome(NOT_RUN))
            if line.get(check) == OK and now.state != OK:
                found.append(f"{name}: {check} was ok and is {now}")
    return found
