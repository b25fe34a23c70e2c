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

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from locant.analysis.certainty.gradients import gradients, gradients_of
from locant.analysis.certainty.unit import Unit, add
from locant.hf.encoder import encoder_of
from locant.hf.interrupts import check
from locant.hf.modes import evaluating
from locant.schemes import Scheme

NO_DIFFERENCE = 1e-12
"""Mean squared residual below which a model returns the vectors of the original, up to rounding."""


def vector(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Returns the vector [d] of a sequence ids [1, L]."""
    return F.normalize(model.base_model(input_ids=ids).last_hidden_state[0].float().mean(0), dim=0)


def observe(
    model: PreTrainedModel, units: list[Unit], ids: Tensor, draws: int, generator: torch.Generator,
    *, original: PreTrainedModel,
) -> int:  # fmt: skip
    """Collects scores by the vectors of sequences; returns the number of sequences."""
    schemes = [unit.scheme for unit in units]
    square, numbers = 0.0, 0
    with encoder_of(original) as part, evaluating(part), gradients_of(model, schemes):
        for row in ids:
            check()
            with torch.no_grad():
                goal = vector(part, row[None].to(part.device)).to(model.device)
            found = vector(model, row[None])
            if goal.shape != found.shape:
                raise ValueError(
                    f"the vectors of the original have {len(goal)} numbers, and those of the model {len(found)}; pass "
                    f"the model that this one was made from"
                )
            square, numbers = square + float((goal - found.detach()).square().sum()), numbers + len(goal)
            add(units, scores(schemes, found, goal, draws, generator))
    variance = square / numbers
    if variance < NO_DIFFERENCE:
        raise ValueError("the model returns the vectors of the original; there is no difference to measure noise by")
    for unit in units:
        unit.scores.drawn = [each / math.sqrt(variance) for each in unit.scores.drawn]
        unit.scores.observed = [each / variance for each in unit.scores.observed]
    return len(ids)


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
