"""What seeds can show: means with intervals, and differences to a baseline, paired by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

CONFIDENCE = 0.95
SAME = 1e-6
"""Part of a score below which two differences are the same: metrics are counted in single precision."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval: Student's t over seeds. With one seed there is no interval.

    Where one of the scores is no number (a test loss that ran away), neither is their mean: leaving it out would make
    a scheme look better than it is.
    """

    mean: float
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True)
class Difference:
    """A scheme minus the baseline over the seeds both have, and what may be said of it."""

    estimate: Estimate
    verdict: str  # better, worse, no difference shown, no spread between seeds, one seed, no seed in common, no number


def estimate(values: list[float]) -> Estimate:
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
    """Of Student's t. A page needs the same few for thousands of points, and scipy takes half a millisecond for one."""
    from scipy import stats

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees))


def difference(scheme: Mapping[int, float], baseline: Mapping[int, float], *, higher_is_better: bool) -> Difference:
    """Scores by seed. The same seed has the same data and the same weights in both: pairs differ less than runs do."""
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
    if max(gaps) - min(gaps) <= same < abs(found.mean):  # scores that come in steps can agree by chance
        return Difference(found, "no spread between seeds")
    if found.low <= 0 <= found.high or abs(found.mean) <= same:
        return Difference(found, "no difference shown")
    return Difference(found, "better" if (found.mean > 0) == higher_is_better else "worse")
