"""Batches of token sequences, as models take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

Batch = dict[str, Tensor]
"""The keyword arguments of a model: input_ids and attention_mask, both [B, L]."""


def padded(rows: list[list[int]], tokenizer: Any) -> Batch:
    """Returns token sequences as one batch, padded on the right; with token 0 if the tokenizer has no padding token."""
    length, pad = max(map(len, rows)), tokenizer.pad_token_id or 0
    return {
        "input_ids": torch.tensor([row + [pad] * (length - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows]),
    }


def to_device(batch: Batch, model: PreTrainedModel) -> Batch:
    """Returns the batch on the device of a model."""
    return {name: value.to(model.device) for name, value in batch.items()}
