"""Laws that every position scheme obeys, for schemes of your own as well.

    locant.testing.check_scheme(MyScheme(n_heads=4))

raises an AssertionError that names the laws that fail. The laws:

    tables       the terms have a column per offset, fit the heads and are float32 or wider even for a bfloat16 model
    locality     a column depends on its own offset alone: terms(r)[part] = terms(r[part]), and an embedding on its
                 own position; a second call gives the same, and a call changes no state
    rows         a batch of sequences, each with positions of its own, equals the sequences one by one
    shift        if and only if `shift_invariant`, moving every position by the same amount changes nothing
    decode       if `incremental`, one query at a time, as with a cache, equals the full pass
    irregular    if `pairwise`, positions with gaps and in any order give the same logits as the full matrix at those
                 positions
    gradient     autograd agrees with finite differences in float64, for q, k, v, hidden states and every parameter
    precision    the gradient of a bfloat16 parameter is summed in float32 or wider and rounded once
    reading      if the scheme reads hidden states, `read` gives float32 or wider, of each token alone, and attention
                 refuses missing hidden states and those of another length or width
    reach        if the scheme has a `reach`, its terms do not change beyond it
    back ends    every back end that supports the scheme agrees with `eager`, also with fewer key/value heads
    far away     values at |r| = 100,000 are finite
    parameters   their number is `parameter_count()`, and each of them has an effect
    spec         str(scheme) builds the same scheme again
    state        state_dict into a fresh scheme gives the same logits

A scheme that is `causal_only` is tried with causal attention alone. A scheme that rotates returns vectors of the size
that it gets, or `widens` both queries and keys alike.

The laws run on a copy with changed parameters: a scheme whose initial parameters have no effect would pass most laws
by doing nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from locant.schemes import Scheme
from locant.testing.checks import NotApplicable
from locant.testing.laws import LAWS
from locant.testing.subject import Subject

__all__ = ["LAWS", "Outcome", "check_scheme", "run_laws"]


@dataclass(frozen=True)
class Outcome:
    """The result of one law: `passed` is True, False, or None if the law does not apply; `detail` is the reason."""

    law: str
    passed: bool | None
    detail: str = ""


def check_scheme(scheme: Scheme, *, seed: int = 0) -> list[Outcome]:
    """The outcomes of all laws for a scheme; AssertionError with all failures if there are any."""
    outcomes = list(run_laws(scheme, seed=seed))
    failed = [outcome for outcome in outcomes if outcome.passed is False]
    if failed:
        lines = "\n".join(f"  {outcome.law}: {outcome.detail}" for outcome in failed)
        raise AssertionError(f"{scheme} breaks {len(failed)} of {len(outcomes)} laws:\n{lines}")
    return outcomes


def run_laws(scheme: Scheme, *, seed: int = 0) -> Iterator[Outcome]:
    """The outcomes of all laws for a scheme, one at a time."""
    if not isinstance(scheme, Scheme):
        raise TypeError(f"check_scheme takes a Scheme, got {type(scheme).__name__}")
    for law, run in LAWS.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                run(Subject(scheme))
                yield Outcome(law, True)
            except NotApplicable as reason:
                yield Outcome(law, None, str(reason))
            except Exception as problem:  # a scheme that crashes breaks the law it crashes in; the others still run
                kind = "" if isinstance(problem, AssertionError) else f"{type(problem).__name__}: "
                yield Outcome(law, False, f"{kind}{problem}")
