"""The proof of an exact export: the stock model computes what the swapped one does.

Random tokens, at three lengths, without padding and with padding on either side. The largest difference between the
outputs of tokens that are not padding is divided by the largest output.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from locant.exporting.refusal import CannotExport
from locant.exporting.stock import Stock
from locant.hf.modes import evaluating

TOLERANCE = 1e-5
"""Largest difference, relative to the size of the outputs."""
LENGTHS = (5, 33, 300)
"""Tokens of the sequences, or fewer if a model reads fewer."""
ROTARY_LENGTHS = (5, 17, 40)
"""The same for rotary models. Transformers rounds the angle p · speed to float32; at p = 300 the outputs of random
models differ by more than TOLERANCE for that reason alone."""
ROWS = 3
"""Sequences of a batch. All but the first are shorter by a few tokens, and padded."""


def token_batches(model: PreTrainedModel, longest: int | None, lengths: tuple[int, ...] = LENGTHS) -> list[Any]:
    """Returns pairs of random tokens and masks [B, L]: for every length without padding, padded right, padded left."""
    random = torch.Generator().manual_seed(0)
    words: Any = model.get_input_embeddings()
    known, pad = words.weight.shape[0], getattr(model.config, "pad_token_id", None) or 0
    usable = torch.tensor([token for token in range(known) if token != pad])
    found = []
    for length in sorted({length if longest is None else min(length, longest) for length in lengths}):
        ids = usable[torch.randint(len(usable), (ROWS, length), generator=random)]
        found.append((ids, torch.ones_like(ids)))
        for left in (False, True):
            mask = torch.ones_like(ids)
            for row in range(1, ROWS):
                hidden = min(2 * row, length - 1)
                mask[row, :hidden] = 0
                mask[row] = mask[row] if left else mask[row].flip(0)
            found.append((ids.masked_fill(mask == 0, pad), mask))
    return [tuple(x.to(model.device) for x in pair) for pair in found]


def outputs(model: PreTrainedModel, ids: Tensor, mask: Tensor, **others: Any) -> Tensor:
    """Returns the logits of a model, or its last hidden states if it has no head; [B, L, …] or [B, …]."""
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=mask, **others)
    for name in ("logits", "start_logits", "last_hidden_state"):
        if name in found:
            tensor: Tensor = found[name]
            return tensor
    raise CannotExport(f"{type(model).__name__} returns neither logits nor hidden states")


def difference(model: PreTrainedModel, stock: Stock) -> float:
    """Returns the largest difference of the outputs of two models, relative to the largest output."""
    first, second = wide(model), wide(stock.model)
    largest, size = 0.0, 0.0
    with evaluating(first), evaluating(second):
        for ids, mask in token_batches(first, stock.length, ROTARY_LENGTHS if stock.rounded_angles else LENGTHS):
            expected = outputs(first, ids, mask)
            other = stock.ids(ids)
            given = {}
            if stock.counts_left_padding and not bool(mask[:, 0].all()):
                given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
            got = outputs(second, other, mask, **given)
            if got.ndim >= 2 and got.shape[:2] == mask.shape:
                expected, got = expected[mask.bool()], got[mask.bool()]
            elif not bool(mask[:, 0].all()):
                continue  # one output for a text, made of its first token, which is padding here
            if got.shape[-1] == first.config.vocab_size and got.shape[-1] > 1:
                got = got[..., other_order(stock, got.shape[-1], got.device)]
            largest = max(largest, float((expected - got).abs().max()))
            size = max(size, float(expected.abs().max()))
    return largest / max(size, 1e-30)


def prove(model: PreTrainedModel, stock: Stock) -> float:
    """Returns the difference of two models; raises CannotExport if it is larger than TOLERANCE."""
    found = difference(model, stock)
    if not found <= TOLERANCE:
        raise CannotExport(
            f"{type(stock.model).__name__} does not compute the same: its outputs differ by {found:.1e} of their size, "
            f"and at most {TOLERANCE:.0e} is allowed. Nothing was written"
        )
    return found


def wide(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a model that computes in float32 or wider; half precision would hide what differs."""
    return model if model.dtype in (torch.float32, torch.float64) else copy.deepcopy(model).float()


def other_order(stock: Stock, size: int, device: Any) -> Tensor:
    """Returns for every token id of the swapped model the id that the stock model has for it."""
    return stock.ids(torch.arange(size, device=device))
