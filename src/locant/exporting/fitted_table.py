"""A table of absolute positions that comes near a model whose scheme acts in attention: an approximation.

The rows are the only parameters. They start from the table of the original, continued in the better of two ways:

    repeated      row p is row 1 + (p − 1) mod (rows − 1) of the original
    stretched     the rows of the original, interpolated to the new length

and are trained to give the outputs of the swapped model on a text (the losses of agreement.py), at lengths up to that
of the table. No table can equal a bias by offset at all lengths. So agreement with the swapped model is measured on
held-out text at every length, before and after the training, and returned.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from locant.adaptation import sample
from locant.adaptation.adapting import held_out, trained_on
from locant.adaptation.agreement import agreement_for, mean_agreement
from locant.adaptation.batch import Batch, to_device
from locant.adaptation.distillation import Teacher, TrainingBatches, distill, seconds_per_step
from locant.adaptation.sample import Sampler, Text
from locant.adaptation.windows import Windows
from locant.exporting.original import table_of, with_table
from locant.exporting.refusal import CannotExport
from locant.exporting.source import Source
from locant.exporting.stock import Stock
from locant.hf.loading import load
from locant.hf.modes import evaluating
from locant.hf.readout import native
from locant.runs.budget import Budget

RATE = 1e-3
"""Learning rate of the rows. Their entries are a few hundredths in trained models."""
SHORTEST = 32
"""Tokens of the shortest texts on which agreement is measured."""
MEASURED = (16, 4096)
"""Texts of each length on which agreement is measured: at most so many, and at most so many tokens."""


@dataclass(frozen=True)
class TableAgreement:
    """How near a table comes to the swapped model, on held-out texts of one length."""

    length: int
    start: float  # with the table of the original, continued
    fitted: float


@dataclass(frozen=True)
class FittedTable:
    """A model with a fitted table, and how near it is."""

    stock: Stock
    measure: str
    rows: list[TableAgreement]


def fitted_table(
    source: Source, text: Text, length: int, *, original: str | Path | None, budget: str, seed: int,
    on_stage: Callable[[str], None],
) -> FittedTable:  # fmt: skip
    """Returns the model in its own architecture with the best table of `length` rows that was found."""
    mechanism, _ = table_of(source)
    wanted = Budget.parse(budget)
    if source.tokenizer is None:
        raise CannotExport("a table is fitted on text, and the model has no tokenizer; pass tokenizer=…")
    table = _table_of_original(source, original)
    lines = sample.pieces(text)
    causal = sample.is_causal(source.model, source.tokenizer, lines)
    kind: Any = agreement_for(source.model, source.tokenizer, causal=causal, source=source.folder)
    kind.learning_rate = RATE
    teacher = Teacher(source.model, kind, Windows(source.tokenizer, length, causal=causal))
    with evaluating(source.model):
        on_stage("reading held-out text with the swapped model")
        batches = _batches(Sampler(source.tokenizer, held_out(lines), seed=seed), length, kind, source.model)
        goals = [kind.reduced(teacher.outputs(batch)) for batch in batches]
        on_stage("trying two continuations of the table")
        starts = [with_table(source, rows) for rows in (repeated(table, length), stretched(table, length))]
        found = [[mean_agreement(kind, [g], each.model, [b]) for g, b in zip(goals, batches, strict=True)]
                 for each in starts]  # fmt: skip
        best = max(range(len(starts)), key=lambda at: sum(found[at]))
        stock, before = starts[best], found[best]
        weight = mechanism.table(stock.model.base_model.get_submodule(source.only_stack().path))
        stock.model.requires_grad_(False)
        weight.requires_grad_(True)
        kept = weight.detach().clone()
        lengths = [each for each in sample.ladder(length, SHORTEST) if each >= min(len(table), length) // 2]
        steps = _steps(wanted, stock.model, teacher, source, lines, lengths)
        on_stage(f"fitting {length:,} rows in {steps} steps")
        if steps:
            training = TrainingBatches(Sampler(source.tokenizer, trained_on(lines), seed=seed + 1), kind, lengths,
                                       steps, seed)  # fmt: skip
            with tempfile.TemporaryDirectory() as folder:
                distill(stock.model, teacher, training, (batches, goals), out=Path(folder), keep=False, seed=seed)
        after = [mean_agreement(kind, [g], stock.model, [b]) for g, b in zip(goals, batches, strict=True)]
    if sum(after) < sum(before):  # the training made it worse
        with torch.no_grad():
            weight.copy_(kept)
        after = before
    stock.model.requires_grad_(True)
    rows = [TableAgreement(*each) for each in
            zip((batch["input_ids"].shape[1] for batch in batches), before, after, strict=True)]  # fmt: skip
    return FittedTable(stock, kind.name, rows)


def repeated(table: Tensor, length: int) -> Tensor:
    """Returns `length` rows: those of a table, and after its end all but the first one again."""
    places = torch.arange(length, device=table.device)
    return table[torch.where(places == 0, 0, 1 + (places - 1) % (len(table) - 1))].clone()


def stretched(table: Tensor, length: int) -> Tensor:
    """Returns `length` rows between those of a table; the first one stays alone. Fewer rows are only cut."""
    if length <= len(table):
        return table[:length].clone()
    rest = torch.nn.functional.interpolate(table[1:].T[None], size=length - 1, mode="linear", align_corners=True)
    return torch.cat([table[:1], rest[0].T])


def _table_of_original(source: Source, original: str | Path | None) -> Tensor:
    plan = source.plan
    assert plan is not None
    if original is not None:
        table = native(load(original)).table
    else:
        weights = [getattr(each.original, "weight", None) for each in plan.replaced]
        found = [each for each in weights if isinstance(each, Tensor)]
        if plan.native_is_lost or not found:
            raise CannotExport(
                "this folder no longer has the position table of the original, from which the rows start; name the "
                "original: original='MODEL'"
            )
        stack = source.model.base_model.get_submodule(source.only_stack().path)
        table = found[0].detach()[table_of(source)[0].first(stack) :]
    width = table_of(source)[0].width(source.model) if table is None else table.shape[1]
    if table is None or len(table) < 2 or width != source.only_stack().width:
        raise CannotExport(f"{original} has no table of absolute positions of the width of this model")
    return table.to(source.model.device, source.model.dtype)


def _batches(sampler: Sampler, length: int, kind: Any, model: PreTrainedModel) -> list[Batch]:
    most, tokens = MEASURED
    return [
        kind.prepare(to_device(sampler.batch(max(2, min(most, tokens // each)), each), model), number)
        for number, each in enumerate(sample.ladder(length, SHORTEST))
    ]


def _steps(
    wanted: Budget, student: PreTrainedModel, teacher: Teacher, source: Source, lines: list[str], lengths: list[int]
) -> int:
    if wanted.steps is not None:
        return wanted.steps
    assert wanted.seconds is not None
    seconds = seconds_per_step(student, teacher, Sampler(source.tokenizer, trained_on(lines)), lengths)
    return int(wanted.seconds / seconds)
