"""The families of models that can be swapped. Add a family here: one record in FAMILIES.

A record holds where the layers are, how positions enter, and how the model numbers tokens without position_ids. For a
model that is not listed `family_of` tries generic rules; if none fits, the model is refused by name.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from locant.hf.counting import by_mask, by_token
from locant.hf.family import Family, after_padding, two_stacks
from locant.hf.mechanisms import (
    Bias,
    CountingTable,
    Patches,
    Rotary,
    Table,
    TableAfterPadding,
    TableAfterTwo,
)
from locant.hf.seams.families import SEAM_FAMILIES

BERT = Family(Table("embeddings.position_embeddings"))
ROBERTA = Family(TableAfterPadding("embeddings.position_embeddings"), count=by_token, shift=after_padding)
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
    **SEAM_FAMILIES,
}

OUTSIDE = "its attention does not go through transformers' attention interface, so it would ignore the scheme"
REFUSED: dict[str, str] = {
    "longformer": OUTSIDE,
    "lilt": "it has a second position table, for the layout of a page, and two attentions that share their logits",
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
                return Family(TableAfterPadding(path), count=by_token, shift=after_padding)
    raise NotImplementedError(
        f"locant does not know {kind} models, and no generic rule fits: the model has neither rotary_emb nor a table "
        f"of positions in a known place. Known families: {', '.join(FAMILIES)}"
    )
