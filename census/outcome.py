"""What came of one check, and whether an exception is a refusal in locant's own words."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from pathlib import Path

import locant

OK, REFUSED, ERROR, WRONG, NOT_RUN = "ok", "refused", "error", "wrong", "-"
LIKE_ORIGINAL = "the original does so too"
"""Reason of a check that passed although outputs differ: the fault is not the swap's."""
REFUSALS = (NotImplementedError, ValueError, TypeError)
PACKAGE = Path(locant.__file__).parent
FOLDER = re.compile(r"\S*census-\w+")
"""Temporary folders, which have another name each time."""
LONGEST_REASON = 300
"""Characters of a reason in the table."""


@dataclass(frozen=True)
class Outcome:
    """A state, and a reason in words where there is one."""

    state: str  # OK, REFUSED, ERROR, WRONG or NOT_RUN
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else self.state


def wrong(reason: str) -> Outcome:
    """A result that is not what it should be."""
    return Outcome(WRONG, reason)


def not_run(reason: str = "") -> Outcome:
    """A check that does not apply, or whose condition is not met."""
    return Outcome(NOT_RUN, reason)


def of_exception(problem: BaseException) -> Outcome:
    """REFUSED if locant raised it, by a class that stands for a refusal; otherwise it was an accident."""
    frames = traceback.extract_tb(problem.__traceback__)
    ours = bool(frames) and PACKAGE in Path(frames[-1].filename).parents
    reason = FOLDER.sub("FOLDER", " ".join(str(problem).split()))[:LONGEST_REASON]
    if ours and isinstance(problem, REFUSALS):
        return Outcome(REFUSED, reason)
    return Outcome(ERROR, f"{type(problem).__name__}: {reason}")
