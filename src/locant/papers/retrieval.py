"""Retrieval of long meetings: QMSum as LongEmbed uses it (Zhu et al. 2024, arXiv 2404.12096).

A query is the summary of a part of a meeting. A meeting is read in chunks of 256 tokens; its vector is the mean of the
vectors of its chunks. The score is nDCG@10 (adaptation/retrieval.py).

A meeting has about 50 chunks. To save time one can read some of them, evenly spaced, rather than leave out meetings:
among few meetings the test is too easy to tell models apart (nDCG 0.99 among 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from locant.papers.place import Place
from locant.papers.steps import Input, open_model, shape_of_input

TOKENS = 13_000
"""Tokens of a meeting, roughly; for the estimate of the cost."""
LONGEST = 1_000_000
"""More tokens than any meeting has: all of it is read."""


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
        from locant.adaptation.retrieval import Averaged, Reader, evaluate, read_collection
        from locant.hf.pooling import pooling_of
        from locant.hf.sentence_folder import sentence_folder

        found = read_collection(self.data.path(at), self.meetings)
        model, tokenizer = open_model(self.model.path(at))
        pooling = pooling_of(sentence_folder(str(self.original.path(at))), None)
        reader = Reader(model, tokenizer, pooling, LONGEST)
        reading = evaluate(reader, found, Averaged(self.chunk, self.chunks))
        return {"ndcg": reading.ndcg, "queries": list(reading.each), "meetings": len(found.documents)}

    def cost(self, at: Place) -> float:
        """Returns the floating-point operations."""
        each = min(TOKENS, self.chunks * self.chunk or TOKENS)
        return shape_of_input(self.original, at).reading((self.meetings or 197) * each, self.chunk)
