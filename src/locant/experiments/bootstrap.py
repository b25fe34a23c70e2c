"""The noise of a test set: how far a score would move with other examples of the same kind, by a bootstrap.

The examples are drawn again, with replacement, as many as there are. The standard deviation of the score over such
draws is its standard error. Intervals over seeds do not contain this: all seeds are tested on the same examples.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

DRAWS = 200
"""Draws of the examples. The standard error is then known to about 5 %."""
FEW = 5000
"""With more examples the noise is small, and drawing them takes time."""


def test_noise(scores: Callable[[list[int]], Mapping[str, float]], count: int) -> dict[str, float]:
    """Returns the standard error of each score; nothing for one example, or more than FEW.

    scores   from the numbers of examples to scores by name; a ValueError means that they have none.
    """
    if not 2 <= count <= FEW:
        return {}
    generator = torch.Generator().manual_seed(0)
    drawn: list[Mapping[str, float]] = []
    for numbers in torch.randint(count, (DRAWS, count), generator=generator).tolist():
        try:
            drawn.append(scores(numbers))
        except ValueError:  # noqa: PERF203 - such as a correlation of equal numbers
            continue
    if len(drawn) < DRAWS // 2:
        return {}
    return {name: statistics.stdev(each[name] for each in drawn) for name in drawn[0]}
