"""Means with intervals over seeds, and differences to a baseline, paired by seed.

The rule for "no difference shown" is in `difference`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

CONFIDENCE = 0.95
SAME = 1e-6
"""Two differences are equal if they differ by less than this part of the score: metrics have single precision."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval, Student's t over seeds. With one seed there is no interval.

    If one score is not finite (a diverged test loss), the mean is NaN: without that score the scheme would appear
    better than it is.
    """

    mean: float
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True)
class Difference:
    """A scheme minus the baseline over the seeds that both have, and the conclusion."""

    estimate: Estimate
    verdict: str  # better, worse, no difference shown, no spread between seeds, one seed, no seed in common, no number


def estimate(values: list[float]) -> Estimate:
    """Returns the mean of one score per seed, with its interval."""
    if not values:
        return Estimate(math.nan, None, None, 0)
    if not all(map(math.isfinite, values)):
        return Estimate(math.nan, None, None, len(values))
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Estimate(mean, None, None, 1)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    half = _quantile(len(values) - 1) * spread
    return Estimate(mean, mean - half, mean + half, len(values))


@cache
def _quantile(degrees: int) -> float:
    """Quantile of Student's t, cached: a page needs few for thousands of points, and scipy takes 0.5 ms each."""
    from scipy import stats

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees))


def difference(scheme: Mapping[int, float], baseline: Mapping[int, float], *, higher_is_better: bool) -> Difference:
    """Returns the difference of scores by seed.

    The same seed has the same data and the same initial weights in both, so paired differences vary less than scores.
    """
    shared = sorted(scheme.keys() & baseline.keys())
    gaps = [scheme[seed] - baseline[seed] for seed in shared]
    found = estimate(gaps)
    if not shared:
        return Difference(found, "no seed in common")
    if math.isnan(found.mean):
        return Difference(found, "no number")
    if found.low is None or found.high is None:
        return Difference(found, "one seed")
    same = SAME * max(abs(score) for seed in shared for score in (scheme[seed], baseline[seed]))
    if max(gaps) - min(gaps) <= same < abs(found.mean):  # discrete scores can agree by chance
        return Difference(found, "no spread between seeds")
    if found.low <= 0 <= found.high or abs(found.mean) <= same:
        return Difference(found, "no difference shown")
    return Difference(found, "better" if (found.mean > 0) == higher_is_better else "worse")
