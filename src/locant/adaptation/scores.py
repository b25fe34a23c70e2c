"""Tasks that measure a model before and after an adaptation: `stsb:FOLDER`, `longembed:FILE`, `clm`, ….

stsb        Spearman correlation of the cosine of pooled vectors with the human scores in dev.tsv of STS-B
sentences   accuracy of finding the document of a sentence (documents.py). A model that can read whole documents does;
            others read pieces, whose vectors are averaged
longembed   nDCG@10 of finding the document of a query (retrieval.py). A model reads up to 4,096 tokens of a document at
            once, or as many as it can; ways in which the original can read a long document are measured beside it
clm         next-token loss on the held-out lines of the text, or on a file: clm:FILE
mlm         the same for masked tokens
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from locant.adaptation.agreement import TokenAgreement, agreement_for, predicts_tokens
from locant.adaptation.batch import padded, to_device
from locant.adaptation.documents import Sentences, articles
from locant.adaptation.retrieval import (
    Averaged,
    BestPiece,
    Reader,
    Reading,
    Whole,
    evaluate,
    evaluate_all,
    read_collection,
)
from locant.adaptation.sample import Sampler, is_causal, longest, pieces
from locant.hf.pooling import Pooling
from locant.runs.glue_files import read_dev
from locant.runs.text_source import read

Score = Callable[[PreTrainedModel, Any], float]
"""A task: from a model and its tokenizer to a number."""

NAMES = ("stsb", "sentences", "longembed", "clm", "mlm")
VECTORS = ("stsb", "sentences", "longembed")
"""Tasks that compare vectors of texts; each needs data."""
LOSS_ROWS = 64
"""Sequences on which the loss of a language model is measured."""
BATCH = 64
"""Sentences of STS-B per batch."""
STSB_LENGTH = 256
"""Tokens after which a sentence of STS-B is truncated."""
PIECES = (128, 256, 512)
"""Tokens of the pieces in which the original reads documents for `longembed`, as far as it can."""
DOCUMENT_LENGTH = 2048
"""Most tokens that are read of a document."""


def score(wanted: str, held_out: list[str], length: int, pooling: Callable[[], Pooling] = Pooling) -> Score:
    """Returns the task of a string such as `stsb:FOLDER`.

    held_out, length   lines, and tokens per sequence, for the loss of a language model.
    pooling            returns how the tasks of VECTORS make vectors; called for these alone. By default the mean.
    """
    name, _, where = wanted.partition(":")
    if name not in NAMES:
        raise ValueError(f"a score must be one of {', '.join(NAMES)}, got {wanted!r}")
    if name in VECTORS and not where:
        raise ValueError(f"the score {name} needs data; write {name}:PATH")
    if name == "stsb":
        return Stsb(where, pooling())
    if name == "sentences":
        return Documents(Path(where), pooling())
    if name == "longembed":
        return LongEmbed(Path(where), pooling())
    if where and not Path(where).is_file():
        raise FileNotFoundError(f"there is no file {where}")
    return Loss(pieces(read(Path(where))) if where else held_out, length, masked=name == "mlm")


class Stsb:
    """STS-B without training: correlation of the cosine of two sentences with the human score."""

    def __init__(self, where: str, pooling: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.pooling = pooling
        self.part = read_dev("STS-B", where)
        if len(self.part.labels) < 3:
            raise ValueError(f"a correlation needs at least 3 pairs, but STS-B in {where} has {len(self.part.labels)}")

    def __call__(self, model: PreTrainedModel, tokenizer: Any) -> float:
        from scipy.stats import spearmanr

        first, second = (_vectors(model, tokenizer, column, self.pooling) for column in self.part.texts)
        return float(spearmanr((first * second).sum(-1).cpu(), self.part.labels).statistic)


def _vectors(
    model: PreTrainedModel, tokenizer: Any, sentences: list[str], pooling: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """[N, d], the pooled vectors of sentences; batches are sorted by length to save padding."""
    order = sorted(range(len(sentences)), key=lambda number: len(sentences[number]))
    found: dict[int, Tensor] = {}
    for at in range(0, len(order), BATCH):
        numbers = order[at : at + BATCH]
        rows = tokenizer([sentences[n] for n in numbers], truncation=True, max_length=longest(model, STSB_LENGTH),
                         verbose=False)["input_ids"]  # fmt: skip
        batch = to_device(padded(rows, tokenizer), model)
        states = model.base_model(**batch).last_hidden_state.float()
        found.update(zip(numbers, pooling(states, batch["attention_mask"]), strict=True))
    return torch.stack([found[number] for number in range(len(sentences))])


class Documents:
    """Accuracy of finding the long document of a sentence."""

    def __init__(self, path: Path, pooling: Pooling) -> None:
        self.pooling = pooling
        if not path.exists():
            raise FileNotFoundError(f"there is no file or folder {path}")
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        self.documents = [article for file in files if file.is_file() for article in articles(read(file))]
        self.task: Sentences | None = None

    def __call__(self, model: PreTrainedModel, tokenizer: Any) -> float:
        if self.task is None:  # made for the first model, the original, so that all models get the same sentences
            self.task = Sentences(tokenizer, self.documents, length=DOCUMENT_LENGTH, limit=longest(model, 512),
                                  pooling=self.pooling)  # fmt: skip
        return self.task.accuracy(model, "whole" if longest(model, DOCUMENT_LENGTH) == DOCUMENT_LENGTH else "chunked")


class LongEmbed:
    """nDCG@10 of finding long documents.

    `readings` has the original, reading in the ways that it can: its first tokens, and pieces. They are measured with
    the first model, which is the original.
    """

    def __init__(self, path: Path, pooling: Pooling) -> None:
        self.pooling, self.collection = pooling, read_collection(path)
        self.readings: list[Reading] = []

    def __call__(self, model: PreTrainedModel, tokenizer: Any) -> float:
        reader = Reader(model, tokenizer, self.pooling)
        if self.readings:
            return evaluate(reader, self.collection, Whole()).ndcg
        sizes = [size for size in PIECES if size <= reader.limit]
        ways = [Whole(reader.limit), *(Averaged(size) for size in sizes), *(BestPiece(size) for size in sizes)]
        self.readings = evaluate_all(reader, self.collection, ways)
        return self.readings[0].ndcg


class Loss:
    """Mean loss of a language model, in nats per token, on sequences of one length."""

    def __init__(self, lines: list[str], length: int, *, masked: bool) -> None:
        self.lines, self.length, self.masked = lines, length, masked

    def __call__(self, model: PreTrainedModel, tokenizer: Any) -> float:
        name, other = type(model).__name__, "clm" if self.masked else "mlm"
        if not predicts_tokens(model):
            raise ValueError(f"{name} predicts no tokens; the scores clm and mlm need a language model")
        if is_causal(model, tokenizer, self.lines) == self.masked:
            raise ValueError(f"{name} is {'' if self.masked else 'not '}causal; use the score {other}")
        rows = Sampler(tokenizer, self.lines).rows(LOSS_ROWS, self.length).to(model.device)
        kind = agreement_for(model, tokenizer, causal=not self.masked)
        assert isinstance(kind, TokenAgreement)
        total, count = 0.0, 0
        for part in rows.split(8):
            batch = kind.prepare({"input_ids": part, "attention_mask": torch.ones_like(part)}, seed=0)
            logits = kind.outputs(model, batch).float()
            if self.masked:
                counted = kind.counted(batch)
                losses = F.cross_entropy(logits[counted], part[counted], reduction="none")
            else:
                losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="none")
            total, count = total + float(losses.sum()), count + len(losses)
        return total / count
