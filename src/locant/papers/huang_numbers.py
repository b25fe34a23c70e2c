"""From the scores of the runs to effects, tables and sentences, for the claims on Huang et al. 2020."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from locant.experiments.statistics import Estimate, estimate
from locant.papers import glue
from locant.papers.claim import Cell, Measured, Part, Table
from locant.papers.effects import gain
from locant.papers.huang_sizes import ABSOLUTE, BEST, WORDS
from locant.papers.squad import Scores

FLOOR = 10.0
"""F1 of a model that has learned to answer. Random spans reach 4 to 8; below the floor, a ratio of two scores or a
small difference between them shows nothing."""


def spell(effect: Estimate) -> str:
    """Returns an effect with its interval, for a sentence."""
    known = effect.low is not None and effect.high is not None
    interval = f" (95 % interval {effect.low:+.2f} to {effect.high:+.2f})" if known else ""
    return f"{effect.mean:+.2f}{interval}".replace("-", "−")


def row_of(effect: Estimate) -> tuple[Cell, ...]:
    """Returns mean, interval and count as cells."""
    return (_cell(effect.mean), effect.low, effect.high, effect.count)


def _cell(value: float) -> float | None:
    return value if math.isfinite(value) else None


INTERVAL = ("mean", "low", "high", "seeds")


def method_four_against_others(
    warm: Mapping[str, Mapping[str, Scores]], cold: Mapping[str, Mapping[str, Scores]], asks: Mapping[str, str]
) -> Measured:
    """Returns the result of C1 from metric -> arm -> seed -> score. Absolute embeddings are among the warm arms.

    asks   the criterion by the arm that method 4 is compared with.
    """
    scores: list[tuple[Cell, ...]] = []
    gains: list[tuple[Cell, ...]] = []
    for start, found in (("warm", warm), ("cold", cold)):
        for metric, by_arm in found.items():
            scores += [(WORDS[arm], start, metric, *row_of(estimate(list(of.values())))) for arm, of in by_arm.items()]
            # The original is neither warm nor cold: both starts are compared with it.
            others = {ABSOLUTE: warm[metric][ABSOLUTE], **by_arm}
            gains += [
                (WORDS[arm], start, metric, *row_of(gain(by_arm[BEST], of, higher_is_better=True)))
                for arm, of in others.items()
                if arm != BEST
            ]
    f1 = warm["f1"]
    parts = [
        Part(criterion, "F1", gain(f1[BEST], f1[arm], higher_is_better=True))
        for arm, criterion in asks.items()
        if arm in f1
    ]
    ranked = sorted(f1, key=lambda arm: -estimate(list(f1[arm].values())).mean)
    listed = ", ".join(f"{WORDS[arm]} {estimate(list(f1[arm].values())).mean:.1f}" for arm in ranked)
    sentences = [
        f"Mean F1 at the trained length, warm start: {listed}.",
        *(f"{part.asks}: {spell(part.effect)}." for part in parts),
    ]
    tables = {
        "scores": Table(("arm", "start", "metric", *INTERVAL), scores),
        "gains": Table(("over", "start", "metric", *INTERVAL), gains),
    }
    return Measured(parts, tables, sentences)


def kept_past_training(found: Mapping[str, Mapping[int, Scores]], *, against: str, alone: str) -> Measured:
    """Returns the result of C2 from arm -> length -> seed -> F1. The shortest length is the trained one.

    against, alone   the criteria: of the comparison with absolute embeddings, and of method 4 itself.
    """
    lengths = sorted(found[BEST])
    trained = lengths[0]
    shares = {
        arm: {length: _shares(of.get(length, {}), of[trained]) for length in lengths} for arm, of in found.items()
    }
    rows = [
        (WORDS[arm], length, *row_of(estimate(list(of[length].values()))), _cell(_mean(shares[arm][length])))
        for arm, of in found.items()
        for length in lengths
        if of.get(length)
    ]
    judged = [length for length in lengths if length in (2 * trained, 4 * trained)][::-1]
    parts = []
    for length in judged:
        effect = gain(shares[BEST][length], shares[ABSOLUTE][length], higher_is_better=True)
        parts.append(Part(against, f"{length:,} tokens", effect))
    for length in judged:
        effect = estimate([share - 1 for share in shares[BEST][length].values()])
        parts.append(Part(alone, f"{length:,} tokens", effect))
    sentences = [
        f"At {length:,} tokens method 4 has {_mean(shares[BEST][length]):.0%} of its F1 at {trained:,} tokens, "
        f"absolute embeddings have {_mean(shares[ABSOLUTE][length]):.0%}."
        for length in judged
    ]
    return Measured(parts, {"lengths": Table(("arm", "length", *INTERVAL, "share"), rows)}, sentences)


def _shares(long: Scores, trained: Scores) -> dict[int, float]:
    """Seed -> F1 at a longer length over F1 at the trained one; NaN where that is below the floor."""
    seeds = sorted(long.keys() & trained.keys())
    return {seed: long[seed] / trained[seed] if trained[seed] >= FLOOR else math.nan for seed in seeds}


def _mean(shares: Scores) -> float:
    return estimate(list(shares.values())).mean


def small_tables(
    found: Mapping[str, Scores], parameters: Mapping[str, int], main: int, *, short: str, shared: str
) -> Measured:
    """Returns the result of C3 from "clip 8" or "own tables" -> seed -> F1, and their parameters.

    main            the clip of "own tables".
    short, shared   the criteria: of the shortest clip, and of one table for all heads.
    """
    clips = sorted(int(name.split()[1]) for name in found if name.startswith("clip "))
    learned = {name: {seed: f1 if f1 >= FLOOR else math.nan for seed, f1 in of.items()} for name, of in found.items()}
    low, high = learned[f"clip {clips[0]}"], learned[f"clip {clips[-1]}"]
    parts = [
        Part(short, f"clip {clips[0]} and {clips[-1]}", gain(low, high, higher_is_better=True)),
        Part(
            shared,
            f"clip {main}",
            gain(learned[f"clip {main}"], learned["own tables"], higher_is_better=True),
        ),
    ]
    rows: list[tuple[Cell, ...]] = [
        (
            main if name == "own tables" else int(name.split()[1]),
            "own" if name == "own tables" else "shared",
            parameters[name],
            *row_of(estimate(list(of.values()))),
        )
        for name, of in found.items()
    ]
    sentences = [f"{part.asks} ({part.name}): {spell(part.effect)}." for part in parts]
    return Measured(parts, {"clips": Table(("clip", "tables", "parameters", *INTERVAL), rows)}, sentences)


def against_original(
    found: Mapping[str, glue.Scores], original: glue.Scores, tasks: Sequence[str], *, over: str
) -> Measured:
    """Returns the result of C4 from method -> task -> seed -> score, and task -> seed -> score of the original.

    tasks  those that count for the mean.
    over   the criterion of method 4.
    """
    mean = {method: glue.mean_gain(glue.of_tasks(scores, tasks), original) for method, scores in found.items()}
    rows: list[tuple[Cell, ...]] = [(WORDS[method], "mean", *row_of(effect)) for method, effect in mean.items()]
    for method, scores in found.items():
        rows += [(WORDS[method], task, *row_of(each)) for task, each in glue.gains(scores, original).items()]
    parts = [Part(over, "learned tasks", mean[BEST])]
    sentences = [
        f"{WORDS[method]}: {spell(effect)} points over the tasks that the original learned."
        for method, effect in mean.items()
    ]
    return Measured(parts, {"gains": Table(("method", "task", *INTERVAL), rows)}, sentences)


@dataclass(frozen=True)
class Kept:
    """One score of a model and that of its original."""

    method: str
    budget: int
    seed: int
    test: str  # STS-B or retrieval
    score: float
    original: float

    @property
    def share(self) -> float:
        """The share of the original's score; NaN if that is 0."""
        return self.score / self.original if self.original else math.nan


def kept_of_original(rows: Sequence[Kept], budget: int, asks: Mapping[str, tuple[str, float]]) -> Measured:
    """Returns the result of C5.

    budget   steps of the models that decide.
    asks     by test, the criterion and the share that it takes away.
    """
    parts = []
    for test, (criterion, least) in asks.items():
        shares = [row.share for row in rows if (row.method, row.budget, row.test) == (BEST, budget, test)]
        parts.append(Part(criterion, test, estimate([share - least for share in shares])))
    table = Table(
        ("method", "steps", "seed", "test", "score", "original", "share"),
        [(WORDS[x.method], x.budget, x.seed, x.test, x.score, x.original, _cell(x.share)) for x in rows],
    )
    kept = {
        (test, steps): [
            f"{WORDS[x.method]} {x.share:.1%}" for x in rows if (x.test, x.budget, x.seed) == (test, steps, 0)
        ]
        for test in asks
        for steps in dict.fromkeys((0, budget))
    }
    sentences = [
        f"Kept of {test} after {steps} steps, seed 0: {', '.join(each)}." for (test, steps), each in kept.items()
    ]
    return Measured(parts, {"kept": table}, sentences)


def pictures(offsets: Mapping[str, list[list[float]]], tables: Mapping[str, list[list[float]]]) -> dict[str, Table]:
    """Returns the numbers of the figures: one matrix per table, its first column the label of the row."""
    vectors, clip = offsets["vectors"], len(offsets["vectors"]) // 2
    width, scalars = len(vectors[0]), tables["scalars"]
    last = len(scalars[0]) // 2
    return {
        "positions": Table(
            ("position", *(f"{column}" for column in tables["columns"])),
            [(at, *row) for at, row in zip(tables["rows"], tables["table"], strict=True)],  # type: ignore[arg-type]
        ),
        "scalars": Table(
            ("offset", *(f"head {head}" for head in range(1, len(scalars) + 1))),
            [(r, *(head[r + last] for head in scalars)) for r in range(-last, last + 1)],
        ),
        "vectors": Table(
            ("offset", *(f"{coordinate}" for coordinate in range(width))),
            [(r, *vectors[r + clip]) for r in range(-clip, clip + 1)],
        ),
        "sizes": Table(
            ("offset", "trained", "initial"),
            [
                (r, math.hypot(*vectors[r + clip]), math.hypot(*offsets["initial"][r + clip]))
                for r in range(-clip, clip + 1)
            ],
        ),
        "attention": Table(
            ("query", *(f"{key}" for key in range(len(offsets["weights"])))),
            [(query, *row) for query, row in enumerate(offsets["weights"])],
        ),
    }
