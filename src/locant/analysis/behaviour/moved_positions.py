"""`shift`: the change of the hidden states when every position moves by the same amount."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.analysis.behaviour.running import check_length, checked, finite, run
from locant.hf.facts import first_position, layer_stack, limits, takes_position_ids
from locant.hf.modes import evaluating


@dataclass(frozen=True)
class Shift:
    """Every position moved by `by`. relative = 0 and cosine = 1: the model ignores where a text begins."""

    by: int
    relative: float  # ‖h′ − h‖ / ‖h‖ over all tokens
    cosine: float  # between h′ and h, mean over tokens
    how: str  # "position_ids" or "left padding"
    note: str


@torch.no_grad()
def shift(
    model: PreTrainedModel, ids: Tensor, by: Sequence[int] = (1, 2, 5, 16, 64, 256), *, start: int = 0
) -> list[Shift]:
    """Returns the change of the last hidden states when every position moves by s: one row for each s of `by`.

    It passes position_ids where the model accepts them, and otherwise s masked padding tokens on the left. Every shift
    leaves position 0 without a token, and many models treat position 0 unlike any other (MiniLM on English: a change of
    0.73 for one step from 0, of 0.16 for one step from 1). `start` is the position of the first token before the shift.
    """
    ids = checked(model, ids, sequences=1, length=2)
    if any(step < 1 for step in by) or start < 0:
        raise ValueError(f"by must hold numbers of 1 or more, and start must be 0 or more; got {list(by)} and {start}")
    stack, offset = layer_stack(model), first_position(model)
    limit, trained = limits(model)
    check_length(model, start + ids.shape[1])
    takes = takes_position_ids(model)
    how = "position_ids" if takes else "left padding"
    rows = []
    with evaluating(model):
        plain = _moved(model, stack, ids, offset, start, takes)
        for step in by:
            end, note = start + step + ids.shape[1], ""
            if limit is not None and end > limit:
                note = f"not run: position {end - 1} is past the last one, {limit - 1}"
                rows.append(Shift(step, math.nan, math.nan, how, note))
                continue
            if trained is not None and end > trained:
                note = f"past the {trained} positions of the config"
            moved = _moved(model, stack, ids, offset, start + step, takes)
            relative = float((moved - plain).norm() / plain.norm())
            cosine = float(F.cosine_similarity(moved, plain, dim=-1).mean())
            rows.append(Shift(step, relative, cosine, how, note))
    return rows


def _moved(model: PreTrainedModel, stack: nn.Module, ids: Tensor, offset: int, first: int, takes: bool) -> Tensor:
    """The last hidden states, float64, with the first token at position `first`."""
    if takes:
        places = torch.arange(first, first + ids.shape[1], device=ids.device).expand_as(ids) + offset
        return finite(run(stack, ids, position_ids=places).last_hidden_state)
    padded = F.pad(ids, (first, 0), value=int(model.config.pad_token_id or 0))
    mask = F.pad(torch.ones_like(ids), (first, 0))
    return finite(run(stack, padded, attention_mask=mask).last_hidden_state)[:, first:]
