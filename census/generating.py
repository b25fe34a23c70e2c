"""Text written with a cache against text written without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from census.models import FORBIDDEN
from census.sizes import TOKENS
from census.subject import LEFT, LENGTH, SHORT, Subject, difference

NEW = 5
"""Tokens to write. A sliding window is shorter than the prompt and these."""


def _written(model: PreTrainedModel, given: dict[str, Any], cache: bool) -> tuple[Tensor, Tensor]:
    """The tokens that a model writes, and their logits [B, NEW, vocabulary]."""
    torch.manual_seed(0)
    model.generation_config.eos_token_id = None  # always NEW tokens
    made: Any = model.generate(
        **given, max_new_tokens=NEW, do_sample=False, num_beams=1, use_cache=cache, pad_token_id=TOKENS["pad_token_id"],
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    logits = torch.stack(made.logits, 1)
    return made.sequences[:, -NEW:], logits.masked_fill(logits < FORBIDDEN, 0.0)


def _compare(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> float:
    """How far the logits are apart up to where the tokens part, if they do."""
    error = 0.0
    for row in range(len(one[0])):
        same = int((one[0][row] == other[0][row]).long().cumprod(0).sum())
        upto = min(same + 1, NEW)
        error = max(error, difference(one[1][row, :upto].float(), other[1][row, :upto].float()))
    return error


def _step_by_step(subject: Subject, model: PreTrainedModel) -> float:
    """For a model without a head that writes: the last tokens one at a time, with a cache, against all at once."""
    whole, cache, parts = subject.run(model), None, []
    with torch.no_grad():
        for start, end in [(0, SHORT), *((at, at + 1) for at in range(SHORT, LENGTH))]:
            made = model(**subject.given(subject.ids[:, start:end]), past_key_values=cache, use_cache=True)
            cache, parts = made.past_key_values, [*parts, made.last_hidden_state]
    return difference(torch.cat(parts, 1), whole)


def generation_error(subject: Subject, model: PreTrainedModel, padded: bool) -> float:
    """Returns how far logits with a cache are from those without; padded: from those of each row alone."""
    if not model.can_generate():
        return 0.0 if padded else _step_by_step(subject, model)
    if not padded:
        given = subject.given(subject.ids)
        return _compare(_written(model, given, cache=True), _written(model, given, cache=False))
    if subject.two_stacks:
        return 0.0  # the prompt of a decoder beside an encoder is not padded
    rows = subject.padded(LEFT)
    together = _written(model, subject.given(rows.ids, rows.mask), cache=True)
    alone = _written(model, subject.given(subject.ids[:1, :SHORT]), cache=False)
    return _compare((together[0][:1], together[1][:1]), alone)
