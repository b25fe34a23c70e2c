"""An adapted model at each length, beside the two ways in which the original can read a text that is too long for it.

    truncated    it reads the first tokens, as many as it can, and ignores the rest
    chunked      it reads the text in overlapping windows (windows.py), as the teacher of the adaptation does

The reference is the original that reads the whole text where it can, and in windows where it cannot. So at longer texts
`chunked` is 1 by definition, at the cost of about twice the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from locant.adaptation.agreement import Agreement, LabelAgreement, StateAgreement, mean_agreement
from locant.adaptation.batch import Batch
from locant.adaptation.distillation import Teacher
from locant.adaptation.windows import Windows
from locant.hf.modes import evaluating


@dataclass(frozen=True)
class LengthRow:
    """Agreement with the original on held-out texts of one length."""

    length: int  # of the longest text: texts end with a sentence, so it may be less than was asked for
    adapted: float
    truncated: float
    chunked: float
    texts: int


def rows_by_length(
    model: PreTrainedModel, teacher: Teacher, batches: list[Batch], outputs: list[Tensor]
) -> list[LengthRow]:
    """Returns one row per batch. Each batch has texts of one length; `outputs` are the reference for each, reduced."""
    kind = teacher.kind
    return [
        LengthRow(
            batch["input_ids"].shape[1],
            mean_agreement(kind, [reference], model, [batch]),
            _truncated(teacher, batch, reference),
            _chunked(teacher, batch, reference),
            len(batch["input_ids"]),
        )
        for batch, reference in zip(batches, outputs, strict=True)
    ]


@torch.no_grad()
def _chunked(teacher: Teacher, batch: Batch, reference: Tensor) -> float:
    windows, kind = teacher.windows, teacher.kind
    with evaluating(teacher.model):
        (found,) = windows.always(lambda short: (kind.outputs(teacher.model, short),), batch)
        total, count = kind.measure(reference, found, batch)
    return total / count


@torch.no_grad()
def _truncated(teacher: Teacher, batch: Batch, reference: Tensor) -> float:
    kind, short = teacher.kind, truncated(batch, teacher.windows)
    with evaluating(teacher.model):
        found = kind.outputs(teacher.model, short)
    length = short["input_ids"].shape[1]
    if type(kind) is StateAgreement:
        first = kind.pooling.of_text(reference, batch["attention_mask"])
        second = kind.pooling.of_text(found, short["attention_mask"])
        return float((first * second).sum(-1).mean())
    if isinstance(kind, LabelAgreement) and not kind.each_token:
        more = batch["input_ids"].shape[1] - length
        total, count = kind.measure(reference, F.pad(found, (0, 0, 0, more)), batch)  # equal for every label
        return total / count
    if short is not batch:
        length -= len(teacher.windows.after)  # the special tokens at the end are not the tokens that stand there
    read = {name: values[:, :length] for name, values in batch.items()}
    total, _ = kind.measure(reference[:, :length], found[:, :length], read)
    return total / _count(kind, reference, batch)  # it says nothing about the tokens that it did not read


def _count(kind: Agreement, reference: Tensor, batch: Batch) -> int:
    """How many tokens are compared in a whole batch."""
    shape = reference if reference.ndim == 3 else reference[..., None]
    return kind.measure(reference, torch.zeros_like(shape, dtype=torch.float32), batch)[1]


def truncated(batch: Batch, windows: Windows) -> Batch:
    """Returns the first tokens of each text, as many as the original can read, with its special tokens."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    if windows.fits(batch):
        return batch
    tail = len(windows.after)
    rows = []
    for row, count in zip(ids, mask.sum(1).tolist(), strict=True):
        kept = row[: windows.whole]
        if count > windows.whole:
            kept = torch.cat([row[: windows.whole - tail], row[count - tail : count]])
        rows.append(kept)
    return {"input_ids": torch.stack(rows), "attention_mask": mask[:, : windows.whole]}
