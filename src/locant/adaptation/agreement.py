"""How near a changed model is to the original, and the loss that brings it nearer.

Encoders      token states h and pooled vectors u = mean(h) / |mean(h)|
              loss = |u − u′|² + ½ · mean |h − h′|² / mean |h|²       agreement = mean cosine of u and u′
Masked        what they say at a masked token: p
              loss = KL(p ‖ p′)                                       agreement = how often both say the same first
Classifiers   token states and pooled vectors as above, and the labels p of a text or of every token
              loss = that of encoders + KL(p ‖ p′)                    agreement = how often both say the same label
Causal        what they say next, p, and the states h_l of every layer
              loss = KL(p ‖ p′) + mean_l |h_l − h_l′|² / |h_l|²       agreement = how often both say the same first
              The divergence is that of one token in four: a vocabulary costs more than the layers of a small model.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.adaptation.windows import Batch, Tensors
from locant.analysis.text import special_tokens
from locant.hf.modes import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MASKED = 0.15
SAID = 4
"""Of so many tokens one is held to what the original says next."""
Lesson = Tensors
"""What a model is held to, or says: tensors [B, L, …]."""


class Agreement(ABC):
    """What of a model's outputs has to stay as it was."""

    name: str
    rate = 3e-5
    """The learning rate of the weights: those that are trained already do not stand more."""

    def prepare(self, batch: Batch, seed: int) -> Batch:
        """What both models read."""
        return batch

    @abstractmethod
    def outputs(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """What agreement is measured by, [B, L, …]."""

    def lesson(self, model: PreTrainedModel, batch: Batch, places: Tensor | None) -> Lesson:
        """What the loss compares; of the first tensor the places alone, [B, places, …]."""
        return (self.outputs(model, batch),)

    def places(self, batch: Batch) -> Tensor | None:
        """Where the first tensor of a lesson is compared; None for everywhere."""
        return None

    @abstractmethod
    def loss(self, original: Lesson, changed: Lesson, batch: Batch) -> Tensor: ...

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

    def loss(self, original: Lesson, changed: Lesson, batch: Batch) -> Tensor:
        (first,), (second,) = original, changed
        mask = batch["attention_mask"][..., None].to(first.dtype)
        apart = (pooled(first, mask) - pooled(second, mask)).square().sum(-1).mean()
        states = ((first - second).square() * mask).sum() / (first.square() * mask).sum()
        return apart + self.tokens * states

    def measure(self, kept: Tensor, changed: Tensor, batch: Batch) -> tuple[float, int]:
        mask = batch["attention_mask"][..., None].to(kept.dtype)
        cosine = (pooled(kept, mask) * pooled(changed, mask)).sum(-1)
        return float(cosine.sum()), len(cosine)


class Labels(States):
    """Classifiers of texts or tokens: what they say, and the states they say it by.

    Of a text that is read in windows each window says a label, and counts as much as it is long.
    """

    name = "same label"

    def __init__(self, *, each_token: bool, pad: int | None) -> None:
        self.each_token, self.pad = each_token, pad

    def prepare(self, batch: Batch, seed: int) -> Batch:
        if self.pad is None:
            return batch
        # Causal classifiers look for the last token that is not this one.
        return {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, self.pad)}

    def outputs(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """[B, L, labels]; the label of a text is that of each of its tokens."""
        logits: Tensor = model(**batch).logits
        return logits if self.each_token else logits[:, None].expand(-1, batch["input_ids"].shape[1], -1)

    def lesson(self, model: PreTrainedModel, batch: Batch, places: Tensor | None) -> Lesson:
        states: list[Tensor] = []
        heard = model.base_model.register_forward_hook(lambda _, args, output: states.append(output.last_hidden_state))
        try:
            return self.outputs(model, batch), states[0]
        finally:
            heard.remove()

    def loss(self, original: Lesson, changed: Lesson, batch: Batch) -> Tensor:
        said = divergence(original[0], changed[0], batch["attention_mask"].bool())
        return said + super().loss(original[1:], changed[1:], batch)

    def measure(self, kept: Tensor, changed: Tensor, batch: Batch) -> tuple[float, int]:
        real = batch["attention_mask"].bool()
        first, second = (x.softmax(-1) * real[..., None] for x in (kept, changed))
        if self.each_token:
            same = (first.argmax(-1) == second.argmax(-1))[real]
        else:
            same = first.sum(1).argmax(-1) == second.sum(1).argmax(-1)
        return float(same.sum()), len(same)


class Tokens(Agreement):
    """What a language model says: the distribution over tokens, at those that are masked or, without a mask, at all."""

    name = "same first token"

    def __init__(self, mask_token: int | None = None, special: Collection[int] = ()) -> None:
        self.mask_token, self.special = mask_token, torch.tensor(sorted(special), dtype=torch.long)

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

    def loss(self, original: Lesson, changed: Lesson, batch: Batch) -> Tensor:
        return divergence(original[0], changed[0], self.counted(batch))

    def keep(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def measure(self, kept: Tensor, changed: Tensor, batch: Batch) -> tuple[float, int]:
        counted = self.counted(batch)
        same = kept[counted] == changed[counted].argmax(-1)
        return float(same.sum()), len(same)


class Next(Tokens):
    """Causal language models: the distribution over the next token at some places, the states of layers at all."""

    def lesson(self, model: PreTrainedModel, batch: Batch, places: Tensor | None) -> Lesson:
        some = places is not None and "logits_to_keep" in inspect.signature(model.forward).parameters
        only = {"logits_to_keep": places} if some else {}
        found = model(**batch, **only, output_hidden_states=True)
        logits = found.logits if some or places is None else found.logits[:, places]
        states = [each for each in found.hidden_states[1:] if each.shape == found.hidden_states[1].shape]
        return logits, torch.stack(states, dim=2)  # where the last is projected to another size, its logits say it all

    def places(self, batch: Batch) -> Tensor:
        """Every fourth token, from one of the first four on, whichever the tokens say: all have their turn."""
        ids = batch["input_ids"]
        return torch.arange(int(ids.sum()) % min(SAID, ids.shape[1]), ids.shape[1], SAID, device=ids.device)

    def loss(self, original: Lesson, changed: Lesson, batch: Batch) -> Tensor:
        counted = self.counted(batch)
        first, second = original[1][counted], changed[1][counted]  # [tokens, layers, d]
        states = (first - second).square().sum((0, 2)) / first.square().sum((0, 2))
        return divergence(original[0], changed[0], counted[:, self.places(batch)]) + states.mean()


def divergence(original: Tensor, changed: Tensor, counted: Tensor) -> Tensor:
    """KL(p ‖ p′) by logits [B, L, V], on average over what is counted, [B, L]; 0 if that is nothing."""
    if not counted.any():
        return 0 * changed.sum()
    first, second = (x[counted].float().log_softmax(-1) for x in (original, changed))
    return F.kl_div(second, first, log_target=True, reduction="batchmean")


def agreement_for(model: PreTrainedModel, tokenizer: Any, *, causal: bool) -> Agreement:
    """What matters for a model: what it says, where it says something, else its states."""
    if not says_tokens(model):
        return _labels(model, causal=causal) or States()
    if causal:
        return Next()
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


def _labels(model: PreTrainedModel, *, causal: bool) -> Labels | None:
    """For a model whose outputs are scores of two labels or more, of which one is right."""
    config: Any = model.config
    if model is model.base_model or getattr(config, "problem_type", None) not in (None, "single_label_classification"):
        return None
    words: Any = model.get_input_embeddings()
    tokens = torch.arange(3, 10, device=model.device)[None] % words.weight.shape[0]
    try:
        with torch.no_grad():
            shape = model(input_ids=tokens).logits.shape
    except (AttributeError, RuntimeError, TypeError, ValueError):  # it says something else, or wants something else
        return None
    each_token = shape == (1, tokens.shape[1], config.num_labels)
    if config.num_labels < 2 or not (each_token or shape == (1, config.num_labels)):
        return None
    pad = getattr(config, "pad_token_id", None)
    if causal and not each_token and pad is None:
        raise ValueError(
            f"{type(model).__name__} looks for the last token before the padding, and its config has no pad_token_id; "
            f"set model.config.pad_token_id"
        )
    return Labels(each_token=each_token, pad=pad)


def pooled(states: Tensor, mask: Tensor) -> Tensor:
    """[B, d] of length 1: the mean of the states [B, L, d] where the mask [B, L, 1] is 1."""
    return F.normalize((states * mask).sum(1), dim=-1)


@torch.no_grad()
def agree(kind: Agreement, kept: list[Tensor], model: PreTrainedModel, batches: list[Batch]) -> float:
    """Over held-out batches, with what was kept of the original's outputs."""
    total, count = 0.0, 0
    with evaluating(model):
        for outputs, batch in zip(kept, batches, strict=True):
            found, number = kind.measure(outputs, kind.outputs(model, batch), batch)
            total, count = total + found, count + number
    return total / count
