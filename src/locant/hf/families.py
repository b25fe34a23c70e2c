"""The families of models that can be swapped. Add a family here: one record in FAMILIES.

A record holds where the layers are, how positions enter, and how the model numbers tokens without position_ids. What
is not listed is found by running the model (`finding`).
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from locant.hf.counting import by_mask, by_token
from locant.hf.family import Family, Seam, after_padding, two_stacks
from locant.hf.mechanisms import (
    Bias,
    CarriedTable,
    IndexedTable,
    Patches,
    RelativeLogits,
    Rotary,
    Table,
    TableAfterPadding,
    TableAfterTwo,
)
from locant.hf.mechanisms.relative_logits import convolved
from locant.hf.seams.families import SEAM_FAMILIES, SEAMS

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
    "inkling_text": Family(RelativeLogits(), convolved=convolved, ignores_ids=True),
    **SEAM_FAMILIES,
}

OUTSIDE = "its attention does not go through transformers' attention interface, so it would ignore the scheme"
REFUSED: dict[str, str] = {
    "fastspeech2_conformer": OUTSIDE,
    "lilt": "it has a second position table, for the layout of a page, and two attentions that share their logits",
    "bros": "the boxes of its words enter the logits of every pair of tokens; locant cannot combine them with a scheme",
    "convbert": "half of its heads are convolutions over neighbouring tokens, which padding reaches",
    "cpmant": "its biases are those of pairs of segments as well as of distances",
    "prophetnet": "its decoder runs several streams of queries at once, each with biases that depend on the text",
    "pegasus_x": "its encoder attends to a block of tokens and to global tokens, and has no logits for all pairs",
}


def refusal(model: PreTrainedModel) -> str | None:
    """Returns why a model cannot be swapped, where its config says so; None if it must be tried."""
    config: Any = model.config
    kind = config.model_type
    if kind in ("big_bird", "bigbird_pegasus") and config.attention_type != "original_full":
        return (
            f"attention_type={config.attention_type!r} has no logits for all pairs of tokens. Open the model with "
            f"attention_type='original_full'"
        )
    if kind == "ibert" and config.quant_mode:
        return "with quant_mode=True its softmax is one of whole numbers. Open the model with quant_mode=False"
    return REFUSED.get(kind)


def seam_of(model: PreTrainedModel) -> Seam | None:
    """Returns the seam of a model; None if its attention goes through transformers' interface by itself."""
    kind = model.config.model_type
    return FAMILIES[kind].seam if kind in FAMILIES else SEAMS.get(kind)
