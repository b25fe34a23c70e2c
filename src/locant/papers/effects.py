"""Effects with 95 % intervals, in the form that the rules judge: positive means as the paper claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from locant.experiments.statistics import Estimate, estimate

DRAWS = 2000
"""Draws of a bootstrap."""


def gain(better: Mapping[int, float], than: Mapping[int, float], *, higher_is_better: bool) -> Estimate:
    """Returns how much better one arm is than another, paired by seed. A lower loss is a positive gain."""
    sign = 1 if higher_is_better else -1
    return estimate([sign * (better[seed] - than[seed]) for seed in sorted(better.keys() & than.keys())])


def average_gain(gains: Sequence[Sequence[float]]) -> Estimate:
    """Returns the mean over cases (tasks, lengths) of the gain of each seed, with its interval over seeds.

    `gains[case][seed]`. A seed that some case lacks is left out of all.
    """
    seeds = min((len(case) for case in gains), default=0)
    return estimate([float(np.mean([case[seed] for case in gains])) for seed in range(seeds)])


def rank_correlation(x: Sequence[float], y: Sequence[float], groups: Sequence[object] | None = None) -> Estimate:
    """Returns Spearman's correlation with a bootstrap interval over the points, or over whole groups of them.

    Points of one group are not independent (checkpoints of one run, seeds of one size): name the group of each.
    """
    from scipy.stats import spearmanr  # optional, and takes a second

    if len(x) != len(y):
        raise ValueError(f"a correlation needs as many x as y; got {len(x)} and {len(y)}")
    if len(x) < 4:
        return Estimate(float("nan"), None, None, len(x))
    first, second = np.asarray(x, float), np.asarray(y, float)
    names = list(range(len(x))) if groups is None else list(groups)
    members = [np.flatnonzero([name == each for name in names]) for each in dict.fromkeys(names)]
    generator, drawn = np.random.default_rng(0), []
    for _ in range(DRAWS):
        chosen = np.concatenate([members[at] for at in generator.integers(0, len(members), len(members))])
        if len(set(first[chosen])) > 1 and len(set(second[chosen])) > 1:
            drawn.append(float(spearmanr(first[chosen], second[chosen]).statistic))
    low, high = np.quantile(drawn, [0.025, 0.975]) if drawn else (float("nan"), float("nan"))
    return Estimate(float(spearmanr(first, second).statistic), float(low), float(high), len(members))


def known(value: float) -> Estimate:
    """Returns a number that has no spread: a count, or an identity."""
    return Estimate(value, value, value, 1)
