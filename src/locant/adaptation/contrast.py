"""The contrastive stage: spans that were removed from a long document must find it among other documents.

The original can teach what it computes in windows, and no more. This stage learns from the text itself. No labels are
needed: documents and queries are made from running text (running_text.py). The frozen original reads the queries, the
trained model reads the documents. With s the cosine of a query and a document, divided by TEMPERATURE,

    loss = ½ · mean over queries of −log softmax(s over all documents)[own document]
         + ½ · mean over queries of −log softmax(s over this query and the queries of other documents)[this query]
         + DISTILLATION · loss of distillation, on sequences that the original can read at once

The last term keeps the vectors of short texts. Documents are read with gradients one at a time (gradient_caching.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from locant.adaptation.agreement import mean_agreement
from locant.adaptation.batch import Batch, grouped, padded, to_device
from locant.adaptation.distillation import TOKENS, Teacher, TrainingBatches, distillation_loss
from locant.adaptation.gradient_caching import cached_backward
from locant.adaptation.retrieval import ndcg
from locant.adaptation.running_text import Document, RunningText
from locant.adaptation.sample import Text
from locant.adaptation.schedule import Pace
from locant.adaptation.training import (
    AgreementAtStep,
    Stage,
    best_weights,
    seconds_of_step,
    set_weights,
    train,
    trained_weights,
)
from locant.hf.modes import evaluating
from locant.hf.pooling import Pooling

TEMPERATURE = 0.05
"""Cosines are divided by this before the softmax."""
DISTILLATION = 10.0
"""Weight of the distillation loss. With a weight of 1, MiniLM loses much of its agreement in the first steps."""
PLACES = 4
"""Places of the text from which a batch has documents."""
NEIGHBOURS = 4
"""Documents that follow one another from each place: hard negatives."""
HELD_OUT_DOCUMENTS = 64
"""Most documents that retrieval is measured on. To read them takes about as long as a training step."""
MOST_LOST = 0.005
"""A state whose agreement with the original fell by more than this is not kept."""


@dataclass(frozen=True)
class Contrasted:
    """The result of the stage."""

    documents: int  # held-out ones
    queries: int
    original: float  # nDCG@10 of the original, which reads documents in windows
    evaluations: list[AgreementAtStep]  # the first one is the start, at step 0
    kept: AgreementAtStep  # of the state that the model has now

    @property
    def start(self) -> AgreementAtStep:
        return self.evaluations[0]

    @property
    def measured_on(self) -> str:
        """Returns how retrieval was measured, in two sentences."""
        return (
            f"Retrieval is nDCG@10 of {self.queries} spans that were removed from {self.documents} held-out documents, "
            f"and are read by the original. The state was chosen by it, so it is a little too high."
        )

    @property
    def notices(self) -> list[str]:
        """Returns why the model is as it was before the stage, if it is."""
        if self.kept.step:
            return []
        return [
            f"the contrastive stage changed nothing: no state had a better retrieval of held-out documents than the "
            f"start ({self.start.retrieval:.4f}) and an agreement of {self.start.agreement - MOST_LOST:.4f} or more"
        ]


class Documents:
    """Documents and their queries as batches, both sorted by length.

    documents, queries   batches of about TOKENS tokens; a longer text is a batch of its own.
    owners               for each query the number of its document.
    """

    def __init__(self, found: Sequence[Document], tokenizer: Any) -> None:
        order = sorted(found, key=lambda document: len(document.tokens))
        queries = sorted(
            ((query, number) for number, document in enumerate(order) for query in document.queries),
            key=lambda each: len(each[0]),
        )
        self.documents = _batches([document.tokens for document in order], tokenizer)
        self.queries = _batches([query for query, _ in queries], tokenizer)
        self.owners = torch.tensor([number for _, number in queries], dtype=torch.long)
        self.count = len(order)


def _batches(rows: list[list[int]], tokenizer: Any) -> list[Batch]:
    """Batches of rows that are sorted by length, in this order."""
    return [padded([rows[number] for number in numbers], tokenizer) for numbers in grouped(rows, TOKENS)]


def held_out_documents(tokenizer: Any, text: Text, length: int, seed: int) -> Documents:
    """Returns the documents that retrieval is measured on: some groups of neighbours, evenly spaced over a text."""
    found = RunningText(tokenizer, text, length).partition(random.Random(seed))
    groups = [found[at : at + NEIGHBOURS] for at in range(0, len(found), NEIGHBOURS)]
    most = HELD_OUT_DOCUMENTS // NEIGHBOURS
    if len(groups) > most:
        groups = [groups[at * len(groups) // most] for at in range(most)]
    chosen = Documents([document for group in groups for document in group], tokenizer)
    if chosen.count < 2 or not len(chosen.owners):
        raise ValueError(
            f"the lines that are held out make documents: {chosen.count}, queries: {len(chosen.owners)}; the "
            f"contrastive stage needs 2 and 1 to measure retrieval. Pass a longer text, or a smaller length"
        )
    return chosen


class ContrastBatches(Dataset[dict[str, Any]]):
    """The batch of every step: documents with queries, and ordinary training sequences.

    The seed and the number of the step decide which documents it has.
    """

    def __init__(self, text: RunningText, sequences: TrainingBatches, seed: int) -> None:
        self.text, self.sequences, self.seed = text, sequences, seed

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, step: int) -> dict[str, Any]:
        found = self.text.draw(random.Random(f"{self.seed} {step}"), PLACES, NEIGHBOURS)
        made = Documents(found, self.text.sampler.tokenizer)
        return {"documents": made.documents, "queries": made.queries, "owners": made.owners,
                "sequences": self.sequences[step]}  # fmt: skip


class Contrast(Stage):
    """Trains documents to be found by their queries, and is evaluated by that."""

    every = 5
    keeps_best = True

    def __init__(self, teacher: Teacher, held_out: Documents, short: tuple[list[Batch], list[Tensor]]) -> None:
        """Reads the held-out queries.

        short   held-out batches on which agreement is measured, and the reduced outputs of the original.
        """
        kind: Any = teacher.kind
        self.teacher, self.held_out, self.short, self.pooling = teacher, held_out, short, kind.pooling
        self.held_out_queries = self.query_vectors(held_out.queries)
        self.least = 0.0  # agreement of a state that may be kept

    @property
    def learning_rate(self) -> float:
        return self.teacher.kind.learning_rate

    def query_vectors(self, batches: list[Batch]) -> Tensor:
        """Returns the vectors [n, d] that the original makes."""
        return torch.cat([self._teacher_vectors(batch) for batch in batches])

    def _teacher_vectors(self, batch: Batch) -> Tensor:
        batch = to_device(batch, self.teacher.model)
        found: Tensor = self.pooling.of_text(self.teacher.outputs(batch), batch["attention_mask"])
        return found

    def loss(self, student: PreTrainedModel, batch: dict[str, Any]) -> Tensor:
        """Returns the loss; the gradients of its contrastive part are in the weights already."""
        total = DISTILLATION * distillation_loss(student, self.teacher, to_device(batch["sequences"], student))
        if not batch["queries"]:  # every document is a single sentence
            return total
        queries, owners = self.query_vectors(batch["queries"]), batch["owners"].to(student.device)
        return total + cached_backward(
            lambda documents: vectors(student, self.pooling, documents),
            batch["documents"],
            lambda found: info_nce(found, queries, owners),
        )

    def evaluate(self, student: PreTrainedModel) -> dict[str, float]:
        with torch.no_grad(), evaluating(student):
            found = [vectors(student, self.pooling, batch) for batch in self.held_out.documents]
        batches, outputs = self.short
        return {"agreement": mean_agreement(self.teacher.kind, outputs, student, batches),
                "retrieval": self.retrieval(torch.cat(found))}  # fmt: skip

    def retrieval(self, documents: Tensor) -> float:
        """Returns nDCG@10 of the held-out queries, from the vectors of the held-out documents."""
        each = ndcg((self.held_out_queries @ documents.T).cpu(), self.held_out.owners.tolist())
        return sum(each) / len(each)

    def original_retrieval(self) -> float:
        """Returns the retrieval of the original, which reads documents in windows."""
        return self.retrieval(torch.cat([self._teacher_vectors(batch) for batch in self.held_out.documents]))

    def quality(self, found: AgreementAtStep) -> float:
        assert found.retrieval is not None
        return found.retrieval if found.agreement >= self.least else -1.0


def vectors(model: PreTrainedModel, pooling: Pooling, batch: Batch) -> Tensor:
    """Returns the vectors [B, d] of texts that a model reads at once."""
    batch = to_device(batch, model)
    states: Tensor = model.base_model(**batch).last_hidden_state
    return pooling(states, batch["attention_mask"])


def info_nce(documents: Tensor, queries: Tensor, owners: Tensor) -> Tensor:
    """Returns InfoNCE in both directions.

    documents   vectors [D, d]; queries [Q, d]; all of length 1.
    owners      for each query the number of its document. A query is no negative for others of its document.
    """
    similarities = queries @ documents.T / TEMPERATURE  # [Q, D]
    to_documents = F.cross_entropy(similarities, owners)
    same = (owners[:, None] == owners) & ~torch.eye(len(owners), dtype=torch.bool, device=owners.device)
    of_owners = similarities.T[owners].masked_fill(same, -torch.inf)  # [Q, Q]
    to_queries = F.cross_entropy(of_owners, torch.arange(len(owners), device=owners.device))
    return (to_documents + to_queries) / 2


def contrast_stage(
    student: PreTrainedModel, stage: Contrast, text: RunningText, sequences: Callable[[int], TrainingBatches], *,
    steps: Callable[[Callable[[], Pace]], int], out: Path, keep: bool, seed: int,
    report_to: tuple[str, ...] = (), on_evaluation: Callable[[AgreementAtStep, int], None] = lambda found, steps: None,
) -> Contrasted | None:  # fmt: skip
    """Trains the parameters of `student` that require a gradient, and keeps the best state; None without any step.

    sequences   makes ordinary training sequences for a number of steps.
    steps       returns the number of steps. If it needs to know the time of a step, it calls its argument.
    out         the folder of metrics, checkpoints and the best state.
    """
    began = time.perf_counter()
    start = AgreementAtStep(step=0, seconds=0.0, **stage.evaluate(student))
    evaluation = time.perf_counter() - began
    stage.least = start.agreement - MOST_LOST

    def pace() -> Pace:
        step = seconds_of_step(student, stage, ContrastBatches(text, sequences(1), seed)[0])
        return Pace(step, evaluation, time.perf_counter() - began, stage.every)

    count = steps(pace)
    if not count:
        return None
    before = trained_weights(student)
    found = train(student, stage, ContrastBatches(text, sequences(count), seed), steps=count, out=out, keep=keep,
                  seed=seed, report_to=report_to, on_evaluation=lambda each: on_evaluation(each, count))  # fmt: skip
    kept = max([start, *found], key=stage.quality)  # the first of equals
    set_weights(student, best_weights(out) if kept.step else before)
    held_out = stage.held_out
    return Contrasted(held_out.count, len(held_out.owners), stage.original_retrieval(), [start, *found], kept)
