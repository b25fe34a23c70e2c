"""Survivors that are no gap in the tests, each with the reason.

A reason belongs to a function and to the changes that match a pattern. A survivor without a reason fails the run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from reliability.mutants.mutant import Mutant
from reliability.mutants.results import shown

EQUIVALENT = "equivalent"  # no input can tell it from the original
PERFORMANCE = "performance"  # the same result, faster or slower, or with more or less memory
PLATFORM = "platform"  # needs hardware or a system that the tests do not have
TUNING = "tuning"  # a start value or a heuristic: another value is as right


@dataclass(frozen=True)
class Reason:
    """Why the mutants of a function, or some of them, need not be noticed."""

    path: str
    function: str
    change: str  # a regular expression, searched in "old → new"
    kind: str
    why: str


REASONS: tuple[Reason, ...] = ()


def reason_of(mutant: Mutant) -> Reason | None:
    """The reason of a survivor, if it has one."""
    for reason in REASONS:
        if (reason.path, reason.function) == (mutant.path, mutant.function) and re.search(reason.change, shown(mutant)):
            return reason
    return None
