"""`share`: the share of the variance of hidden states that is due to position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from locant.analysis.behaviour.decomposition import decompose
from locant.analysis.behaviour.running import check_length, checked, finite, run, shuffled
from locant.hf.facts import layer_stack
from locant.hf.modes import evaluating


@dataclass(frozen=True)
class Share:
    """Shares of the variance of hidden states; they add up to 1. A share that is 0 is measured as a number around 0."""

    layer: int  # 0: the embeddings
    position: float
    error: float  # standard error of `position`: jackknife over sequences
    sequence: float  # common to all tokens of a text
    rest: float
    shuffled: float  # `position` again, with the tokens of every text in random order
    shuffled_error: float
    variance: float  # the total, summed over coordinates

    @property
    def interval(self) -> tuple[float, float]:
        """`position` ± 2 standard errors."""
        return self.position - 2 * self.error, self.position + 2 * self.error


@torch.no_grad()
def share(model: PreTrainedModel, ids: Tensor, *, seed: int = 0) -> list[Share]:
    """Returns the share of the variance of hidden states that is due to position, for the embeddings and each layer.

    The control runs the model on the same tokens in random order within each text. Tokens that mostly occur at certain
    places ([CLS] at 0) count as position in `position`, but not in `shuffled`.
    """
    ids = checked(model, ids, sequences=3, length=3)
    check_length(model, ids.shape[1])
    stack = layer_stack(model)
    mixed = shuffled(ids, 0, ids.shape[1], torch.Generator().manual_seed(seed))
    with evaluating(model):
        plain = run(stack, ids, output_hidden_states=True).hidden_states
        control = run(stack, mixed, output_hidden_states=True).hidden_states
    rows = []
    for layer, (hidden, other) in enumerate(zip(plain, control, strict=True)):
        one, two = decompose(finite(hidden)), decompose(finite(other))
        rows.append(
            Share(layer, one.position, one.error, one.sequence, one.rest, two.position, two.error, one.variance)
        )
    return rows
