"""How many steps of training fit into a budget, stated before the work starts.

A budget of time covers the timing of a step, the fit, and the training with its evaluations. Measuring the states of
the model comes on top of it: the table of an adaptation needs it however short the training is.
"""

from __future__ import annotations

from dataclasses import dataclass

from locant.adaptation.training import EVALUATIONS, EVERY
from locant.runs.budget import Budget, spell_time

FEW = 5
"""A training of fewer steps is none: a time budget that leaves no more gives a fitted model."""
WORTHWHILE = 100
"""Steps of the budget that is recommended in place of one that is too small."""
MEASURED = 3
"""Evaluations of agreement beside the training: of the original, of the silenced and of the fitted model."""


@dataclass(frozen=True)
class Pace:
    """Seconds of a training step, of an evaluation, and that it took to measure them."""

    step: float
    evaluation: float
    timing: float = 0.0
    every: int = EVERY  # least number of steps between two evaluations

    def seconds(self, steps: int) -> float:
        """Returns the time of a training with its evaluations."""
        every = max(self.every, steps // EVALUATIONS)
        return steps * self.step + -(-steps // every) * self.evaluation

    def steps(self, seconds: float) -> int:
        """Returns the number of steps that fit into a time, evaluations included."""
        most = int(seconds / self.step)
        return next((steps for steps in range(most, 0, -1) if self.seconds(steps) <= seconds), 0)


def before_fit(given: str, pace: Pace | None, evaluation: float, scores: int, states: str = "four") -> str:
    """Returns what is known before the work starts: the steps that fit, and what measuring adds.

    given        the budget, as the caller wrote it.
    pace         None for a budget in steps, and where nothing is trained or a training is resumed.
    evaluation   the seconds of one evaluation of agreement.
    scores       the number of scores that each state gets.
    states       how many states of the model are measured.
    """
    words = f"measuring adds about {spell_time(MEASURED * evaluation)}"
    if scores:
        words += f" and the time of {scores} {'score' if scores == 1 else 'scores'} in each of {states} states"
    seconds = Budget.parse(given).seconds
    if seconds is None:
        return f"{given} are steps of training; the fit takes its time before them, and {words}"
    if pace is None:
        return words
    most = pace.steps(seconds - pace.timing)
    return f"{given} have room for {most:,} steps of {pace.step:.2g} s, less the time of the fit; {words}"


def before_contrast(given: str, pace: Pace, steps: int) -> str:
    """Returns how many steps the contrastive stage has."""
    return f"contrast: {given} have room for {steps:,} steps of {pace.step:.2g} s"


def too_few_to_contrast(given: str, pace: Pace) -> str:
    """Returns why there was no contrastive stage, and the budget that would give one."""
    return (
        f"there was no contrastive stage: fewer than {FEW} steps of {pace.step:.2g} s fit into {given}; "
        f"{WORTHWHILE} steps need a budget of about {spell_time(pace.timing + pace.seconds(WORTHWHILE))}"
    )


def after_fit(given: str, fit_seconds: float, steps: int) -> str:
    """Returns how many steps follow the fit."""
    return f"the fit took {spell_time(fit_seconds)}; {steps:,} steps fit into the rest of {given}"


def too_few(given: str, pace: Pace, fit_seconds: float) -> str:
    """Returns why a model was not trained, and the budget that would train it."""
    enough = pace.timing + fit_seconds + pace.seconds(WORTHWHILE)
    return (
        f"the model is fitted only, not trained: the fit took {spell_time(fit_seconds)} of {given}, and fewer than "
        f"{FEW} steps of {pace.step:.2g} s fit into the rest; {WORTHWHILE} steps need a budget of about "
        f"{spell_time(enough)}"
    )
