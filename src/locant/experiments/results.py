"""The results of a comparison so far, as tables and sentences. They need its files alone, also while runs go on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from locant.experiments.comparison import Comparison, where
from locant.experiments.learned import UNREADABLE, Learned, curves_of, stored_curves
from locant.experiments.run import quiet
from locant.experiments.statistics import Difference, Estimate, difference, estimate
from locant.experiments.tasks import find_task
from locant.experiments.work import Run
from locant.runs import files, run_folder
from locant.runs.untrusted import first_line


@dataclass(frozen=True)
class RunResult:
    """One run and its results so far."""

    run: Run
    state: str  # new, begun, done or failed
    reason: str  # of a failure
    steps: list[dict[str, Any]]  # logged rows: step, seconds, loss, …
    tests: list[dict[str, Any]]  # one row per length, with the fields of Evaluation
    cost: dict[str, Any]  # seconds_per_step, seconds, memory_mb, parameters, scheme_parameters; empty until it is done

    @property
    def step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    def score(self, metric: str, length: int | None = None) -> float | None:
        """Returns the score of a finished run at one length, by default the trained length; None if it has none."""
        if self.state != "done" or not self.tests:
            return None
        row = self.tests[0] if length is None else next((row for row in self.tests if row["length"] == length), None)
        return None if row is None else row["values"].get(metric)


@dataclass(frozen=True)
class SchemeResult:
    """One scheme in the ranked table, over its seeds."""

    scheme: str
    baseline: bool
    score: Estimate
    against: Difference | None  # None for the baseline itself
    by_length: dict[int, Estimate]  # tested length -> score
    refused: dict[int, str]  # length that it cannot read -> reason
    parameters: int | None  # of the scheme itself
    seconds_per_step: float | None
    memory_mb: float | None
    failed: dict[int, str]  # seed -> reason
    finished: int  # runs
    wanted: int
    scores: dict[int, float]  # seed -> score, of finished runs
    noise: float | None  # standard error of the score of a run over test examples, mean over seeds


def outcome(out: Path, run: Run) -> RunResult:
    """Returns one run of a comparison as its folder is now."""
    here = where(out, run)
    state = run_folder.state(here)  # read before the metrics: those of a finished run are complete
    reason = ""
    if state == "failed":
        try:
            reason = str(files.read_json(here / run_folder.FAILED).get("reason", "unknown"))
        except FileNotFoundError:  # another process has just started it again
            state = "begun"
    lines = run_folder.metrics(here / run_folder.METRICS)
    by_kind: dict[str, list[dict[str, Any]]] = {kind: [] for kind in ("step", "test", "cost")}
    for line in lines:
        by_kind[line["kind"]].append(line)
    cost = by_kind["cost"][-1] if by_kind["cost"] else {}
    return RunResult(run, state, reason, by_kind["step"], by_kind["test"], cost)


def outcomes(out: Path, comparison: Comparison) -> list[RunResult]:
    """Returns all runs of a comparison, finished or not."""
    return [outcome(out, run) for run in comparison.runs()]


def table(comparison: Comparison, found: list[RunResult]) -> list[SchemeResult]:
    """Returns one row per scheme: best first, schemes without a finished run last."""
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
                scores[scheme], _mean([row["noise"].get(task.metric) for each in done for row in each.tests[:1]
                                       if isinstance(row.get("noise"), dict)]),
            )
        )  # fmt: skip

    def rank(row: SchemeResult) -> float:
        if math.isnan(row.score.mean):
            return math.inf
        return -row.score.mean if task.higher_is_better else row.score.mean

    return sorted(rows, key=rank)


def gaps(row: SchemeResult, baseline: SchemeResult) -> list[float]:
    """Returns the score of a scheme minus that of the baseline, for each seed that both have."""
    return [row.scores[seed] - baseline.scores[seed] for seed in sorted(row.scores.keys() & baseline.scores.keys())]


def learned_curves(out: Path, found: RunResult) -> Learned:
    """Returns the curves of a finished run: those in its folder, or for a folder without them, those of its model."""
    here = where(out, found.run)
    stored = stored_curves(here)
    if stored is not None:
        return stored
    return _curves_of_model(here, (here / run_folder.DONE).stat().st_mtime_ns, found.run.work.preset.length)


@lru_cache(maxsize=256)
def _curves_of_model(here: Path, written: int, length: int) -> Learned:
    """Cached by the time the run ended: a page that is written after every run opens each model once."""
    from locant.hf import loading

    quiet()
    try:
        return curves_of(loading.load(here), length)
    except UNREADABLE as problem:
        return Learned(problem=first_line(problem))


def described(out: Path, found: list[RunResult]) -> dict[str, list[str]]:
    """Returns versions, processes and starting times from the run.json of all runs; runs that differ are all listed."""
    values: dict[str, dict[str, None]] = {}
    began: list[str] = []
    for each in found:
        try:
            about = files.read_json(where(out, each.run) / "run.json")
        except FileNotFoundError:
            continue
        for name, version in about.get("versions", {}).items():
            values.setdefault(name, {})[str(version)] = None
        if about.get("processes", 1) != 1:
            values.setdefault("processes of a run", {})[str(about["processes"])] = None
        began.append(str(about.get("began", "")))
    times = {"first run began": [min(began)], "last run began": [max(began)]} if any(began) else {}
    return {**{name: list(its) for name, its in values.items()}, **times}


def _mean(values: list[Any]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None


def sentences(comparison: Comparison, rows: list[SchemeResult]) -> list[str]:
    """Returns the conclusions that the seeds support: the order, the baseline, longer inputs, missing runs."""
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
    sentences = []
    ranked = [row for row in rows if math.isfinite(row.score.mean)]
    if len(ranked) > 1:
        first, second = ranked[:2]
        found = difference(first.scores, second.scores, higher_is_better=task.higher_is_better)
        if found.estimate.low is not None:
            sentences.append(
                f"{first.scheme} has the best mean {task.metric}, {first.score.mean:.4g}. Against the second, "
                f"{second.scheme}: {found.verdict}{_signed(found.estimate)}."
            )
    if few:
        sentences.append(f"Only one seed of {_listed(few)}: no interval there, and no conclusion on the difference.")
    return sentences


def _against_baseline(comparison: Comparison, rows: list[SchemeResult]) -> list[str]:
    task = find_task(comparison.work.task)
    baseline = comparison.schemes[0]
    judged = {
        row.scheme: row.against
        for row in rows
        if row.against is not None
        and row.against.estimate.low is not None
        # _order has the first against the second
        and not (row in rows[:2] and baseline in (leader.scheme for leader in rows[:2]))
    }
    sentences = []
    for verdict in dict.fromkeys(found.verdict for found in judged.values()):
        its = {scheme: found.estimate for scheme, found in judged.items() if found.verdict == verdict}
        schemes = _listed(list(its))
        gaps = _listed([f"{scheme} ({_plus(at.mean)})" for scheme, at in its.items()])
        one = _signed(next(iter(its.values()))) if len(its) == 1 else ""
        if verdict == "no difference shown":
            sentences.append(f"{schemes} against {baseline}: no difference shown{one}.")
        elif verdict == "no spread between seeds":
            sentences.append(
                f"The difference to {baseline} is the same in every seed, so there is no spread to judge it by: {gaps}."
            )
        elif one:
            sentences.append(f"{schemes} is {verdict} than {baseline} in {task.metric}{one}.")
        else:
            sentences.append(f"{verdict.capitalize()} than {baseline} in {task.metric}: {gaps}.")
    return sentences


def _longer(comparison: Comparison, rows: list[SchemeResult]) -> list[str]:
    task, trained = find_task(comparison.work.task), comparison.work.preset.length
    longest = max((length for row in rows for length in (*row.by_length, *row.refused)), default=trained)
    if longest <= trained:
        return []
    sentences = []
    able = [row for row in rows if longest in row.by_length and math.isfinite(row.by_length[longest].mean)]
    if any(row.by_length[longest].count > 1 for row in able):  # one seed has no winner
        best = (max if task.higher_is_better else min)(able, key=lambda row: row.by_length[longest].mean)
        sentences.append(
            f"At {longest:,} tokens, {longest / trained:g} × the trained length, {best.scheme} has the best mean "
            f"{task.metric}: {best.by_length[longest].mean:.4g} ({best.score.mean:.4g} at {trained:,})."
            f"{_overlapping(best, able, longest)}"
        )
    for row in rows:
        if row.refused:
            reasons = _listed(list(dict.fromkeys(row.refused.values())))
            sentences.append(
                f"{row.scheme} cannot read {_listed([f'{length:,}' for length in row.refused])} tokens: {reasons}."
            )
    return sentences


def _overlapping(best: SchemeResult, rows: list[SchemeResult], length: int) -> str:
    """Returns a sentence about the schemes whose interval at a length overlaps with that of the best."""
    own = best.by_length[length]
    others = [row.scheme for row in rows if row is not best and _overlap(own, row.by_length[length])]
    if not others:
        return ""
    return f" Its interval overlaps with {'those' if len(others) > 1 else 'that'} of {_listed(others)}."


def _overlap(first: Estimate, second: Estimate) -> bool:
    """Whether two intervals overlap; without an interval nothing is known, so they may."""
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return True
    return first.low <= second.high and second.low <= first.high


def _missing(comparison: Comparison, rows: list[SchemeResult]) -> list[str]:
    sentences = []
    ended, wanted = _ended(rows), sum(row.wanted for row in rows)
    if ended < wanted:
        sentences.append(f"{ended} of {wanted} runs have ended so far.")
    for row in rows:
        for reason in dict.fromkeys(row.failed.values()):
            seeds = [str(seed) for seed, its in row.failed.items() if its == reason]
            sentences.append(f"{row.scheme} failed with seed{'s' * (len(seeds) > 1)} {_listed(seeds)}: {reason}.")
    return sentences


def _ended(rows: list[SchemeResult]) -> int:
    return sum(row.finished + len(row.failed) for row in rows)


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _plus(value: float) -> str:
    return f"{value:+.4g}".replace("-", "−")  # as many digits as the tables of the page have (report/numerals.py)


def _signed(at: Estimate) -> str:
    if at.low is None or at.high is None:
        return ""
    return f" (difference {_plus(at.mean)}, 95 % interval {_plus(at.low)} to {_plus(at.high)}, {at.count} seeds)"
