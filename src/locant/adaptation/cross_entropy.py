"""Attention weights of the original, and how far a scheme is from reproducing them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from locant.adaptation.queries import QueryMap
from locant.attention import eager
from locant.attention.request import Request, prepare
from locant.hf.call import AttentionCall
from locant.hf.listening import observing
from locant.hf.swapping import native_as_schemes
from locant.schemes.base import Scheme


def cross_entropy(
    scheme: Scheme | None, requests: list[Request], goal: list[Tensor], query_map: QueryMap | None = None
) -> Tensor:
    """Returns [H], the mean over queries of −Σ p ln softmax(ℓ), which is KL(p ‖ softmax(ℓ)) plus the entropy of p.

    goal   the attention weights p [B, H, Lq, Lk] of each request.

    With gradients enabled, it also adds the gradients of the sum over heads to the parameters, batch by batch.
    """
    queries = sum(p.shape[0] * p.shape[2] for p in goal)
    total: Tensor = torch.zeros(goal[0].shape[1], device=goal[0].device)
    for request, p in zip(requests, goal, strict=True):
        log = _log_weights(request, scheme, query_map)
        log = log.masked_fill(p == 0, 0.0)  # masked pairs have −∞ and must not count
        loss = -(p * log).sum((0, 2, 3)) / queries
        if torch.is_grad_enabled():
            loss.sum().backward()
        total = total + loss.detach()
    return total


def entropy(goal: list[Tensor]) -> Tensor:
    """Returns [H], the mean over queries of −Σ p ln p: the minimum of the cross-entropy."""
    queries = sum(p.shape[0] * p.shape[2] for p in goal)
    return -torch.stack([torch.xlogy(p, p).sum((0, 2, 3)) for p in goal]).sum(0) / queries


def _log_weights(request: Request, scheme: Scheme | None, query_map: QueryMap | None = None) -> Tensor:
    """[B, H, Lq, Lk], the logarithms of the attention weights of a request with another scheme."""
    if request.sinks is not None:  # the weights of a query then sum to less than 1, and KL needs that of the sink too
        raise NotImplementedError(
            "cannot fit a scheme to attention with sinks: the fit compares weights that sum to 1; train the swapped "
            "model instead"
        )
    if scheme is not None and scheme.reads:
        raise NotImplementedError(
            f"cannot fit {scheme}, or fit another scheme to it: it reads hidden states, which the fit does not keep; "
            f"swap the model and train it instead"
        )
    q_pos, k_pos = request.positions or (None, None)
    where: Any = {"q_pos": q_pos, "k_pos": k_pos, "mask": request.mask, "causal": request.causal,
                  "softcap": request.softcap}  # fmt: skip
    q = request.q if query_map is None else query_map(request.q)
    logit = eager.logits(prepare(q, request.k, request.v, scheme, scale=request.scale, **where))
    visible = request.visible()
    return (logit if visible is None else logit.masked_fill(~visible, -torch.inf)).log_softmax(-1)


def attention_weights(model: PreTrainedModel, batches: list[Tensor]) -> dict[str, list[Tensor]]:
    """Returns the attention weights [B, H, L, L] of every call of each attention, by the name of the module."""
    names = {module: name for name, module in model.base_model.named_modules()}
    found: dict[str, list[Tensor]] = {}

    def record(call: AttentionCall) -> None:
        if call.scheme is not None:
            request = call.request()
            found.setdefault(names[call.module], []).append(_log_weights(request, request.scheme).exp())

    with native_as_schemes(model), observing(before=record):
        for rows in batches:
            model.base_model(input_ids=rows)
    return found
