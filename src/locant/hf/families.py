"""The families of models that can be swapped. Add a family here: one record in FAMILIES.

A record holds where the layers are, how positions enter, and how the model numbers tokens without position_ids. For a
model that is not listed `family_of` tries generic rules; if none fits, the model is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.hf import mpnet
from locant.hf.mechanisms import (
    Bias,
    CountingTable,
    Mechanism,
    Patches,
    Rotary,
    Table,
    TableAfterPadding,
    TableAfterTwo,
    TableAndBias,
)


def by_index(stack: nn.Module, given: Mapping[str, Any], past: Any) -> Tensor | None:
    """Numbers tokens 0, 1, 2, …, padding included."""
    return None


def by_token(stack: nn.Module, given: Mapping[str, Any], past: Any) -> Tensor | None:
    """RoBERTa: padding tokens are not counted, wherever they are; their own position is their index."""
    ids = given.get("input_ids")
    if ids is None:
        return None
    real = ids.ne(stack.config.pad_token_id)  # type: ignore[union-attr]
    by_place = torch.arange(ids.shape[-1], device=ids.device) - real.int().argmax(-1, keepdim=True)
    counted: Tensor = torch.where(real, real.cumsum(-1) - 1, by_place) + past
    return counted


def by_mask(stack: nn.Module, given: Mapping[str, Any], past: Any) -> Tensor | None:
    """OPT: masked tokens are not counted; their own position is −1."""
    mask = given.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return None
    ids: Tensor = mask.long().cumsum(-1) * mask.long() - 1
    return ids[:, past:]


def whole(base: nn.Module) -> list[str]:
    """The base model runs the layers itself."""
    return [""]


def two_stacks(base: nn.Module) -> list[str]:
    """Encoder and decoder; either of them alone is one stack."""
    return [name for name in ("encoder", "decoder") if isinstance(getattr(base, name, None), nn.Module)] or [""]


@dataclass(frozen=True)
class Seam:
    """Makes the attention of a base model go through the interface, and undoes it."""

    open: Callable[[nn.Module], None]
    close: Callable[[nn.Module], None]


@dataclass(frozen=True)
class Family:
    """How one family of models handles positions."""

    mechanism: Mechanism
    stacks: Callable[[nn.Module], list[str]] = whole
    count: Callable[[nn.Module, Mapping[str, Any], Any], Tensor | None] = by_index
    shift: Callable[[nn.Module], int] = lambda stack: 0
    """The number that the caller's position_ids start at."""
    seam: Seam | None = None
    """For models whose attention does not go through transformers' attention interface."""


BERT = Family(Table("embeddings.position_embeddings"))
AFTER_PADDING = TableAfterPadding("embeddings.position_embeddings")
ROBERTA = Family(AFTER_PADDING, count=by_token, shift=AFTER_PADDING.first)
BESIDE_BIAS = TableAndBias("embeddings.position_embeddings")
ROTARY = Family(Rotary())
T5 = Family(Bias(), stacks=two_stacks)

FAMILIES: dict[str, Family] = {
    "bert": BERT,
    "albert": BERT,
    "electra": BERT,
    "distilbert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "mpnet": Family(BESIDE_BIAS, count=by_token, shift=BESIDE_BIAS.first, seam=Seam(mpnet.open_seam, mpnet.close_seam)),
    "modernbert": ROTARY,
    "gpt2": Family(Table("wpe")),
    "opt": Family(TableAfterTwo("embed_positions"), stacks=two_stacks, count=by_mask),
    "gpt_neox": ROTARY,
    "llama": ROTARY,
    "mistral": ROTARY,
    "qwen2": ROTARY,
    "qwen3": ROTARY,
    "gemma": ROTARY,
    "phi": ROTARY,
    "t5": T5,
    "mt5": T5,
    "bart": Family(CountingTable("embed_positions"), stacks=two_stacks),
    "vit": Family(Patches()),
}

OUTSIDE = "its attention does not go through transformers' attention interface, so it would ignore the scheme"
REFUSED: dict[str, str] = {
    "bloom": OUTSIDE,
    "mpt": OUTSIDE,
    "deberta": OUTSIDE,
    "deberta-v2": OUTSIDE,
    "xlnet": OUTSIDE,
    "longformer": OUTSIDE,
}


def family_of(model: PreTrainedModel) -> Family:
    """Returns the record of a model's family, or of a generic rule that fits; otherwise NotImplementedError."""
    kind = model.config.model_type
    if kind in REFUSED:
        raise NotImplementedError(f"{kind} models cannot be swapped: {REFUSED[kind]}")
    if kind in FAMILIES:
        return FAMILIES[kind]
    base = model.base_model
    if isinstance(getattr(base, "rotary_emb", None), nn.Module):
        return Family(Rotary(layout=None))
    tables = {name for name, module in base.named_modules() if type(module) is nn.Embedding}
    for path in ("embeddings.position_embeddings", "wpe", "embed_positions"):
        if path in tables:
            padding: Any = base.get_submodule(path).padding_idx
            if padding is None:
                return Family(Table(path))
            if padding == model.config.pad_token_id:  # as in RoBERTa: tokens are counted from the row after padding
                after = TableAfterPadding(path)
                return Family(after, count=by_token, shift=after.first)
    raise NotImplementedError(
        f"locant does not know {kind} models, and no generic rule fits: the model has neither rotary_emb nor a table "
        f"of positions in a known place. Known families: {', '.join(FAMILIES)}"
    )
