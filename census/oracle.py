"""ALiBi by hand: the original model without its positions, with the bias in its attention mask.

transformers' attention takes a mask [B, heads, L, L] that is added to the logits. The own positions go away if every
token is at position 0 and every table of positions is zero. What is left must be what `swap(model, "alibi")` gives,
and no line of locant took part in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from census.models import is_table, output
from census.names import DECODER
from census.sizes import WINDOW
from census.subject import LENGTH, TOLERANCE, Subject, difference

TABLES = ("position", "wpe", "embed_pos", "relative_attention_bias")
"""Parts of the names of tables of positions."""
CHOSEN = ("index_topk", "topk_blocks")
"""How many keys, or blocks of keys, sparse attention chooses."""


def alibi(heads: int) -> Tensor:
    """Returns the bias of Press et al., −slope · |i − j| with slopes 2^(−8 h / heads), h = 1, 2, …: [heads, L, L]."""
    slopes = torch.tensor([2 ** (-8 * (head + 1) / heads) for head in range(heads)])
    at = torch.arange(LENGTH)
    return -slopes[:, None, None] * (at[None, :] - at[:, None]).abs()


def _masks(bias: Tensor, *, causal: bool) -> list[Any]:
    """The bias in the masks that a model may take: all tokens, a window of them, or one or the other by layer."""
    r = torch.arange(LENGTH)[None, :] - torch.arange(LENGTH)[:, None]  # key − query
    never = torch.finfo(bias.dtype).min
    full = (bias.masked_fill(r > 0, never) if causal else bias).expand(2, -1, -1, -1)
    near = full.masked_fill(r <= -WINDOW if causal else r.abs() > WINDOW, never)
    return [full, near, {"full_attention": full, "sliding_attention": near}]


def all_keys(model: PreTrainedModel) -> PreTrainedModel:
    """Lets sparse attention choose all keys. Its choice adds up the mask, so a bias there would change it."""
    for module in model.modules():
        for name in CHOSEN:
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, LENGTH)
    return model


@torch.no_grad()
def _without_positions(model: PreTrainedModel) -> PreTrainedModel:
    for name, module in model.named_modules():
        if is_table(module) and any(part in name for part in TABLES):
            module.weight.zero_()
    for name, buffer in model.named_buffers():
        if name.endswith("pos_encoding"):  # CTRL's table
            buffer.zero_()
    return model


def _changes_masks(subject: Subject) -> bool:
    """Whether a bias in the mask does not reach the softmax as it is, or position 0 changes queries.

    CodeGen divides the mask together with the logits. RoFormer's table has cos in it, which is 1 without positions. A
    softcap comes before the mask and after a scheme. YaRN's factor on attention belongs to the rotation, and stays at
    position 0.
    """
    config = subject.original.config.get_text_config()
    factors = [getattr(module, "attention_scaling", 1.0) for module in subject.original.modules()]
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return subject.architecture.name in ("codegen", "roformer") or capped or any(factor != 1.0 for factor in factors)


def by_hand(subject: Subject) -> Tensor | None:
    """Returns the output with ALiBi; None if the model does not take such a mask, or keeps its positions."""
    heads = getattr(subject.original.config.get_text_config(), "num_attention_heads", None)
    causal = subject.architecture.kind == DECODER
    if not isinstance(heads, int) or subject.two_stacks or _changes_masks(subject):
        return None
    zeros: dict[str, Any] = {}
    if subject.takes("position_ids"):
        zeros["position_ids"] = torch.zeros(2, LENGTH, dtype=torch.long)
    original, bare = all_keys(subject.fresh()), all_keys(_without_positions(subject.fresh()))
    plain = subject.run(original)
    masks = _masks(torch.zeros(heads, LENGTH, LENGTH), causal=causal)
    for mask, with_bias in zip(masks, _masks(alibi(heads), causal=causal), strict=True):
        try:
            same = output(original, subject.given(subject.ids, mask))
            none = output(bare, subject.given(subject.ids, mask, **zeros))
            if difference(same, plain) < TOLERANCE < difference(none, plain):
                return output(bare, subject.given(subject.ids, with_bias, **zeros))
        except Exception:  # noqa: PERF203 - whatever a model raises, it does not take this mask
            continue
    return None
