"""What a comparison shows so far: its folder as tables. Reads files alone, so that it can be asked while runs go on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locant.experiments import folder
from locant.experiments.comparison import Comparison, where
from locant.experiments.run import Run
from locant.experiments.statistics import Difference, Estimate, difference, estimate
from locant.experiments.tasks import task as find_task


@dataclass(frozen=True)
class Outcome:
    """One run, as far as it is."""

    run: Run
    state: str  # new, begun, done or failed
    reason: str  # why it failed
    steps: list[dict[str, Any]]  # rows of the log: step, seconds, loss, …
    tests: list[dict[str, Any]]  # rows like Evaluation, one per length
    cost: dict[str, Any]  # seconds_per_step, seconds, memory_mb, parameters, scheme_parameters; empty until it is done

    @property
    def step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    def score(self, metric: str, length: int | None = None) -> float | None:
        """Of a finished run at one length; by default at that it was trained at. None where there is none."""
        if self.state != "done" or not self.tests:
            return None
        row = self.tests[0] if length is None else next((row for row in self.tests if row["length"] == length), None)
        return None if row is None else row["values"].get(metric)


@dataclass(frozen=True)
class Row:
    """One scheme over its seeds, in the ranked table."""

    scheme: str
    baseline: bool
    score: Estimate
    against: Difference | None  # None for the baseline itself
    by_length: dict[int, Estimate]  # lengths that it was tested at
    refused: dict[int, str]  # lengths that it cannot read, and why
    parameters: int | None  # of the scheme itself
    seconds_per_step: float | None
    memory_mb: float | None
    failed: dict[int, str]  # seed -> reason
    finished: int  # runs
    wanted: int


def outcome(out: Path, run: Run) -> Outcome:
    here = where(out, run)
    lines = folder.lines(here / folder.METRICS)
    state = folder.state(here)
    reason = str(folder.read_json(here / folder.FAILED)["reason"]) if state == "failed" else ""
    by_kind: dict[str, list[dict[str, Any]]] = {kind: [] for kind in ("step", "test", "cost")}
    for line in lines:
        by_kind[line["kind"]].append(line)
    cost = by_kind["cost"][-1] if by_kind["cost"] else {}
    return Outcome(run, state, reason, by_kind["step"], by_kind["test"], cost)


def outcomes(out: Path, comparison: Comparison) -> list[Outcome]:
    return [outcome(out, run) for run in comparison.runs()]


def table(comparison: Comparison, found: list[Outcome]) -> list[Row]:
    """Best first; schemes without a finished run last."""
    task = find_task(comparison.work.task)
    baseline = comparison.schemes[0]
    scores = {
        scheme: {
            each.run.seed: score
            for each in found
            if each.run.scheme == scheme and (score := each.score(task.metric)) is not None
        }
        for scheme in comparison.schemes
    }
    rows = []
    for scheme in comparison.schemes:
        own = [each for each in found if each.run.scheme == scheme]
        done = [each for each in own if each.state == "done"]
        lengths = sorted({row["length"] for each in done for row in each.tests})
        by_length = {
            length: [x for each in done if (x := each.score(task.metric, length)) is not None] for length in lengths
        }
        refused = {row["length"]: row["refused"] for each in done for row in each.tests if row["refused"]}
        against = None
        if scheme != baseline:
            against = difference(scores[scheme], scores[baseline], higher_is_better=task.higher_is_better)
        rows.append(
            Row(
                scheme, scheme == baseline, estimate(list(scores[scheme].values())), against,
                {length: estimate(values) for length, values in by_length.items() if values}, refused,
                done[0].cost["scheme_parameters"] if done else None,
                _mean([each.cost["seconds_per_step"] for each in done]),
                _mean([each.cost["memory_mb"] for each in done]),
                {each.run.seed: each.reason for each in own if each.state == "failed"}, len(done), len(own),
            )
        )  # fmt: skip

    def rank(row: Row) -> float:
        if math.isnan(row.score.mean):
            return math.inf
        return -row.score.mean if task.higher_is_better else row.score.mean

    return sorted(rows, key=rank)


def _mean(values: list[float]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None


def sentences(comparison: Comparison, rows: list[Row]) -> list[str]:
    """What may be said, and no more than that."""
    task = find_task(comparison.work.task)
    seeds = min((row.finished for row in rows), default=0)
    baseline = comparison.schemes[0]
    said = []
    for row in rows:
        for seed, reason in row.failed.items():
            said.append(f"{row.scheme}, seed {seed}, failed: {reason}.")
    if not any(row.finished for row in rows):
        return [*said, "No run has finished yet."]
    if seeds < 2:
        few = "One seed" if len(comparison.seeds) == 1 else "Fewer than two finished seeds of some schemes"
        said.append(f"{few}: no interval, and no winner. The order may be chance; use --seeds 3 or more.")
    for row in rows:
        if row.against is None or row.against.estimate.low is None or row.against.estimate.high is None:
            continue
        at, verdict = row.against.estimate, row.against.verdict
        if verdict == "no difference shown":
            said.append(f"{row.scheme} and {baseline}: no difference shown ({_signed(at)}).")
        elif verdict == "no spread between seeds":
            said.append(
                f"{row.scheme} and {baseline} differ by {at.mean:+.4g} in every seed: no spread to judge it by."
            )
        else:
            said.append(
                f"{row.scheme} is {verdict} than {baseline} by {abs(at.mean):.3g} in {task.metric} ({_signed(at)})."
            )
    return said


def _signed(at: Estimate) -> str:
    return f"difference {at.mean:+.3g}, 95 % interval {at.low:+.3g} to {at.high:+.3g}, {at.count} seeds"
