"""Short self-distillation: trains a swapped model to match its original on unlabelled text.

The original is frozen. If only the scheme is trained, the original shares all other weights with the changed model, so
memory holds one copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from locant.adaptation.agreement import Agreement, mean_agreement
from locant.adaptation.batch import Batch, to_device
from locant.adaptation.sample import Sampler
from locant.adaptation.training import AgreementAtStep, Stage, seconds_of_step, train
from locant.adaptation.windows import Tensors, Windows

TOKENS = 1024
"""Tokens per training step."""


def frozen_copy(model: PreTrainedModel, *, shared: bool) -> PreTrainedModel:
    """Returns a copy of the model in eval mode; with `shared` its weights are those of the model."""
    memo: dict[int, Any] = {id(weight): weight for weight in model.parameters()} if shared else {}
    kept: PreTrainedModel = copy.deepcopy(model, memo).eval()
    if not shared:
        kept.requires_grad_(False)
    return kept


class Teacher:
    """The frozen original, which reads long texts in windows."""

    def __init__(self, model: PreTrainedModel, kind: Agreement, windows: Windows) -> None:
        self.model, self.kind, self.windows = model, kind, windows

    @torch.no_grad()
    def outputs(self, batch: Batch) -> Tensor:
        """Returns the outputs that agreement compares, [B, L, …]."""
        (found,) = self.windows.read(lambda short: (self.kind.outputs(self.model, short),), batch)
        return found

    @torch.no_grad()
    def loss_inputs(self, batch: Batch) -> Tensors:
        """Returns the tensors that the loss compares."""
        positions = self.kind.kl_positions(batch)
        if self.windows.fits(batch):
            return self.kind.loss_inputs(self.model, batch, positions)
        first, *rest = self.windows.read(lambda short: self.kind.loss_inputs(self.model, short, None), batch)
        return first if positions is None else first[:, positions], *rest


class TrainingBatches(Dataset[Batch]):
    """The batch of every step: a random length for each, and about `TOKENS` tokens."""

    def __init__(self, sampler: Sampler, kind: Agreement, lengths: list[int], steps: int, seed: int) -> None:
        order = torch.Generator().manual_seed(seed)
        chosen = [lengths[int(number)] for number in torch.randint(len(lengths), (steps,), generator=order)]
        self.batches = [
            kind.prepare(sampler.batch(max(1, TOKENS // length), length), seed + number)
            for number, length in enumerate(chosen)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Batch:
        return self.batches[number]


class Distillation(Stage):
    """Trains for agreement with the teacher, and is evaluated by it.

    held_out   batches for evaluation, and the reduced outputs of the original for them.
    """

    def __init__(self, teacher: Teacher, held_out: tuple[list[Batch], list[Tensor]]) -> None:
        self.teacher, self.held_out = teacher, held_out

    @property
    def learning_rate(self) -> float:
        return self.teacher.kind.learning_rate

    def loss(self, student: PreTrainedModel, batch: Batch) -> Tensor:
        return distillation_loss(student, self.teacher, batch)

    def evaluate(self, student: PreTrainedModel) -> dict[str, float]:
        batches, outputs = self.held_out
        return {"agreement": mean_agreement(self.teacher.kind, outputs, student, batches)}


def seconds_per_step(student: PreTrainedModel, teacher: Teacher, sampler: Sampler, lengths: list[int]) -> float:
    """Measures the time of a training step, as the mean over lengths; changes no weights.

    It runs three steps: one to warm up, one of the shortest and one of the longest sequences. The time per token grows
    linearly with the length of a sequence, so the others follow from these two.
    """
    stage = Distillation(teacher, ([], []))
    per_token = []
    for length in (lengths[0], lengths[0], lengths[-1]):
        batch = to_device(teacher.kind.prepare(sampler.batch(max(1, TOKENS // length), length), 0), student)
        per_token.append(seconds_of_step(student, stage, batch) / max(TOKENS, length))
    _, short, long = per_token
    slope = (long - short) / (lengths[-1] - lengths[0]) if len(lengths) > 1 else 0.0
    return sum((short + slope * (length - lengths[0])) * max(TOKENS, length) for length in lengths) / len(lengths)


def distill(
    student: PreTrainedModel,
    teacher: Teacher,
    training: TrainingBatches,
    held_out: tuple[list[Batch], list[Tensor]],
    *,
    out: Path,
    keep: bool,
    seed: int,
    report_to: tuple[str, ...] = (),
    on_evaluation: Callable[[AgreementAtStep], None] = lambda found: None,
) -> list[AgreementAtStep]:
    """Trains the parameters of `student` that require a gradient, and returns all evaluations (training.py).

    held_out   batches for evaluation, and the reduced outputs of the original for them.
    """
    return train(student, Distillation(teacher, held_out), training, steps=len(training), out=out, keep=keep, seed=seed,
                 report_to=report_to, on_evaluation=on_evaluation)  # fmt: skip


def distillation_loss(student: PreTrainedModel, teacher: Teacher, batch: Batch) -> Tensor:
    """Returns the loss of a student against its teacher."""
    kind = teacher.kind
    return kind.loss(teacher.loss_inputs(batch), kind.loss_inputs(student, batch, kind.kl_positions(batch)), batch)
