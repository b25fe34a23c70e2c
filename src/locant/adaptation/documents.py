"""Retrieval of long documents: is reading a whole document better than reading its beginning, or one piece at a time?

Some sentences are removed from each of a few hundred long documents, all from beyond the tokens that the original can
read. Each sentence then has to find its own document among all documents, by the cosine of their vectors. Accuracy is
the share of sentences whose own document comes first. A document, without its sentences, is read in one of three ways:

    whole       up to `length` tokens at once
    truncated   its first `limit` tokens
    chunked     up to `length` tokens in pieces of `limit` tokens or fewer, whose vectors are averaged
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from locant.adaptation.sample import SENTENCE
from locant.analysis.text import special_tokens
from locant.hf.pooling import Pooling

TITLE = re.compile(r"^ = [^=].*[^=] = $", re.MULTILINE)
"""The title of an article in WikiText."""
QUERY = range(16, 65)
"""Possible numbers of tokens of a removed sentence."""


def articles(text: str) -> list[str]:
    """Returns the articles of a text in the format of WikiText, without their titles."""
    return [article.strip() for article in TITLE.split(text) if article.strip()]


class Sentences:
    """Long documents and sentences removed from them, as tokens.

    length   most tokens that are read of a document.
    limit    tokens that the original can read; sentences are from beyond them.
    most     most documents to use.
    each     sentences per document.
    pooling  how vectors are made; by default the mean.
    """

    def __init__(self, tokenizer: Any, documents: list[str], *, length: int = 2048, limit: int = 512, most: int = 200,
                 each: int = 5, pooling: Pooling | None = None) -> None:  # fmt: skip
        self.pooling = pooling or Pooling()
        self.before, self.after = special_tokens(tokenizer)
        self.room, self.limit = length - len(self.before) - len(self.after), limit
        self.documents: list[list[int]] = []
        self.queries: list[tuple[list[int], int]] = []  # a sentence, and the number of its document
        for document in documents:
            if len(self.documents) < most:
                self._add(tokenizer, document, each)
        if len(self.documents) < 2:
            raise ValueError(
                f"the task needs at least 2 documents of a few thousand tokens, got {len(self.documents)}; pass a "
                f"longer text"
            )

    def _add(self, tokenizer: Any, document: str, each: int) -> None:
        sentences = [piece for line in document.splitlines() for piece in SENTENCE.split(line.strip()) if piece]
        ids = tokenizer(sentences, add_special_tokens=False, verbose=False)["input_ids"]
        starts = torch.tensor([0, *map(len, ids)]).cumsum(0).tolist()
        usable = [n for n, sentence in enumerate(ids) if len(sentence) in QUERY and self.limit < starts[n] < self.room]
        if len(usable) < 2 * each:
            return
        taken = {usable[len(usable) * n // each] for n in range(each)}
        self.queries += [(ids[n], len(self.documents)) for n in sorted(taken)]
        rest = [token for n, sentence in enumerate(ids) if n not in taken for token in sentence]
        self.documents.append(rest[: self.room])

    def accuracy(self, model: PreTrainedModel, way: str, size: int | None = None) -> float:
        """Returns the share of sentences that find their document, for a way of reading."""
        return float(self.found(model, way, size).double().mean())

    def found(self, model: PreTrainedModel, way: str, size: int | None = None) -> Tensor:
        """Returns, for each sentence, whether its document comes first. Pieces have `size` tokens, by default `limit`.

        way   "whole", "truncated" or "chunked".
        """
        read: Callable[[list[int]], Tensor] = {
            "whole": lambda ids: self.whole(model, ids),
            "truncated": lambda ids: self.whole(model, ids[: self._piece(size)]),
            "chunked": lambda ids: self.chunked(model, ids, self._piece(size)),
        }[way]
        documents = torch.stack([read(document) for document in self.documents])
        queries = torch.stack([self.whole(model, query) for query, _ in self.queries])
        wanted = torch.tensor([number for _, number in self.queries], device=queries.device)
        return ((queries @ documents.T).argmax(1) == wanted).cpu()

    def whole(self, model: PreTrainedModel, ids: list[int]) -> Tensor:
        """Returns the pooled vector [d] of all tokens."""
        rows = torch.tensor([[*self.before, *ids, *self.after]], device=model.device)
        with torch.no_grad():
            states: Tensor = model.base_model(input_ids=rows).last_hidden_state
        return self.pooling(states, torch.ones_like(rows))[0]

    def chunked(self, model: PreTrainedModel, ids: list[int], piece: int) -> Tensor:
        """Returns the mean [d] of the vectors of pieces, weighted by their number of tokens and scaled to length 1."""
        chunks = [ids[at : at + piece] for at in range(0, len(ids), piece)]
        vectors = torch.stack([len(chunk) * self.whole(model, chunk) for chunk in chunks])
        return F.normalize(vectors.sum(0), dim=-1)

    def _piece(self, size: int | None) -> int:
        return (self.limit if size is None else size) - len(self.before) - len(self.after)
