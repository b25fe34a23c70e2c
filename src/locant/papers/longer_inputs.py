"""The loss past the trained length: how it changes, and against a model without positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from locant.experiments.statistics import estimate
from locant.papers.claim import Cell, Measured, Part, Table
from locant.papers.effects import gain

TISA, NOPE = "tisa:kernels=5", "nope"


def by_length(scores: Mapping[int, Mapping[str, Mapping[int, float]]], asks: Sequence[str]) -> Measured:
    """Returns the change of the loss with the length, given length -> scheme -> seed -> loss; the first is trained."""
    trained, *longer = sorted(scores)
    own = scores[trained]
    parts = [
        Part(asks[0], f"{length // trained} × the trained length",
             gain(scores[length][TISA], own[TISA], higher_is_better=False))
        for length in reversed(longer)  # the longest one is the headline
    ]  # fmt: skip
    parts.append(Part(asks[1], "trained length", gain(own[TISA], own[NOPE], higher_is_better=False)))
    rows: list[tuple[Cell, ...]] = []
    for length in (trained, *longer):
        for scheme, by_seed in scores[length].items():
            if by_seed:
                at, change = (
                    estimate(list(by_seed.values())),
                    estimate(
                        [by_seed[seed] - own[scheme][seed] for seed in sorted(by_seed.keys() & own[scheme].keys())]
                    ),
                )
                rows.append((scheme, length, at.mean, at.low, at.high, change.mean, change.low, change.high))
    header = ("scheme", "length", "loss", "low", "high", "change", "change low", "change high")
    sentences = [
        f"TISA at {part.name}: loss {-part.effect.mean:+.3f} against the trained length." for part in parts[:-1]
    ]
    return Measured(parts, {"lengths": Table(header, rows)}, sentences)
