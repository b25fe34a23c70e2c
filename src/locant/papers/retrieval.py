"""Retrieval of long meetings: QMSum as LongEmbed uses it (Zhu et al. 2024, arXiv 2404.12096).

A query is the summary of a part of a meeting. It must find its meeting among all meetings, by the cosine of their
vectors. A meeting is read in chunks of 256 tokens; its vector is the mean of the vectors of its chunks. The score is
nDCG@10: a query whose meeting has rank n adds 1 / log2(1 + n), or 0 beyond rank 10.

A meeting has about 50 chunks. To save time one can read some of them, evenly spaced, rather than leave out meetings:
among few meetings the test is too easy to tell models apart (nDCG 0.99 among 4).

The file has one JSON object per line: {"kind": "doc", "id", "text"} or {"kind": "query", "summary", "doc"}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.papers.place import Place
from locant.papers.steps import Input, open_model, shape_of_input
from locant.runs import text_source

CUT = 10
"""Last rank that counts."""
BATCH = 16
"""Chunks per forward pass."""
TOKENS = 13_000
"""Tokens of a meeting, roughly; for the estimate of the cost."""


@dataclass(frozen=True)
class Meetings:
    """Texts, and queries with the number of the text that they must find."""

    texts: tuple[str, ...]
    queries: tuple[tuple[str, int], ...]


def read_meetings(path: Path, most: int) -> Meetings:
    """Returns at most `most` meetings, evenly spaced over the file (0 for all), with all of their queries."""
    rows = [json.loads(line) for line in text_source.read_bytes(path).decode("utf-8").splitlines() if line.strip()]
    try:
        texts = {str(row["id"]): str(row["text"]) for row in rows if row["kind"] == "doc"}
        asked = [(str(row["summary"]), str(row["doc"])) for row in rows if row["kind"] == "query"]
    except (KeyError, TypeError) as problem:
        raise ValueError(f"{path} is not in the format of LongEmbed's QMSum: {problem!r}") from None
    names = list(texts)
    if 0 < most < len(names):
        names = [names[at * len(names) // most] for at in range(most)]
    place = {name: number for number, name in enumerate(names)}
    queries = tuple((text, place[name]) for text, name in asked if name in place)
    if len(names) < 2 or not queries:
        raise ValueError(f"{path} has {len(names)} meetings and {len(queries)} queries; retrieval needs 2 and 1")
    return Meetings(tuple(texts[name] for name in names), queries)


def ndcg(similarities: Tensor, wanted: Sequence[int]) -> list[float]:
    """Returns nDCG@10 of each query, from similarities [queries, documents] and the number of its document.

    A document that is as similar as the wanted one counts as ranked before it.
    """
    own = similarities.gather(1, torch.tensor(wanted)[:, None])
    ranks = (similarities >= own).sum(1).tolist()
    return [1 / math.log2(1 + rank) if rank <= CUT else 0.0 for rank in ranks]


@dataclass(frozen=True)
class Retrieval:
    """Measures one model; the function of a `Measuring` step. `original` is the model whose pooling is used."""

    model: Input
    original: Input
    data: Input
    meetings: int  # 0 for all
    chunk: int  # tokens, special tokens included
    chunks: int = 0  # most chunks that are read of a meeting, evenly spaced; 0 for all

    def __call__(self, at: Place) -> dict[str, Any]:
        """Returns the mean nDCG@10, that of each query, and the number of meetings."""
        from locant.analysis.text import special_tokens
        from locant.hf.pooling import pooling_of
        from locant.hf.sentence_folder import sentence_folder

        found = read_meetings(self.data.path(at), self.meetings)
        model, tokenizer = open_model(self.model.path(at))
        pooling = pooling_of(sentence_folder(str(self.original.path(at))), None)
        reader = Reader(model.eval(), tokenizer, pooling, self.chunk, self.chunks, *special_tokens(tokenizer))
        documents = torch.stack([reader.vector(text) for text in found.texts])
        queries = torch.stack([reader.vector(text) for text, _ in found.queries])
        each = ndcg(queries @ documents.T, [number for _, number in found.queries])
        return {"ndcg": math.fsum(each) / len(each), "queries": each, "meetings": len(found.texts)}

    def cost(self, at: Place) -> float:
        """Returns the floating-point operations."""
        each = min(TOKENS, self.chunks * self.chunk or TOKENS)
        return shape_of_input(self.original, at).reading((self.meetings or 197) * each, self.chunk)


@dataclass(frozen=True)
class Reader:
    """Reads texts with a model, in chunks."""

    model: Any
    tokenizer: Any
    pooling: Any
    chunk: int
    most: int  # chunks of a text, evenly spaced; 0 for all
    before: list[int]
    after: list[int]

    def vector(self, text: str) -> Tensor:
        """Returns the mean vector [d] of the chunks of a text, with length 1."""
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        inside = self.chunk - len(self.before) - len(self.after)
        chunks = [[*self.before, *ids[at : at + inside], *self.after] for at in range(0, max(1, len(ids)), inside)]
        if 0 < self.most < len(chunks):
            chunks = [chunks[at * len(chunks) // self.most] for at in range(self.most)]
        parts = [self._vectors(chunks[at : at + BATCH]) for at in range(0, len(chunks), BATCH)]
        return F.normalize(torch.cat(parts).mean(0), dim=-1)

    @torch.no_grad()
    def _vectors(self, chunks: list[list[int]]) -> Tensor:
        from locant.adaptation.batch import padded, to_device

        batch = to_device(padded(chunks, self.tokenizer), self.model)
        states = self.model.base_model(**batch).last_hidden_state.float()
        vectors: Tensor = self.pooling(states, batch["attention_mask"])
        return vectors.cpu()
