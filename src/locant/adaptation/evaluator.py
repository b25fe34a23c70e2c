"""Measures a model in each of its states: agreement with the original, scores, and the curves of its heads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from locant.adaptation.agreement import Agreement, mean_agreement
from locant.adaptation.batch import Batch, to_device
from locant.adaptation.distillation import Teacher
from locant.adaptation.result import StateRow
from locant.adaptation.sample import Sampler
from locant.adaptation.scores import Score
from locant.analysis.distance import Layer, by_distance
from locant.hf.modes import evaluating
from locant.hf.readout import native

EVALUATION_ROWS = 32
"""Maximum number of held-out sequences of each length."""
EVALUATION_TOKENS = 4096
"""Approximate number of tokens of the held-out sequences of each length."""
CURVE_ROWS = 8
"""Number of sequences on which the curves of the heads are measured."""
CURVE_LENGTH = 64
"""Tokens of each of these sequences."""


@dataclass
class Evaluator:
    """Measures a model in each of its states, on the same held-out sequences."""

    kind: Agreement
    batches: list[Batch]
    outputs: list[Tensor]  # of the original, reduced
    tokenizer: Any
    scores: Mapping[str, Score]
    ids: Tensor  # sequences for the curves of the heads
    seconds: float  # of one evaluation of agreement
    curves: dict[str, list[Layer]] = field(default_factory=dict)

    @classmethod
    def create(cls, teacher: Teacher, sampler: Sampler, lengths: list[int], scores: Mapping[str, Score]) -> Evaluator:
        """Draws the sequences and computes the outputs of the original."""
        kind, model = teacher.kind, teacher.model
        batches = []
        for number, length in enumerate(lengths):
            count = max(2, min(EVALUATION_ROWS, EVALUATION_TOKENS // length))
            batches.append(kind.prepare(to_device(sampler.batch(count, length), model), number))
        start = time.perf_counter()
        outputs = [kind.reduced(teacher.outputs(batch)) for batch in batches]
        seconds = time.perf_counter() - start
        ids = sampler.rows(CURVE_ROWS, min(CURVE_LENGTH, teacher.windows.whole)).to(model.device)
        return cls(kind, batches, outputs, sampler.tokenizer, scores, ids, seconds)

    def row(self, state: str, model: PreTrainedModel, agreement: float | None = None) -> StateRow:
        """Returns agreement, scores and number of position parameters of a model, and stores its curves.

        agreement   if it is known: that of the original with itself, and that at the end of a training.
        """
        self.curves[state] = by_distance(model, self.ids)
        if agreement is None:
            agreement = mean_agreement(self.kind, self.outputs, model, self.batches)
        with evaluating(model), torch.no_grad():
            scores = {name: _number(name, score(model, self.tokenizer)) for name, score in self.scores.items()}
        return StateRow(state, agreement, _position_parameters(model), scores)


def _number(name: str, score: Any) -> float:
    try:
        return float(score)
    except (TypeError, ValueError):
        raise TypeError(f"the score {name} must be a number, got {score!r}") from None


def _position_parameters(model: PreTrainedModel) -> int:
    stacks = native(model).stacks
    schemes = [scheme for stack in stacks for scheme in [stack.embed, *(stack.layers or [])] if scheme is not None]
    return sum(weight.numel() for weight in {w for scheme in schemes for w in scheme.parameters()})
