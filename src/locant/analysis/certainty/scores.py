"""`Scores`: gradients of log-likelihoods by the parameters of a scheme, and the curvature that follows from them.

A score is the gradient g of the log-likelihood of one sequence. Two kinds are collected for each sequence:

drawn      the gradients for outcomes that are drawn from the model's own predictions. Their second moment is the
           Fisher information, which is the Gauss–Newton matrix of these likelihoods: H = Σ_s E[g gᵀ]
observed   the gradients for what was observed. Their covariance from sequence to sequence is J = Σ_s Cov[g].

For a correct likelihood, J = H. The noise scale T = tr(H⁻¹ J) / P is 1 then, and the text has T times the noise of the
likelihood otherwise; a loss that is no log-likelihood has any T. Dividing H by T gives the posterior its correct size
(the magnitude adjustment of Pauli, Racugno and Ventura 2011 for composite likelihoods).

The inverse of a second moment of n draws is too large, on average by n / (n − P − 1) for normal scores (the mean of an
inverse Wishart distribution). The curvature is multiplied by this factor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from locant.analysis.certainty.posterior import Posterior, posterior

ITERATIONS = 10
"""Iterations between the noise scale and the damping; they converge in three or four."""
NOISE = (1e-6, 1e6)
"""The smallest and the largest noise scale."""


@dataclass
class Scores:
    """The scores of one scheme, sequence by sequence."""

    drawn: list[Tensor] = field(default_factory=list)  # each [draws, P]
    observed: list[Tensor] = field(default_factory=list)  # each [P]

    def curvature(self, index: Tensor) -> Tensor:
        """Returns the curvature H of a block of parameters, for all sequences together."""
        draws = self.drawn[0].shape[0]
        rows = torch.cat([each[:, index] for each in self.drawn])
        count, size = rows.shape
        if count < size + 2:
            raise ValueError(f"{count} draws do not determine the curvature of {size} parameters; use more draws")
        return rows.mT @ rows / draws * (count / (count - size - 1))

    def spread(self, index: Tensor) -> Tensor:
        """Returns the covariance J of the observed scores, for all sequences together."""
        rows = torch.stack([each[index] for each in self.observed])
        rows = rows - rows.mean(0)
        return rows.mT @ rows * (len(rows) / (len(rows) - 1))


@dataclass(frozen=True)
class Calibrated:
    """A posterior, and the noise of every block."""

    posterior: Posterior
    noise: tuple[float, ...] | None  # T of each block; None without observed scores


def calibrated(
    scores: Scores, blocks: list[Tensor], learned: Tensor, scale: Tensor, *, factor: float, temper: bool
) -> Calibrated:
    """Returns the posterior.

    factor   multiplies the curvature: how many times as much text as measured the parameters were learned from.
    temper   whether the curvature is divided by the noise scale T.
    """
    curvatures = [scores.curvature(index) for index in blocks]
    noise = [1.0] * len(blocks)

    def tempered(by: list[float]) -> Posterior:
        parts = [(index, h * factor / t) for index, h, t in zip(blocks, curvatures, by, strict=True)]
        return posterior(parts, learned, scale)

    found = tempered(noise)
    if not scores.observed:
        return Calibrated(found, None)
    spreads = [scores.spread(index) for index in blocks]
    for _ in range(ITERATIONS if temper else 1):
        # In determined directions the covariance is T H⁻¹ / factor.
        used = noise if temper else [1.0] * len(blocks)
        noise = [
            _noise(float((block.covariance * spread).sum()) * factor / t, block.determined)
            for block, spread, t in zip(found.blocks, spreads, used, strict=True)
        ]
        found = tempered(noise) if temper else found
    return Calibrated(found, tuple(noise))


def _noise(trace: float, determined: float) -> float:
    """The noise scale of a block; 1 where the text determines nothing."""
    return 1.0 if determined < 1e-6 else min(max(trace / determined, NOISE[0]), NOISE[1])
