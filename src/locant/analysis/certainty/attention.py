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
from transformers import PreTrainedModel

from locant.analysis.certainty.flat import Flat
from locant.analysis.certainty.unit import Unit
from locant.attention import eager
from locant.attention.request import Request, prepare
from locant.hf.call import AttentionCall
from locant.hf.encoder import encoder_of
from locant.hf.interrupts import check
from locant.hf.listening import observing
from locant.hf.swapping import native_as_schemes
from locant.schemes import Scheme

NO_DIFFERENCE = 1e-5
"""Largest difference between the weights of two models that rounding alone makes, in float32."""


def observe(
    model: PreTrainedModel, units: list[Unit], ids: Tensor, draws: int, generator: torch.Generator,
    *, original: PreTrainedModel | None,
) -> int:  # fmt: skip
    """Collects scores by attention weights; returns the number of queries of each head."""
    of = {unit.scheme: unit for unit in units}
    names = {module: name for name, module in model.base_model.named_modules()}
    goals: dict[str, list[Tensor]] = {}
    now: dict[Scheme, list[tuple[Tensor, Tensor | None]]] = {}
    count, apart = 0, 0.0

    def record(call: AttentionCall) -> None:
        nonlocal count, apart
        unit = of.get(call.scheme) if call.scheme is not None else None
        if unit is None:
            return
        with torch.enable_grad():
            request = request_of(call, unit.flat.scheme)
            goal = None
            if original is not None:
                goal = goals[names[call.module]].pop(0)
                apart = max(apart, _apart(request, goal))
            its = scores(unit.flat, request, draws, generator, goal)
        now.setdefault(unit.scheme, []).append(its)
        count += call.query.shape[2] if unit is units[0] else 0

    for row in ids:
        check()
        if original is not None:
            goals = _goals(original, row[None])
            missing = {names[m] for m in names if getattr(m, "locant", None) in of} - goals.keys()
            if missing:
                raise ValueError(
                    f"the original has no attention {sorted(missing)[0]}; pass the model that this one was made from"
                )
        now.clear()
        with observing(before=record), torch.no_grad():
            model.base_model(input_ids=row[None])
        for scheme, found in now.items():
            collected = of[scheme].scores
            collected.drawn.append(torch.stack([drawn for drawn, _ in found]).sum(0))
            if original is not None:
                observed = [each for _, each in found if each is not None]
                collected.observed.append(torch.stack(observed).sum(0))
    if original is not None and apart < NO_DIFFERENCE:
        raise ValueError(
            "the model has the attention weights of the original; there is no difference to measure noise by. Leave "
            "original out"
        )
    return count


def _apart(request: Request, goal: Tensor) -> float:
    """The largest difference between the attention weights of a request and those of the original."""
    with torch.no_grad():
        own = weights(request)
    if own.shape != goal.shape:
        raise ValueError(
            f"the attention weights of the original are {list(goal.shape)} ([1, heads, queries, keys]), and those of "
            f"the model {list(own.shape)}; pass the model that this one was made from"
        )
    return float((own - goal.cpu().double()).abs().max())


@torch.no_grad()
def _goals(original: PreTrainedModel, ids: Tensor) -> dict[str, list[Tensor]]:
    """The attention weights of every call of each attention of the original, by the name of the module."""
    with encoder_of(original) as part, native_as_schemes(part):
        names = {module: name for name, module in part.base_model.named_modules()}
        found: dict[str, list[Tensor]] = {}

        def record(call: AttentionCall) -> None:
            if call.scheme is not None:
                found.setdefault(names[call.module], []).append(weights(call.request()))

        with observing(before=record):
            part.base_model(input_ids=ids.to(part.device))
    return found


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
        check()
        chosen = torch.zeros_like(rows).scatter_(1, keys[:, draw : draw + 1], 1.0)
        found.append(flat.score(logit, ((chosen - rows) * usable[:, None]).view_as(known)))
    observed = (
        None
        if goal is None
        else flat.score(logit, (goal.cpu().double() - known) * usable.view(known.shape[:3])[..., None])
    )
    return torch.stack(found), observed
