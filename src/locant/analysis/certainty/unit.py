"""`Unit`: a scheme with parameters in a model, and what was measured of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from locant.analysis.certainty.flat import Flat
from locant.analysis.certainty.scores import Scores
from locant.schemes import Scheme


@dataclass
class Unit:
    """A scheme with parameters, and where it is."""

    place: str
    scheme: Scheme
    flat: Flat
    blocks: list[Tensor]
    pairs: Tensor  # [2 L − 1]: visible pairs of tokens at offsets −(L − 1) … L − 1
    scores: Scores = field(default_factory=Scores)

    @property
    def largest(self) -> int:
        """Parameters of the largest block."""
        return max(len(block) for block in self.blocks)

    def information(self, observations: int) -> Tensor:
        """Returns the curvature of the loss per observation, with zeros between blocks."""
        found = torch.zeros(2 * self.flat.learned.shape, dtype=torch.float64)
        for index in self.blocks:
            found[index[:, None], index[None, :]] = self.scores.curvature(index) / observations
        return found


def add(units: list[Unit], scores: list[tuple[Tensor, Tensor]]) -> None:
    """Adds the drawn and the observed scores of one sequence to their units."""
    for unit, (drawn, observed) in zip(units, scores, strict=True):
        unit.scores.drawn.append(drawn)
        unit.scores.observed.append(observed)
