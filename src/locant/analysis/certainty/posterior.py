"""The Laplace posterior of a few parameters, with a prior whose width maximizes the evidence. MacKay 1992.

The learned parameters θ̂ are P numbers with characteristic scales s (`Scheme.parameter_scale`). Near θ̂ the logarithm of
the likelihood is a parabola with the curvature H, and the prior is normal:

    log p(text | θ) ≈ const − ½ (θ − θ̂)ᵀ H (θ − θ̂)         θ_i ~ N(0, s_i² / α)

So the posterior is normal, with full covariance. As usual for a Laplace posterior of a trained model, θ̂ stands for its
maximum:

    Λ = H + α diag(s)⁻²        posterior N(θ̂, Λ⁻¹)        γ = tr(H Λ⁻¹) of P parameters are determined

The damping α maximizes the evidence. With λ the eigenvalues of diag(s) H diag(s):

    log p(text | α) = ½ ( P log α − Σ_i log(λ_i + α) − α Σ_i (θ̂_i / s_i)² ) + const        at the maximum α Σ (θ̂/s)² = γ

So the prior is about as wide as the learned parameters are large. A parameter on which the text does not depend
(λ_i = 0) gets the prior. H may be block-diagonal; α is shared by all blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DAMPING = (1e-8, 1e8)
"""The smallest and the largest α: the prior is then 10⁴ times or 10⁻⁴ times as wide as the scale of a parameter."""
GRID = 400
"""Values of α, evenly spaced in log α, among which the search for the maximum starts."""
REFINEMENTS = 50
"""Steps of the golden-section search around the best of them."""
INDEFINITE = 1e-8
"""An eigenvalue below minus this share of the largest one is an error, and not rounding."""


@dataclass(frozen=True)
class Block:
    """The posterior of some of the parameters, which are independent of all others."""

    index: Tensor  # [B], the places of its parameters among all
    covariance: Tensor  # [B, B]
    determined: float  # γ


@dataclass(frozen=True)
class Posterior:
    """The posterior of all parameters of a scheme, in float64."""

    mean: Tensor  # [P]: the learned parameters
    blocks: tuple[Block, ...]
    damping: float  # α
    evidence: float  # its logarithm, without the constant

    @property
    def determined(self) -> float:
        """How many parameters the text determines, γ."""
        return sum(block.determined for block in self.blocks)

    @property
    def covariance(self) -> Tensor:
        """The covariance, [P, P]."""
        covariance = torch.zeros(2 * self.mean.shape, dtype=torch.float64)
        for block in self.blocks:
            covariance[block.index[:, None], block.index[None, :]] = block.covariance
        return covariance

    def variances(self, jacobian: Tensor) -> Tensor:
        """Returns the variances [M] of M quantities whose derivatives by the parameters are `jacobian` [M, P]."""
        total = torch.zeros(jacobian.shape[0], dtype=torch.float64)
        for block in self.blocks:
            part = jacobian[:, block.index]
            total += ((part @ block.covariance) * part).sum(-1)
        return total.clamp(min=0)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Returns random parameters from the posterior, [count, P]."""
        drawn = self.mean.repeat(count, 1)
        for block in self.blocks:
            value, vectors = torch.linalg.eigh(block.covariance)
            noise = torch.randn(count, len(value), generator=generator, dtype=torch.float64)
            drawn[:, block.index] += noise * value.clamp(min=0).sqrt() @ vectors.mT
        return drawn


def posterior(
    curvatures: Sequence[tuple[Tensor, Tensor]], learned: Tensor, scale: Tensor, damping: float | None = None
) -> Posterior:
    """Returns the posterior of parameters.

    curvatures   H, block by block: the places [B] of the parameters of a block, and its curvature [B, B].
    learned      θ̂ [P]
    scale        s [P]
    damping      α; by default the one that maximizes the evidence.

    Raises a ValueError for curvatures that are not finite or not positive semi-definite.
    """
    learned, scale = learned.double(), scale.double()
    solved = [(index, *_eigen(curvature.double(), scale[index])) for index, curvature in curvatures]
    value, size = torch.cat([value for _, value, _ in solved]), float((learned / scale).square().sum())
    alpha = _best(value, size) if damping is None else damping
    blocks = []
    for index, its, vectors in solved:
        turned = scale[index, None] * vectors
        blocks.append(Block(index, turned / (its + alpha) @ turned.mT, float((its / (its + alpha)).sum())))
    at = torch.tensor([alpha], dtype=torch.float64)
    return Posterior(learned, tuple(blocks), alpha, float(evidence(value, size, at)[0]))


def _eigen(curvature: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a curvature in units of the scale; rounding below 0 becomes 0."""
    if not bool(curvature.isfinite().all()):
        raise ValueError("the curvature of the loss has numbers that are not finite; check the weights of the model")
    scaled = scale[:, None] * curvature * scale
    value, vectors = torch.linalg.eigh((scaled + scaled.mT) / 2)
    largest = float(value.abs().max()) if len(value) else 0.0
    if len(value) and float(value[0]) < -INDEFINITE * largest:
        raise ValueError(
            f"the curvature must be positive semi-definite, got eigenvalues from {float(value[0]):g} to {largest:g}; "
            f"use a Gauss-Newton or Fisher matrix, which cannot be negative"
        )
    rounding = torch.finfo(torch.float64).eps * len(value) * largest
    return value.where(value > rounding, 0.0), vectors


def evidence(value: Tensor, size: float, alpha: Tensor) -> Tensor:
    """Returns the logarithm of the evidence for every α [A], without its constant.

    value   [P], the eigenvalues of H in units of the scale.
    size    Σ (θ̂ / s)².
    """
    return (len(value) * alpha.log() - (value + alpha[:, None]).log().sum(-1) - alpha * size) / 2


def _best(value: Tensor, size: float) -> float:
    """The damping with the largest evidence."""
    if not bool((value > 0).any()):
        return 1.0  # nothing is determined: the prior has the scale of the parameters
    low, high = (math.log(each) for each in DAMPING)
    grid = torch.linspace(low, high, GRID, dtype=torch.float64)
    at = int(evidence(value, size, grid.exp()).argmax())
    left, right = float(grid[max(at - 1, 0)]), float(grid[min(at + 1, GRID - 1)])
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(REFINEMENTS):
        inner = torch.tensor([right - ratio * (right - left), left + ratio * (right - left)], dtype=torch.float64)
        first, second = evidence(value, size, inner.exp()).tolist()
        left, right = (left, float(inner[1])) if first >= second else (float(inner[0]), right)
    return math.exp((left + right) / 2)
