"""How models number their tokens when the caller gives no position_ids.

(stack, arguments of its forward, number of cached tokens) -> positions [B or 1, L]; None for 0, 1, 2, …

A token that has no position, such as padding, gets −1.
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
    """RoBERTa: padding tokens are not counted, wherever they are."""
    ids = given.get("input_ids")
    if ids is None:
        return None
    real = ids.ne(stack.config.pad_token_id)  # type: ignore[union-attr]
    counted: Tensor = torch.where(real, real.cumsum(-1) - 1 + past, -1)
    return counted


def by_mask(stack: nn.Module, given: Mapping[str, Any], past: Any) -> Tensor | None:
    """OPT: masked tokens are not counted."""
    mask = given.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return None
    ids: Tensor = mask.long().cumsum(-1) * mask.long() - 1
    return ids[:, past:]


def by_mask_of_keys(stack: nn.Module, given: Mapping[str, Any], past: Any) -> Tensor | None:
    """Bloom: masked tokens are not counted. The mask of a static cache has columns for tokens to come."""
    ids = by_mask(stack, given, past)
    tokens = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
    return None if ids is None else ids[:, : tokens.shape[1]]


def by_cell(stack: nn.Module, given: Mapping[str, Any], past: Any) -> Tensor | None:
    """TAPAS: tokens are counted from the first one of their cell, which token_type_ids name by column and row.

    The question, and padding, are in column 0 and row 0. Without token_type_ids there are no cells.
    """
    config: Any = stack.config
    types = given.get("token_type_ids")
    if types is None or not config.reset_position_index_per_cell:
        return None
    cells = types[..., 1] * config.type_vocab_sizes[2] + types[..., 2]
    places = torch.arange(cells.shape[1], device=cells.device).expand_as(cells)
    same = cells[:, :, None] == cells[:, None]
    first = torch.where(same, places[:, None], cells.shape[1]).amin(-1)
    counted: Tensor = (places - first).clamp(max=config.max_position_embeddings - 1)
    return counted


def in_attention(counted: Tensor, past: Any) -> Tensor:
    """Returns positions for attention, where every token needs one.

    A token without a position gets its distance from the first token that has one, as if padding were counted.
    """
    real = counted >= 0
    by_place = torch.arange(counted.shape[-1], device=counted.device) - real.int().argmax(-1, keepdim=True) + past
    return torch.where(real, counted, by_place)


COUNTS: dict[str, Count] = {"by_index": by_index, "by_token": by_token, "by_mask": by_mask}
"""The rules by name."""
