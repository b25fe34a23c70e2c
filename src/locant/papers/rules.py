"""The rules that turn an effect with its 95 % interval into a verdict. A claim chooses its rules before the run.

Every rule has a smallest effect, or a margin: an effect that is real but too small to matter confirms nothing. An
effect with fewer values than `seeds`, or without an interval, shows nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from locant.experiments.statistics import Estimate

CONFIRMED, NOT_SHOWN, CONTRADICTED = "confirmed", "not shown", "contradicted"
VERDICTS = (CONFIRMED, NOT_SHOWN, CONTRADICTED)


class Rule(Protocol):
    """Turns an effect into a verdict."""

    def judge(self, effect: Estimate) -> str:
        """Returns one of VERDICTS."""

    @property
    def words(self) -> str:
        """The rule as a sentence."""


@dataclass(frozen=True)
class Larger:
    """The effect is positive, and large enough to matter."""

    smallest: float  # mean effect worth having
    seeds: int = 3  # fewest values

    def judge(self, effect: Estimate) -> str:
        bounds = _bounds(effect, self.seeds)
        if bounds is None:
            return NOT_SHOWN
        low, high = bounds
        if low > 0 and effect.mean >= self.smallest:
            return CONFIRMED
        return CONTRADICTED if high < 0 else NOT_SHOWN

    @property
    def words(self) -> str:
        return (
            f"Confirmed if the 95 % interval lies above 0 and the mean is at least {self.smallest:g}; contradicted if "
            f"the interval lies below 0; {self.seeds} values or more."
        )


@dataclass(frozen=True)
class NotWorse:
    """The effect is positive, or too slightly negative to matter."""

    margin: float  # largest loss that does not matter
    seeds: int = 3

    def judge(self, effect: Estimate) -> str:
        bounds = _bounds(effect, self.seeds)
        if bounds is None:
            return NOT_SHOWN
        low, high = bounds
        if low > -self.margin:
            return CONFIRMED
        return CONTRADICTED if high < -self.margin else NOT_SHOWN

    @property
    def words(self) -> str:
        return (
            f"Confirmed if the 95 % interval lies above −{self.margin:g}; contradicted if it lies below; "
            f"{self.seeds} values or more."
        )


@dataclass(frozen=True)
class Absent:
    """There is no effect, or one too small to matter in either direction."""

    margin: float
    seeds: int = 3

    def judge(self, effect: Estimate) -> str:
        bounds = _bounds(effect, self.seeds)
        if bounds is None:
            return NOT_SHOWN
        low, high = bounds
        if -self.margin < low and high < self.margin:
            return CONFIRMED
        return CONTRADICTED if low > self.margin or high < -self.margin else NOT_SHOWN

    @property
    def words(self) -> str:
        return (
            f"Confirmed if the 95 % interval lies between −{self.margin:g} and {self.margin:g}; contradicted if it "
            f"lies outside; {self.seeds} values or more."
        )


@dataclass(frozen=True)
class Reached:
    """A condition of the experiment: without it a claim is neither confirmed nor contradicted."""

    seeds: int = 3

    def judge(self, effect: Estimate) -> str:
        bounds = _bounds(effect, self.seeds)
        return CONFIRMED if bounds is not None and bounds[0] > 0 else NOT_SHOWN

    @property
    def words(self) -> str:
        return f"Needed: the 95 % interval lies above 0, or nothing is shown; {self.seeds} values or more."


@dataclass(frozen=True)
class Exact:
    """Two numbers are equal, up to rounding. There is no interval."""

    tolerance: float

    def judge(self, effect: Estimate) -> str:
        return CONFIRMED if abs(effect.mean) <= self.tolerance else CONTRADICTED

    @property
    def words(self) -> str:
        return f"Confirmed if the largest difference is at most {self.tolerance:g}; contradicted otherwise."


@dataclass(frozen=True)
class Criterion:
    """One question of a claim: a rule, and the share of its parts that must be confirmed."""

    asks: str  # "R² of E Eᵀ minus that of random rows"
    rule: Rule
    share: float = 1.0

    def judge(self, effects: Sequence[Estimate]) -> str:
        """Returns the verdict over the parts, such as ten tables or four tasks."""
        if not effects:
            return NOT_SHOWN
        found = [self.rule.judge(effect) for effect in effects]
        if found.count(CONFIRMED) >= self.share * len(found) - 1e-9:
            return CONFIRMED
        return CONTRADICTED if found.count(CONTRADICTED) > (1 - self.share) * len(found) + 1e-9 else NOT_SHOWN

    @property
    def words(self) -> str:
        """The criterion in words."""
        several = "" if self.share == 1 else f" At least {self.share:.0%} of the cases must be confirmed."
        return f"{self.asks}. {self.rule.words}{several}"


def together(verdicts: Sequence[str]) -> str:
    """Returns the verdict of a claim with several criteria: all must be confirmed; one contradiction is enough.

    A claim whose experiment needs a condition (`Reached`) asks for that first.
    """
    if CONTRADICTED in verdicts:
        return CONTRADICTED
    return CONFIRMED if verdicts and all(verdict == CONFIRMED for verdict in verdicts) else NOT_SHOWN


def _bounds(effect: Estimate, seeds: int) -> tuple[float, float] | None:
    """The interval of an effect; None if it has none or too few values."""
    low, high = effect.low, effect.high
    if low is None or high is None or effect.count < seeds or not all(map(math.isfinite, (effect.mean, low, high))):
        return None
    return low, high
