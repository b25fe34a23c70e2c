"""Batches of token sequences, as models take them."""

from __future__ import annotations

from collections.abc import Sequence
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


def grouped(rows: Sequence[list[int]], most: int) -> list[list[int]]:
    """Returns the numbers of token sequences in groups of similar length, the shortest first.

    A group has at most `most` tokens with its padding; a longer sequence is a group of its own.
    """
    groups: list[list[int]] = [[]]
    for number in sorted(range(len(rows)), key=lambda number: len(rows[number])):
        if groups[-1] and (len(groups[-1]) + 1) * len(rows[number]) > most:
            groups.append([])
        groups[-1].append(number)
    return groups if groups[0] else []


def to_device(batch: Batch, model: PreTrainedModel) -> Batch:
    """Returns the batch on the device of a model."""
    return {name: value.to(model.device) for name, value in batch.items()}
