"""The loss of the next token at several lengths, on the same tokens. For stories.py and causal.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

BATCH_TOKENS = 2048
"""Tokens of a batch: with a vocabulary of 262,144 words their logits take 2 GB."""


def pieces(tokens: torch.Tensor, length: int, lengths: Sequence[int], begin: int) -> torch.Tensor:
    """Returns [n, length]: a begin token and the tokens after it. All lengths get the same tokens but for 0.3 %."""
    longest = max(lengths) - 1
    parts = tokens[: len(tokens) // longest * longest].view(-1, longest)
    each = longest // (length - 1)
    rows = parts[:, : each * (length - 1)].reshape(-1, length - 1)
    return torch.cat([torch.full((len(rows), 1), begin), rows], 1)


@torch.no_grad()
def loss(model: Any, rows: torch.Tensor) -> float:
    """Returns the mean loss over all tokens but the first of each row, in nats."""
    total, count = 0.0, 0
    for part in rows.split(max(1, BATCH_TOKENS // rows.shape[1])):
        logits = model(input_ids=part, use_cache=False).logits[:, :-1]
        total += float(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
        count += part[:, 1:].numel()
    return total / count
