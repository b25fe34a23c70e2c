"""The likelihood of sentence vectors, for encoders that were distilled from an original.

u(θ) is the mean of the last hidden states of a sequence, divided by its length: what an encoder returns for a text
unless it pools otherwise. Its distance from the vector u° of the original is a part of the loss of `locant.adapt`. As a
likelihood:

    u° ~ N(u(θ), σ² I)        log p = − |u° − u(θ)|² / (2 σ²) + const        σ² = mean squared residual per coordinate

The observed gradient is (∂u/∂θ)ᵀ (u° − u) / σ², and a drawn one is (∂u/∂θ)ᵀ ε / σ with ε ~ N(0, I); the curvature is
Σ_s (∂u/∂θ)ᵀ (∂u/∂θ) / σ². The residuals are neither normal nor independent from coordinate to coordinate, so the noise
scale T is applied too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from locant.analysis.certainty.gradients import gradients
from locant.schemes import Scheme


def vector(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Returns the vector [d] of a sequence ids [1, L]."""
    return F.normalize(model.base_model(input_ids=ids).last_hidden_state[0].float().mean(0), dim=0)


def scores(
    schemes: list[Scheme], found: Tensor, goal: Tensor, draws: int, generator: torch.Generator
) -> list[tuple[Tensor, Tensor]]:
    """Returns the drawn scores [draws, P] and the observed one [P] of each scheme, for σ = 1, from vectors [d]."""
    if not bool(found.detach().isfinite().all()):
        raise ValueError("the outputs of the model contain NaN or infinity; check its weights")
    parameters = [list(scheme.parameters()) for scheme in schemes]
    noise = torch.randn(draws, len(found), generator=generator).to(found.device)
    rows = [gradients(found, parameters, each) for each in (*noise, goal - found.detach())]
    return [(torch.stack([each[n] for each in rows[:-1]]), rows[-1][n]) for n in range(len(schemes))]
