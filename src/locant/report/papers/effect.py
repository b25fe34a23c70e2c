"""An effect as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from locant.experiments.statistics import Estimate


def interval(effect: Estimate | None) -> str:
    """Returns the interval of an effect; empty without one."""
    if effect is None or effect.low is None or effect.high is None:
        return ""
    return f"{effect.low:.3g} … {effect.high:.3g}".replace("-", "−")
