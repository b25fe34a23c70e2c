"""The families of models that can be swapped. Add a family here: one record in FAMILIES.

A record holds where the layers are, how positions enter, and how the model numbers tokens without position_ids. What
is not listed is found by running the model (`finding`).
"""

from __future__ import annotations

from transformers import PreTrainedModel

from locant.hf.counting import by_mask, by_token
from locant.hf.family import Family, Seam, after_padding, two_stacks
from locant.hf.mechanisms import (
    Bias,
    CarriedTable,
    IndexedTable,
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
    "bart": Family(CarriedTable("embed_positions", row=2), stacks=two_stacks),
    "ctrl": Family(IndexedTable("pos_encoding")),
    "vit": Family(Patches()),
    **SEAM_FAMILIES,
}

OUTSIDE = "its attention does not go through transformers' attention interface, so it would ignore the scheme"
REFUSED: dict[str, str] = {
    "longformer": OUTSIDE,
    "lilt": "it has a second position table, for the layout of a page, and two attentions that share their logits",
}


def seam_of(model: PreTrainedModel) -> Seam | None:
    """Returns the seam of a model; None if its attention goes through transformers' interface by itself."""
    family = FAMILIES.get(model.config.model_type)
    return None if family is None else family.seam
