"""How long a run trains: a number of steps, or a time that is measured once and then becomes a number of steps."""

from __future__ import annotations

import re
from dataclasses import dataclass

from locant.runs.untrusted import shortened

SECONDS = {"h": 3600, "m": 60, "s": 1}
PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(steps?|h|hours?|m|min|minutes?|s|sec|seconds?)\s*")

LARGEST = 1e12
"""A larger amount is a mistake, and no number of steps can be computed from it."""


@dataclass(frozen=True)
class Budget:
    """The training of each run: `steps` steps, or as many as fit into `seconds`."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Reads 10min, 90s, 2h or 2000steps."""
        match = PATTERN.fullmatch(text) if isinstance(text, str) else None
        if match is None or not 0 < float(match[1]) < LARGEST:
            raise ValueError(f"a budget must look like '10min', '90s', '2h' or '2000steps'; got {shortened(text, 40)}")
        amount, unit = float(match[1]), match[2]
        if not unit.startswith("step"):
            return cls(seconds=amount * SECONDS[unit[0]])
        if not amount.is_integer():
            raise ValueError(f"a budget in steps must be a whole number, as in '2000steps'; got {text!r}")
        return cls(steps=int(amount))


def spell_time(seconds: float) -> str:
    """Returns a duration with one unit: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
