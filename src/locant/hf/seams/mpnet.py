"""MPNet's seam: its attention does not go through transformers' interface; while the seam is open, it does.

`open_seam` gives every self-attention a forward that calls `interface.attention`. `close_seam` restores the model as
transformers made it.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention

from locant.hf import interface
from locant.hf.methods import replace_method


def _attention_forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
    q, k, v = (layer(hidden_states).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
    given: dict[str, Any] = {"output_attentions": output_attentions}
    if interface.scheme_of(self) is None:
        given["transformers_attention"] = _own_attention
    out, weights = interface.attention(
        self, q, k, v, attention_mask, scaling=self.attention_head_size**-0.5,
        dropout=self.dropout.p if self.training else 0.0, position_bias=position_bias, **given,
    )  # fmt: skip
    found: Tensor = self.o(out.flatten(2))
    return (found, weights) if output_attentions and weights is not None else (found,)


def _own_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, dropout: float,
    position_bias: Tensor | None = None, **others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What MPNet computes by itself, in the same order, so that a model that is not swapped has the same outputs."""
    logits = query @ key.mT / math.sqrt(query.shape[-1])
    for part in (position_bias, mask):
        logits = logits if part is None else logits + part
    weights = F.dropout(logits.softmax(-1), dropout, training=dropout > 0)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def open_seam(base: nn.Module) -> None:
    """Makes the attention of a base model go through `interface.attention`."""
    for module in base.modules():
        if isinstance(module, MPNetSelfAttention):
            replace_method(module, "forward", _attention_forward)
            module.__dict__["is_causal"] = False


def close_seam(base: nn.Module) -> None:
    """Undoes `open_seam`."""
    for module in base.modules():
        if isinstance(module, MPNetSelfAttention):
            module.__dict__.pop("forward", None)
            module.__dict__.pop("is_causal", None)
