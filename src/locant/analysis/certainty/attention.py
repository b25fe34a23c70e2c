"""The likelihood of attention weights: the one that `locant.fit` maximizes.

Every query i of a head is one observation: a key j, drawn with the attention weights p_i of the original. Under the
scheme with parameters θ its log-likelihood is log w_ij(θ), with w_i = softmax(ℓ_i(θ)). The expectation over j,

    Σ_i Σ_j p_ij log w_ij(θ) = − Σ_i KL(p_i ‖ w_i) + const,

is what a fit maximizes. The observed gradient is Σ_i Σ_j (p_ij − w_ij) ∂ℓ_ij/∂θ; for a key that is drawn from w, p is 1
at that key and 0 elsewhere. The inputs of a layer are held constant, so heads that share no parameters are independent.

That a query is *one* observation is a convention: p_i is known exactly, and queries of a text resemble each other. So
the noise scale T is estimated from the original's weights. Without an original T = 1, and the widths of all intervals
are right up to one factor per head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locant.analysis.certainty.flat import Flat
from locant.attention import eager
from locant.attention.request import Request, prepare
from locant.hf.call import AttentionCall
from locant.schemes import Scheme


def request_of(call: AttentionCall, scheme: Scheme) -> Request:
    """Returns the request of a call on the CPU in float64, with a copy of its scheme that is there too."""
    if call.sinks is not None or scheme.reads:
        what = "attention with sinks" if call.sinks is not None else f"{scheme}, which reads hidden states"
        raise NotImplementedError(
            f"certainty by attention weights does not know {what}; use likelihood='tokens' with a model that predicts "
            f"tokens"
        )
    given = call.arguments()
    q, k, v = (given[name].detach().cpu().double() for name in ("q", "k", "v"))
    q_pos, k_pos, mask = (None if given[name] is None else given[name].cpu() for name in ("q_pos", "k_pos", "mask"))
    return prepare(
        q, k, v, scheme, q_pos=q_pos, k_pos=k_pos, mask=mask, causal=given["causal"], scale=given["scale"],
        softcap=given["softcap"],
    )  # fmt: skip


def log_weights(request: Request) -> tuple[Tensor, Tensor]:
    """Returns the logits [B, H, Lq, Lk], and the logarithms of the weights: −∞ at hidden keys."""
    logit, visible = eager.logits(request), request.visible()
    hidden = logit if visible is None else logit.masked_fill(~visible, -torch.inf)
    return logit, hidden.log_softmax(-1)


def weights(request: Request) -> Tensor:
    """Returns the attention weights [B, H, Lq, Lk]; a query without a visible key has zeros."""
    return log_weights(request)[1].exp().nan_to_num(0.0)


def scores(
    flat: Flat, request: Request, draws: int, generator: torch.Generator, goal: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns the drawn scores [draws, P] of a request, and the observed one [P] if `goal` has the original's weights.

    The request has `flat.scheme`, and was made with gradients enabled.
    """
    logit, log = log_weights(request)
    known = log.detach().exp().nan_to_num(0.0)
    if not bool(known.isfinite().all()) or not bool((known.sum(-1) > 0).any()):
        raise ValueError("the attention weights contain NaN; check the weights of the model")
    rows = known.flatten(0, 2)
    usable = rows.sum(-1) > 0
    keys = torch.zeros(len(rows), draws, dtype=torch.long)
    keys[usable] = torch.multinomial(rows[usable], draws, replacement=True, generator=generator)
    found = []
    for draw in range(draws):
        chosen = torch.zeros_like(rows).scatter_(1, keys[:, draw : draw + 1], 1.0)
        found.append(flat.score(logit, ((chosen - rows) * usable[:, None]).view_as(known)))
    observed = (
        None
        if goal is None
        else flat.score(logit, (goal.cpu().double() - known) * usable.view(known.shape[:3])[..., None])
    )
    return torch.stack(found), observed
