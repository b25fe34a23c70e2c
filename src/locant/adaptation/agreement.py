"""How near a changed model is to the original, and the loss that brings it nearer.

Encoders      token states h and pooled vectors u = mean(h) / |mean(h)|
              loss = |u − u′|² + ½ · mean |h − h′|² / mean |h|²       agreement = mean cosine of u and u′
Models that   what they say next, or at a masked token: p
say tokens    loss = KL(p ‖ p′)                                       agreement = how often both say the same first
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.adaptation.windows import Batch
from locant.analysis.text import special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MASKED = 0.15


class Agreement(ABC):
    """What of a model's outputs has to stay as it was."""

    name: str
    rate = 3e-5
    """The learning rate of the weights: post-norm encoders, already trained, do not stand more."""

    def prepare(self, batch: Batch, seed: int) -> Batch:
        """What both models read."""
        return batch

    @abstractmethod
    def outputs(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """What is compared, [B, L, …]."""

    @abstractmethod
    def loss(self, original: Tensor, changed: Tensor, batch: Batch) -> Tensor: ...

    def keep(self, outputs: Tensor) -> Tensor:
        """What of the original's outputs has to be kept to measure by."""
        return outputs

    @abstractmethod
    def measure(self, kept: Tensor, changed: Tensor, batch: Batch) -> tuple[float, int]:
        """The sum of the agreement over what is counted, and how many that are."""


class States(Agreement):
    """Encoders: token states and pooled vectors."""

    name = "cosine of pooled vectors"
    tokens = 0.5
    """Weight of the token states in the loss."""

    def outputs(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        states: Tensor = model.base_model(**batch).last_hidden_state
        return states

    def loss(self, original: Tensor, changed: Tensor, batch: Batch) -> Tensor:
        mask = batch["attention_mask"][..., None].to(original.dtype)
        apart = (pooled(original, mask) - pooled(changed, mask)).square().sum(-1).mean()
        states = ((original - changed).square() * mask).sum() / (original.square() * mask).sum()
        return apart + self.tokens * states

    def measure(self, kept: Tensor, changed: Tensor, batch: Batch) -> tuple[float, int]:
        mask = batch["attention_mask"][..., None].to(kept.dtype)
        cosine = (pooled(kept, mask) * pooled(changed, mask)).sum(-1)
        return float(cosine.sum()), len(cosine)


class Tokens(Agreement):
    """Language models: the distribution over the next token, or over a masked one."""

    name = "same first token"

    def __init__(self, mask_token: int | None = None, special: Collection[int] = ()) -> None:
        self.mask_token, self.special = mask_token, torch.tensor(sorted(special), dtype=torch.long)
        self.rate = 1e-4 if mask_token is None else Agreement.rate

    def prepare(self, batch: Batch, seed: int) -> Batch:
        if self.mask_token is None:
            return batch
        drawn = torch.rand(batch["input_ids"].shape, generator=torch.Generator().manual_seed(seed))
        hidden = (drawn < MASKED).to(batch["input_ids"].device) & batch["attention_mask"].bool()
        hidden &= ~torch.isin(batch["input_ids"], self.special.to(hidden.device))
        return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, self.mask_token)}

    def outputs(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        logits: Tensor = model(**batch).logits
        return logits

    def counted(self, batch: Batch) -> Tensor:
        real = batch["attention_mask"].bool()
        return real if self.mask_token is None else real & (batch["input_ids"] == self.mask_token)

    def loss(self, original: Tensor, changed: Tensor, batch: Batch) -> Tensor:
        kept = self.counted(batch)
        if not kept.any():
            return 0 * changed.sum()
        first, second = (x[kept].float().log_softmax(-1) for x in (original, changed))
        return F.kl_div(second, first, log_target=True, reduction="batchmean")

    def keep(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def measure(self, kept: Tensor, changed: Tensor, batch: Batch) -> tuple[float, int]:
        counted = self.counted(batch)
        same = kept[counted] == changed[counted].argmax(-1)
        return float(same.sum()), len(same)


def agreement_for(model: PreTrainedModel, tokenizer: Any, *, causal: bool) -> Agreement:
    """What matters for a model: what it says, where it says something, else its states."""
    if not says_tokens(model):
        return States()
    if causal:
        return Tokens()
    if tokenizer.mask_token_id is None:
        raise ValueError(f"{type(model).__name__} foretells masked tokens, and its tokenizer has no mask token")
    before, after = special_tokens(tokenizer)
    return Tokens(tokenizer.mask_token_id, {*before, *after})


def says_tokens(model: PreTrainedModel) -> bool:
    """Whether the outputs of a model are scores of tokens."""
    if model is model.base_model or model.get_output_embeddings() is None:
        return False
    with torch.no_grad():
        return "logits" in model(input_ids=torch.tensor([[3, 4]], device=model.device))


def pooled(states: Tensor, mask: Tensor) -> Tensor:
    """[B, d] of length 1: the mean of the states [B, L, d] where the mask [B, L, 1] is 1."""
    return F.normalize((states * mask).sum(1), dim=-1)


@torch.no_grad()
def agree(kind: Agreement, kept: list[Tensor], model: PreTrainedModel, batches: list[Batch]) -> float:
    """Over held-out batches, with what was kept of the original's outputs."""
    from locant.hf.plan import evaluating

    total, count = 0.0, 0
    with evaluating(model):
        for outputs, batch in zip(kept, batches, strict=True):
            found, number = kind.measure(outputs, kind.outputs(model, batch), batch)
            total, count = total + found, count + number
    return total / count
