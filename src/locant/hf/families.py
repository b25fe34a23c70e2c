"""The models we know: where their layers are, how positions get in, how tokens are numbered by default.

One record per family. What is not listed is tried by a generic rule (`family_of`), and refused by name if none fits.
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
    """0, 1, 2, …, padding or not."""
    return None


def by_token(stack: nn.Module, given: Mapping[str, Any], past: Any) -> Tensor | None:
    """RoBERTa: padding tokens are not counted, wherever they are; they stand where their index is."""
    ids = given.get("input_ids")
    if ids is None:
        return None
    real = ids.ne(stack.config.pad_token_id)  # type: ignore[union-attr]
    by_place = torch.arange(ids.shape[-1], device=ids.device) - real.int().argmax(-1, keepdim=True)
    counted: Tensor = torch.where(real, real.cumsum(-1) - 1, by_place) + past
    return counted


def by_mask(stack: nn.Module, given: Mapping[str, Any], past: Any) -> Tensor | None:
    """OPT: masked tokens are not counted (they get −1)."""
    mask = given.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return None
    ids: Tensor = mask.long().cumsum(-1) * mask.long() - 1
    return ids[:, past:]


def whole(base: nn.Module) -> list[str]:
    """The base model runs the layers itself."""
    return [""]


def two_stacks(base: nn.Module) -> list[str]:
    """Encoder and decoder; one of them by itself is one stack."""
    return [name for name in ("encoder", "decoder") if isinstance(getattr(base, name, None), nn.Module)] or [""]


@dataclass(frozen=True)
class Seam:
    """Makes the attention of a base model go through the interface, and undoes it."""

    open: Callable[[nn.Module], None]
    close: Callable[[nn.Module], None]


@dataclass(frozen=True)
class Family:
    mechanism: Mechanism
    stacks: Callable[[nn.Module], list[str]] = whole
    count: Callable[[nn.Module, Mapping[str, Any], Any], Tensor | None] = by_index
    shift: Callable[[nn.Module], int] = lambda stack: 0
    """What the caller's position_ids begin at."""
    seam: Seam | None = None
    """For models whose attention does not go through transformers' interface by itself."""


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

OUTSIDE = "its attention does not go through transformers' attention interface, so that no scheme would be used"
REFUSED: dict[str, str] = {
    "bloom": OUTSIDE,
    "mpt": OUTSIDE,
    "deberta": OUTSIDE,
    "deberta-v2": OUTSIDE,
    "xlnet": OUTSIDE,
    "longformer": OUTSIDE,
}


def family_of(model: PreTrainedModel) -> Family:
    """The record of a model, or a rule that fits it; NotImplementedError with the reason if there is neither."""
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
            if padding == model.config.pad_token_id:  # as in RoBERTa, tokens are counted from the row after it
                after = TableAfterPadding(path)
                return Family(after, count=by_token, shift=after.first)
    raise NotImplementedError(
        f"{kind} models are not known to locant, and no rule fits: there is neither rotary_emb nor a table of "
        f"positions where one is expected. Known: {', '.join(FAMILIES)}"
    )
