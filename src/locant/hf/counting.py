"""How models number their tokens when the caller gives no position_ids.

(stack, arguments of its forward, number of cached tokens) -> positions [B or 1, L]; None for 0, 1, 2, …
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Count = Callable[[nn.Module, Mapping[str, Any], Any], "Tensor | None"]


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


def by_mask_of_keys(stack: nn.Module, given: Mapping[str, Any], past: Any) -> Tensor | None:
    """Bloom: masked tokens are not counted and are at 0. The mask of a static cache has columns for tokens to come."""
    ids = by_mask(stack, given, past)
    tokens = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
    return None if ids is None else ids[:, : tokens.shape[1]].clamp(min=0)
