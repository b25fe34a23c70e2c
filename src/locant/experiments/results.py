"""The results of a comparison: its folder as tables and sentences. It only reads files; runs may be going on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locant.experiments.comparison import Comparison, where
from locant.experiments.statistics import Difference, Estimate, difference, estimate
from locant.experiments.tasks import find_task
from locant.experiments.work import Run
from locant.runs import files, run_folder


@dataclass(frozen=True)
class RunResult:
    """The state of one run, and its results so far."""

    run: Run
    state: str  # new, begun, done or failed
    reason: str  # why it failed
    steps: list[dict[str, Any]]  # logged lines: step, seconds, loss, …
    tests: list[dict[str, Any]]  # the fields of an Evaluation, one per length
    cost: dict[str, Any]  # seconds_per_step, seconds, memory_mb, parameters, scheme_parameters; empty until it is done

    @property
    def step(self) -> int:
        """The last logged step; 0 if there is none."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    def score(self, metric: str, length: int | None = None) -> float | None:
        """Returns the score of a finished run at one length, by default the training length; None if there is none."""
        if self.state != "done" or not self.tests:
            return None
        row = self.tests[0] if length is None else next((row for row in self.tests if row["length"] == length), None)
        return None if row is None else row["values"].get(metric)


@dataclass(frozen=True)
class SchemeResult:
    """The results of one scheme over its seeds: a line of the ranked table."""

    scheme: str
    baseline: bool
    score: Estimate
    against: Difference | None  # None for the baseline itself
    by_length: dict[int, Estimate]  # length of the test inputs -> score
    refused: dict[int, str]  # length that it cannot read -> reason
    parameters: int | None  # of the scheme itself
    seconds_per_step: float | None
    memory_mb: float | None
    failed: dict[int, str]  # seed -> reason
    finished: int  # runs
    wanted: int
    scores: dict[int, float]  # seed -> score, of finished runs


def outcome(out: Path, run: Run) -> RunResult:
    """Returns the result of one run."""
    here = where(out, run)
    state = run_folder.state(here)  # read before the metrics: if the run is done, they are complete
    reason = ""
    if state == "failed":
        try:
            reason = str(files.read_json(here / run_folder.FAILED)["reason"])
        except FileNotFoundError:  # another process is trying it again
            state = "begun"
    lines = files.lines(here / run_folder.METRICS)
    by_kind: dict[str, list[dict[str, Any]]] = {kind: [] for kind in ("step", "test", "cost")}
    for line in lines:
        by_kind[line["kind"]].append(line)
    cost = by_kind["cost"][-1] if by_kind["cost"] else {}
    return RunResult(run, state, reason, by_kind["step"], by_kind["test"], cost)


def outcomes(out: Path, comparison: Comparison) -> list[RunResult]:
    """Returns the results of all runs."""
    return [outcome(out, run) for run in comparison.runs()]


def table(comparison: Comparison, found: list[RunResult]) -> list[SchemeResult]:
    """Returns the schemes ranked by their mean score, best first; schemes without a score come last."""
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
            SchemeResult(
                scheme, scheme == baseline, estimate(list(scores[scheme].values())), against,
                {length: estimate(values) for length, values in by_length.items() if values}, refused,
                done[0].cost["scheme_parameters"] if done else None,
                _mean([each.cost["seconds_per_step"] for each in done]),
                _mean([each.cost["memory_mb"] for each in done]),
                {each.run.seed: each.reason for each in own if each.state == "failed"}, len(done), len(own),
                scores[scheme],
            )
        )  # fmt: skip

    def rank(row: SchemeResult) -> float:
        if math.isnan(row.score.mean):
            return math.inf
        return -row.score.mean if task.higher_is_better else row.score.mean

    return sorted(rows, key=rank)


def _mean(values: list[float]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None


def sentences(comparison: Comparison, rows: list[SchemeResult]) -> list[str]:
    """Returns the conclusions that the runs allow: the order, the baseline, longer inputs, missing runs."""
    if not any(row.finished for row in rows):
        return ["No run has finished yet.", *_missing(comparison, rows)]
    return [
        *_order(comparison, rows),
        *_against_baseline(comparison, rows),
        *_longer(comparison, rows),
        *_missing(comparison, rows),
    ]


def _order(comparison: Comparison, rows: list[SchemeResult]) -> list[str]:
    task = find_task(comparison.work.task)
    few = [row.scheme for row in rows if row.score.count == 1]
    if all(row.score.count < 2 for row in rows):
        if len(comparison.seeds) > 1 and _ended(rows) < sum(row.wanted for row in rows):
            return ["One seed so far: no interval yet, and no winner. The order may be chance."]
        return ["One seed: no interval, and no winner. The order may be chance; train 3 seeds or more."]
    texts: list[str] = []
    ranked = [row for row in rows if math.isfinite(row.score.mean)]
    if len(ranked) > 1:
        first, second = ranked[:2]
        found = difference(first.scores, second.scores, higher_is_better=task.higher_is_better)
        if found.estimate.low is not None:
            texts.append(
                f"{first.scheme} has the best mean {task.metric}, {first.score.mean:.4g}. Against the second, "
                f"{second.scheme}: {found.verdict}{_signed(found.estimate)}."
            )
    if few:
        texts.append(f"Only one seed of {_listed(few)}: there is no interval, and no verdict on the difference.")
    return texts


def _against_baseline(comparison: Comparison, rows: list[SchemeResult]) -> list[str]:
    task = find_task(comparison.work.task)
    baseline = comparison.schemes[0]
    judged = {
        row.scheme: row.against
        for row in rows
        if row.against is not None
        and row.against.estimate.low is not None
        # unless the sentence on the first two schemes has it already
        and not (row in rows[:2] and baseline in (leader.scheme for leader in rows[:2]))
    }
    texts: list[str] = []
    for verdict in dict.fromkeys(found.verdict for found in judged.values()):
        its = {scheme: found.estimate for scheme, found in judged.items() if found.verdict == verdict}
        schemes = _listed(list(its))
        gaps = _listed([f"{scheme} ({_plus(at.mean)})" for scheme, at in its.items()])
        one = _signed(next(iter(its.values()))) if len(its) == 1 else ""
        if verdict == "no difference shown":
            texts.append(f"{schemes} against {baseline}: no difference shown{one}.")
        elif verdict == "no spread between seeds":
            texts.append(
                f"The same difference to {baseline} in every seed, so there is no spread to judge it by: {gaps}."
            )
        elif one:
            texts.append(f"{schemes} is {verdict} than {baseline} in {task.metric}{one}.")
        else:
            texts.append(f"{verdict.capitalize()} than {baseline} in {task.metric}: {gaps}.")
    return texts


def _longer(comparison: Comparison, rows: list[SchemeResult]) -> list[str]:
    task, trained = find_task(comparison.work.task), comparison.work.preset.length
    longest = max((length for row in rows for length in (*row.by_length, *row.refused)), default=trained)
    if longest <= trained:
        return []
    texts: list[str] = []
    able = [row for row in rows if longest in row.by_length and math.isfinite(row.by_length[longest].mean)]
    if any(row.by_length[longest].count > 1 for row in able):  # one seed has no winner
        best = (max if task.higher_is_better else min)(able, key=lambda row: row.by_length[longest].mean)
        texts.append(
            f"At {longest:,} tokens, {longest / trained:g} × the length of training, {best.scheme} has the best mean "
            f"{task.metric}: {best.by_length[longest].mean:.4g}, after {best.score.mean:.4g} at {trained:,}."
        )
    for row in rows:
        if row.refused:
            reasons = _listed(list(dict.fromkeys(row.refused.values())))
            texts.append(
                f"{row.scheme} cannot read {_listed([f'{length:,}' for length in row.refused])} tokens: {reasons}."
            )
    return texts


def _missing(comparison: Comparison, rows: list[SchemeResult]) -> list[str]:
    texts: list[str] = []
    ended, wanted = _ended(rows), sum(row.wanted for row in rows)
    if ended < wanted:
        texts.append(f"{ended} of {wanted} runs have ended so far.")
    for row in rows:
        for reason in dict.fromkeys(row.failed.values()):
            seeds = [str(seed) for seed, its in row.failed.items() if its == reason]
            texts.append(f"{row.scheme} failed with seed{'s' * (len(seeds) > 1)} {_listed(seeds)}: {reason}.")
    return texts


def _ended(rows: list[SchemeResult]) -> int:
    return sum(row.finished + len(row.failed) for row in rows)


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _plus(value: float) -> str:
    return f"{value:+.3g}".replace("-", "−")


def _signed(at: Estimate) -> str:
    if at.low is None or at.high is None:
        return ""
    return f" (difference {_plus(at.mean)}, 95 % interval {_plus(at.low)} to {_plus(at.high)}, {at.count} seeds)"
