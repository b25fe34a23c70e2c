"""The bidirectional twin of a causal model: the same weights, and a mask that hides nothing.

Setting `is_causal` of its attention does not make one: models also compute a causal mask of their own.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from locant.hf.modes import evaluating


def arguments(base: Any, tokens: Tensor) -> dict[str, Any]:
    """Returns the arguments besides token ids [B, L] with which a model lets every token see all tokens."""
    rows, length = tokens.shape
    given: dict[str, Any] = {
        "attention_mask": torch.ones(rows, 1, length, length, dtype=torch.bool, device=tokens.device)
    }
    if "position_ids" in signature(type(base).forward).parameters:  # OPT would count them in the mask
        given["position_ids"] = torch.arange(length, device=tokens.device).expand_as(tokens)
    return given


def check(base: Any, tokens: Tensor) -> None:
    """Raises ValueError if the first token does not see the last one: GPT-Neo hides the future whatever the mask is."""
    some = tokens[:1]
    other = some.clone()
    other[:, -1] = (some[:, -1] + 1) % base.get_input_embeddings().weight.shape[0]
    given = arguments(base, some)
    with evaluating(base), torch.no_grad():
        before, after = (base(input_ids=ids, **given).last_hidden_state[:, 0] for ids in (some, other))
    if torch.equal(before, after):
        raise ValueError("its first token does not see the last one: the model hides the future itself")
