"""Agreement between a changed model and the original, and the losses that train for it.

Primed symbols belong to the changed model. h are token states, u vectors of length 1 that are pooled as the model pools
(pooling.py), p distributions.

    encoders      loss = |u − u′|² + ½ · mean |h − h′|² / mean |h|²
                  agreement = mean cosine of u and u′
    masked        p: tokens at masked positions
                  loss = KL(p ‖ p′)
                  agreement = share of positions at which both have the same most probable token
    classifiers   p: labels of a text or of every token
                  loss = that of encoders + KL(p ‖ p′)
                  agreement = share of texts or tokens with the same most probable label
    causal        p: next tokens, h_l: states after layer l
                  loss = KL(p ‖ p′) + mean_l |h_l − h_l′|² / |h_l|²
                  agreement = share of positions at which both have the same most probable token
                  KL is computed on every fourth token: the output vocabulary costs more than the layers of a small
                  model
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from locant.adaptation.batch import Batch
from locant.adaptation.windows import Tensors
from locant.analysis.text import special_tokens
from locant.hf.modes import evaluating
from locant.hf.pooling import Pooling, pooling_of
from locant.hf.sentence_folder import SentenceFolder

MASKED_SHARE = 0.15
"""Share of tokens that are masked for a masked language model."""
KL_STRIDE = 4
"""For causal models, KL is computed on every n-th token."""


class Agreement(ABC):
    """What a changed model has to keep: how outputs are computed, compared and trained for."""

    name: str
    learning_rate = 3e-5
    """Learning rate of the model's weights. They are trained already, and larger steps harm them."""

    def prepare(self, batch: Batch, seed: int) -> Batch:
        """Returns the batch that both models get."""
        return batch

    @property
    def short_texts(self) -> bool:
        """Whether outputs for a short text are other than the first outputs for a longer one, in a causal model."""
        return False

    @abstractmethod
    def outputs(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Returns the outputs [B, L, …] that agreement compares."""

    def loss_inputs(self, model: PreTrainedModel, batch: Batch, positions: Tensor | None) -> Tensors:
        """Returns the tensors [B, L, …] that the loss compares; of the first one only `positions`, if given."""
        return (self.outputs(model, batch),)

    def kl_positions(self, batch: Batch) -> Tensor | None:
        """Returns the positions at which the first tensor of `loss_inputs` is compared; None for all."""
        return None

    @abstractmethod
    def loss(self, original: Tensors, changed: Tensors, batch: Batch) -> Tensor:
        """Returns the distillation loss, from the `loss_inputs` of both models."""

    def reduced(self, outputs: Tensor) -> Tensor:
        """Returns the part of the original's outputs that `measure` needs."""
        return outputs

    @abstractmethod
    def measure(self, original: Tensor, changed: Tensor, batch: Batch) -> tuple[float, int]:
        """Returns the sum of the agreement over all items, and their number; `original` is reduced."""


class StateAgreement(Agreement):
    """Encoders: token states and pooled vectors."""

    state_weight = 0.5
    """Weight of the token states in the loss."""

    def __init__(self, pooling: Pooling | None = None) -> None:
        self.pooling = pooling or Pooling()
        self.name = f"cosine of {self.pooling}-pooled vectors"

    @property
    def short_texts(self) -> bool:
        return self.pooling.of_one_token  # where a text ends, its last token may be a special one

    def outputs(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        return self.pooling.of_tokens(model.base_model(**batch).last_hidden_state, batch["attention_mask"])

    def loss_inputs(self, model: PreTrainedModel, batch: Batch, positions: Tensor | None) -> Tensors:
        return self.of_states(model.base_model(**batch).last_hidden_state, batch)

    def of_states(self, states: Tensor, batch: Batch) -> Tensors:
        """Returns the tensors that the loss compares: the contributions of tokens to the pooled vectors, and states."""
        return self.pooling.of_tokens(states, batch["attention_mask"]), states

    def loss(self, original: Tensors, changed: Tensors, batch: Batch) -> Tensor:
        (tokens, first), (other_tokens, second) = original, changed
        mask = batch["attention_mask"]
        vectors = self.pooling.of_text(tokens, mask) - self.pooling.of_text(other_tokens, mask)
        counted = mask[..., None].to(first.dtype)
        states = ((first - second).square() * counted).sum() / (first.square() * counted).sum()
        return vectors.square().sum(-1).mean() + self.state_weight * states

    def measure(self, original: Tensor, changed: Tensor, batch: Batch) -> tuple[float, int]:
        first, second = (self.pooling.of_text(tokens, batch["attention_mask"]) for tokens in (original, changed))
        cosine = (first * second).sum(-1)
        return float(cosine.sum()), len(cosine)


class LabelAgreement(StateAgreement):
    """Classifiers of texts or tokens: labels, token states and pooled vectors.

    If a text is read in windows, each window has a label, weighted by its number of tokens.
    """

    def __init__(self, *, each_token: bool, pad: int | None) -> None:
        super().__init__()
        self.name, self.each_token, self.pad = "same label", each_token, pad

    def prepare(self, batch: Batch, seed: int) -> Batch:
        if self.pad is None:
            return batch
        # Causal classifiers take the logits of the last token that is not the padding token of the config.
        return {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, self.pad)}

    def outputs(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Returns [B, L, labels]; if a text has one label, all of its tokens have it."""
        logits: Tensor = model(**batch).logits
        return logits if self.each_token else logits[:, None].expand(-1, batch["input_ids"].shape[1], -1)

    def loss_inputs(self, model: PreTrainedModel, batch: Batch, positions: Tensor | None) -> Tensors:
        states: list[Tensor] = []
        hook = model.base_model.register_forward_hook(lambda _, args, output: states.append(output.last_hidden_state))
        try:
            logits = self.outputs(model, batch)
            return logits, *self.of_states(states[0], batch)
        finally:
            hook.remove()

    def loss(self, original: Tensors, changed: Tensors, batch: Batch) -> Tensor:
        labels = divergence(original[0], changed[0], batch["attention_mask"].bool())
        return labels + super().loss(original[1:], changed[1:], batch)

    def measure(self, original: Tensor, changed: Tensor, batch: Batch) -> tuple[float, int]:
        real = batch["attention_mask"].bool()
        first, second = (x.softmax(-1) * real[..., None] for x in (original, changed))
        if self.each_token:
            same = (first.argmax(-1) == second.argmax(-1))[real]
        else:
            same = first.sum(1).argmax(-1) == second.sum(1).argmax(-1)
        return float(same.sum()), len(same)


class TokenAgreement(Agreement):
    """Language models: the distribution over tokens at masked positions or, without a mask token, at all positions."""

    name = "same first token"

    def __init__(self, mask_token: int | None = None, special: Collection[int] = ()) -> None:
        self.mask_token, self.special = mask_token, torch.tensor(sorted(special), dtype=torch.long)

    def prepare(self, batch: Batch, seed: int) -> Batch:
        if self.mask_token is None:
            return batch
        drawn = torch.rand(batch["input_ids"].shape, generator=torch.Generator().manual_seed(seed))
        hidden = (drawn < MASKED_SHARE).to(batch["input_ids"].device) & batch["attention_mask"].bool()
        hidden &= ~torch.isin(batch["input_ids"], self.special.to(hidden.device))
        return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, self.mask_token)}

    def outputs(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        logits: Tensor = model(**batch).logits
        return logits

    def counted(self, batch: Batch) -> Tensor:
        """Returns the positions [B, L] that count: no padding and, with a mask token, masked ones only."""
        real = batch["attention_mask"].bool()
        return real if self.mask_token is None else real & (batch["input_ids"] == self.mask_token)

    def loss(self, original: Tensors, changed: Tensors, batch: Batch) -> Tensor:
        return divergence(original[0], changed[0], self.counted(batch))

    def reduced(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def measure(self, original: Tensor, changed: Tensor, batch: Batch) -> tuple[float, int]:
        counted = self.counted(batch)
        same = original[counted] == changed[counted].argmax(-1)
        return float(same.sum()), len(same)


class NextTokenAgreement(TokenAgreement):
    """Causal language models: the next-token distribution at some positions, the states of all layers at all."""

    def loss_inputs(self, model: PreTrainedModel, batch: Batch, positions: Tensor | None) -> Tensors:
        some = positions is not None and "logits_to_keep" in inspect.signature(model.forward).parameters
        only = {"logits_to_keep": positions} if some else {}
        found = model(**batch, **only, output_hidden_states=True)
        logits = found.logits if some or positions is None else found.logits[:, positions]
        # Some models project the last state to another size. For that layer only the logits are compared.
        states = [each for each in found.hidden_states[1:] if each.shape == found.hidden_states[1].shape]
        return logits, torch.stack(states, dim=2)

    def kl_positions(self, batch: Batch) -> Tensor:
        """Returns every fourth position.

        The starting position (0 to 3) is derived from the tokens, so every position is used over time.
        """
        ids = batch["input_ids"]
        return torch.arange(int(ids.sum()) % min(KL_STRIDE, ids.shape[1]), ids.shape[1], KL_STRIDE, device=ids.device)

    def loss(self, original: Tensors, changed: Tensors, batch: Batch) -> Tensor:
        counted = self.counted(batch)
        first, second = original[1][counted], changed[1][counted]  # [tokens, layers, d]
        states = (first - second).square().sum((0, 2)) / first.square().sum((0, 2))
        return divergence(original[0], changed[0], counted[:, self.kl_positions(batch)]) + states.mean()


def divergence(original: Tensor, changed: Tensor, counted: Tensor) -> Tensor:
    """Returns the mean KL(p ‖ p′) of logits [B, L, V] over the counted positions [B, L]; 0 if there are none."""
    if not counted.any():
        return 0 * changed.sum()
    first, second = (x[counted].float().log_softmax(-1) for x in (original, changed))
    return F.kl_div(second, first, log_target=True, reduction="batchmean")


def agreement_for(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    causal: bool,
    source: SentenceFolder | None = None,
    pooling: str | None = None,
) -> Agreement:
    """Returns the agreement that suits a model: tokens or labels if it predicts them, else states.

    source, pooling   say how states are pooled (`pooling_of`).
    """
    found = _head_agreement(model, tokenizer, causal=causal)
    if found is None:
        return StateAgreement(pooling_of(source, pooling))
    if pooling is not None:
        raise ValueError(
            f"{type(model).__name__} has a head, and is compared by {found.name}; pooling is for models without one. "
            f"Leave it out, or pass model.base_model"
        )
    return found


def _head_agreement(model: PreTrainedModel, tokenizer: Any, *, causal: bool) -> Agreement | None:
    """For a model that predicts tokens or labels; None for all others."""
    if not predicts_tokens(model):
        return _label_agreement(model, causal=causal)
    if causal:
        return NextTokenAgreement()
    if tokenizer.mask_token_id is None:
        raise ValueError(
            f"{type(model).__name__} predicts masked tokens, but its tokenizer has no mask token; pass a tokenizer "
            f"that has one"
        )
    before, after = special_tokens(tokenizer)
    return TokenAgreement(tokenizer.mask_token_id, {*before, *after})


def predicts_tokens(model: PreTrainedModel) -> bool:
    """Whether the outputs of a model are logits of tokens."""
    if model is model.base_model or model.get_output_embeddings() is None:
        return False
    with torch.no_grad():
        return "logits" in model(input_ids=torch.tensor([[3, 4]], device=model.device))


def _label_agreement(model: PreTrainedModel, *, causal: bool) -> LabelAgreement | None:
    """For a model whose outputs are logits of two or more labels, of which one is right; None for all others."""
    config: Any = model.config
    if model is model.base_model or getattr(config, "problem_type", None) not in (None, "single_label_classification"):
        return None
    words: Any = model.get_input_embeddings()
    tokens = torch.arange(3, 10, device=model.device)[None] % words.weight.shape[0]
    try:
        with torch.no_grad():
            shape = model(input_ids=tokens).logits.shape
    except (AttributeError, RuntimeError, TypeError, ValueError):  # other outputs, or other inputs
        return None
    each_token = shape == (1, tokens.shape[1], config.num_labels)
    if config.num_labels < 2 or not (each_token or shape == (1, config.num_labels)):
        return None
    pad = getattr(config, "pad_token_id", None)
    if causal and not each_token and pad is None:
        raise ValueError(
            f"{type(model).__name__} needs a padding token to find the last token of a text, but its config has no "
            f"pad_token_id; set model.config.pad_token_id"
        )
    return LabelAgreement(each_token=each_token, pad=pad)


@torch.no_grad()
def mean_agreement(kind: Agreement, original: list[Tensor], model: PreTrainedModel, batches: list[Batch]) -> float:
    """Returns the agreement of a model over batches; `original` are the reduced outputs of the original."""
    total, count = 0.0, 0
    with evaluating(model):
        for outputs, batch in zip(original, batches, strict=True):
            found, number = kind.measure(outputs, kind.outputs(model, batch), batch)
            total, count = total + found, count + number
    return total / count
