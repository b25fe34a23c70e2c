"""`length`: the effect of longer inputs on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from locant.analysis.behaviour.running import (
    check_length,
    checked,
    finite,
    has_head,
    losses,
    pooled,
    run,
    standard_error,
    vocabulary,
)
from locant.hf.facts import is_causal, layer_stack, limits
from locant.hf.modes import evaluating


@dataclass(frozen=True)
class Length:
    """Inputs of `length` tokens."""

    length: int
    kind: str  # "loss" or "embedding"
    value: float  # mean loss of the target tokens, or the cosine with the embedding of the shortest input
    error: float  # standard error over sequences
    scale: float  # loss: log of the vocabulary; embedding: the cosine with the shortest input of another text
    tokens: int  # that the loss or the embedding is computed from: the same for every length
    note: str


@torch.no_grad()
def length(model: PreTrainedModel, ids: Tensor, lengths: Sequence[int]) -> list[Length]:
    """Returns the effect of longer inputs, on the same tokens for every length, so that only the length differs.

    For a causal language model this is the loss of the last tokens of `ids` (half the length of the shortest input)
    when the input is the last n tokens. For any other, the first tokens of `ids` (the length of the shortest input) are
    pooled, and a row has the cosine between their embedding in an input of n tokens and in the shortest.
    """
    if not lengths or min(lengths) < 4:
        raise ValueError(f"lengths must be 4 tokens or more; got {list(lengths)}")
    ids = checked(model, ids, sequences=2, length=max(lengths))
    limit, trained = limits(model)
    rows = []
    shortest = min(lengths)
    check_length(model, shortest)
    with evaluating(model):
        by_loss = is_causal(model, ids[:, :shortest]) and has_head(model)
        stack, kind = layer_stack(model), "loss" if by_loss else "embedding"
        tokens = shortest // 2 if by_loss else shortest
        scale, before = math.log(vocabulary(model)), torch.empty(0)
        if not by_loss:
            before = pooled(stack, ids[:, :shortest])
            scale = float(F.cosine_similarity(before, before.roll(1, 0)).mean())
        for n in lengths:
            note = ""
            if limit is not None and n > limit:
                note = f"not run: the model has {limit} positions"
                rows.append(Length(n, kind, math.nan, math.nan, scale, tokens, note))
                continue
            if trained is not None and n > trained:
                note = f"past the {trained} positions of the config"
            if by_loss:
                values = losses(model, ids[:, -n:], tokens)
            else:
                hidden = finite(run(stack, ids[:, :n]).last_hidden_state)
                values = F.cosine_similarity(hidden[:, :shortest].mean(1), before)
            rows.append(Length(n, kind, float(values.mean()), standard_error(values), scale, tokens, note))
    return rows
