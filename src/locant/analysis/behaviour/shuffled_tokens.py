"""`shuffle`: the value of word order to a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from locant.analysis.behaviour.running import (
    check_length,
    checked,
    has_head,
    losses,
    pooled,
    shuffled,
    standard_error,
    vocabulary,
)
from locant.hf.facts import is_causal, layer_stack
from locant.hf.modes import evaluating


@dataclass(frozen=True)
class Shuffle:
    """The effect of shuffled tokens. `change` is shuffled − plain; compare it with `scale`."""

    kind: str  # "loss" or "embedding"
    plain: float  # the loss in order; 0 for an embedding
    shuffled: float  # the loss after a shuffled prefix; ‖e′ − e‖ / ‖e‖ for an embedding
    change: float
    error: float  # standard error of the change, over sequences
    scale: float  # loss: log of the vocabulary, a uniform guess; embedding: ‖e′ − e‖ / ‖e‖ for another text
    note: str


@torch.no_grad()
def shuffle(
    model: PreTrainedModel, ids: Tensor, *, targets: int = 1, keep: int = 1, draws: int = 4, seed: int = 0
) -> Shuffle:
    """Returns the effect of shuffling the tokens: a mean over `draws` shuffles.

    For a causal language model this is the loss of the last `targets` tokens when the tokens before them are shuffled;
    for any other, the change of the mean-pooled last hidden states. The first `keep` tokens keep their places ([CLS],
    <s>), and in an encoder so do the last `keep` ([SEP]).
    """
    ids = checked(model, ids, sequences=2, length=2 * keep + targets + 2)
    if bool((ids == ids[:, :1]).all()):
        raise ValueError("the tokens of each sequence are all the same, so shuffling changes nothing; pass a real text")
    generator = torch.Generator().manual_seed(seed)
    check_length(model, ids.shape[1])
    with evaluating(model):
        causal = is_causal(model, ids)
        if causal and has_head(model):
            return _by_loss(model, ids, targets, keep, draws, generator)
        stack = layer_stack(model)
        plain = pooled(stack, ids)
        orders = [shuffled(ids, keep, ids.shape[1] - keep, generator) for _ in range(draws)]
        norm = plain.norm(dim=-1)
        change = torch.stack([(pooled(stack, order) - plain).norm(dim=-1) / norm for order in orders]).mean(0)
        other = (plain.roll(1, 0) - plain).norm(dim=-1) / norm
    note = "causal, but without a head for language modelling: this is its embedding" if causal else ""
    value = float(change.mean())
    return Shuffle("embedding", 0.0, value, value, standard_error(change), float(other.mean()), note)


def _by_loss(
    model: PreTrainedModel, ids: Tensor, targets: int, keep: int, draws: int, generator: torch.Generator
) -> Shuffle:
    plain = losses(model, ids, targets)
    orders = [shuffled(ids, keep, ids.shape[1] - targets, generator) for _ in range(draws)]
    mixed = torch.stack([losses(model, order, targets) for order in orders]).mean(0)
    change, uniform = mixed - plain, math.log(vocabulary(model))
    return Shuffle(
        "loss", float(plain.mean()), float(mixed.mean()), float(change.mean()), standard_error(change), uniform, ""
    )
