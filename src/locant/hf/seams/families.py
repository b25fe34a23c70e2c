"""The families that need a seam. Keys are `config.model_type`.

`SEAM_FAMILIES` are records, which `locant.hf.families` adds to the others. `SEAMS` are seams alone: how positions enter
these families is found by running the model through its seam.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from locant.hf.counting import by_cell, by_mask_of_keys, by_token
from locant.hf.family import Family, Seam, after_padding, two_stacks
from locant.hf.mechanisms import (
    CarriedTableAfterPadding,
    Choice,
    Disentangled,
    FalconBias,
    LinearBias,
    Mechanism,
    ProjectedSinusoids,
    Rotary,
    RotaryTable,
    SharedRotaryTable,
    Table,
    TableAfterPadding,
    TableAndBias,
)
from locant.hf.seams import bart, deberta, inner, linear, longformer, textbook, xlm, xlnet

TABLE = "embeddings.position_embeddings"


def falcon(stack: nn.Module) -> Mechanism:
    """Falcon's positions: ALiBi (the RW models) or rotary."""
    return FalconBias() if stack.config.alibi else Rotary()  # type: ignore[union-attr]


def falcon_count(stack: nn.Module, given: Mapping[str, Any], past: Any) -> Tensor | None:
    """Falcon counts the tokens that the mask shows for ALiBi, and by index to rotate."""
    return by_mask_of_keys(stack, given, past) if stack.config.alibi else None  # type: ignore[union-attr]


SEAM_FAMILIES: dict[str, Family] = {
    "mpnet": Family(
        TableAndBias(TABLE), count=by_token, shift=after_padding, attention_by_index=True, seam=textbook.MPNET
    ),
    "rembert": Family(Table(TABLE), seam=textbook.REMBERT),
    "megatron-bert": Family(Table(TABLE), seam=textbook.MEGATRON_BERT),
    "squeezebert": Family(Table(TABLE), seam=textbook.SQUEEZEBERT),
    "luke": Family(TableAfterPadding(TABLE), count=by_token, shift=after_padding, seam=textbook.LUKE),
    "roformer": Family(SharedRotaryTable(), seam=textbook.ROFORMER),
    "gpt_neo": Family(Table("wpe"), seam=inner.GPT_NEO),
    "imagegpt": Family(Table("wpe"), seam=inner.IMAGEGPT),
    "gptj": Family(RotaryTable(), seam=inner.GPTJ),
    "codegen": Family(RotaryTable(), seam=inner.CODEGEN),
    "gpt_neox_japanese": Family(Rotary(), seam=inner.GPT_NEOX_JAPANESE),
    "bloom": Family(LinearBias(), count=by_mask_of_keys, seam=linear.BLOOM),
    "mpt": Family(LinearBias(forward=linear.two_dimensional_masks), seam=linear.MPT),
    "falcon": Family(Choice(falcon, "rotary or bias"), count=falcon_count, seam=linear.FALCON),
    "deberta": Family(Disentangled(), seam=deberta.V1),
    "deberta-v2": Family(Disentangled(), seam=deberta.V2),
    "xlnet": Family(ProjectedSinusoids(), seam=xlnet.XLNET),
    "fsmt": Family(CarriedTableAfterPadding("embed_positions"), stacks=two_stacks, count=by_token, seam=bart.FSMT),
    "tapas": Family(Table(TABLE), count=by_cell, seam=textbook.TAPAS),
}

SEAMS: dict[str, Seam] = {
    "xglm": bart.XGLM,
    "mvp": bart.MVP,
    "led": longformer.LED,
    "longformer": longformer.LONGFORMER,
    "trocr": bart.TROCR,
    "clvp_decoder": bart.CLVP,
    "xlm": xlm.XLM,
    "flaubert": xlm.FLAUBERT,
    "openai-gpt": inner.OPENAI_GPT,
    "semantic": inner.BARK,
    "coarse_acoustics": inner.BARK,
    "big_bird": textbook.BIG_BIRD,
    "bigbird_pegasus": textbook.BIGBIRD_PEGASUS,
    "blip_text_model": textbook.BLIP_TEXT,
    "visual_bert": textbook.VISUAL_BERT,
    "ibert": textbook.IBERT,
}
