"""An effect as text."""

from __future__ import annotations

from locant.papers.claim import Effect


def interval(effect: Effect | None) -> str:
    """Returns the interval of an effect; empty without one."""
    if effect is None or effect.low is None or effect.high is None:
        return ""
    return f"{effect.low:.3g} … {effect.high:.3g}".replace("-", "−")
