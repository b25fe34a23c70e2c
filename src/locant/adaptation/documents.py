"""Is a model that reads a whole document worth more than one that reads its beginning, or one piece after the other?

From each of some hundred long documents a few sentences are taken out, all from beyond what the original can read. Of
each the document it is from is looked for among all documents, by the cosine of their vectors. Accuracy is how often it
comes first. A document, without its sentences, is read

    whole       up to `length` tokens at once
    truncated   its first `limit` tokens
    chunked     up to `length` tokens in pieces of `limit`, or less, whose vectors are averaged
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.adaptation.agreement import pooled
from locant.adaptation.sample import SENTENCE
from locant.analysis.text import special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TITLE = re.compile(r"^ = [^=].*[^=] = $", re.MULTILINE)
"""Of an article in WikiText."""
QUERY = range(16, 65)
"""Tokens of a sentence that is looked for."""


def articles(text: str) -> list[str]:
    """The articles of a text in the format of WikiText, without their titles."""
    return [article.strip() for article in TITLE.split(text) if article.strip()]


class Sentences:
    """Long documents and sentences from them, as tokens."""

    def __init__(self, tokenizer: Any, documents: list[str], *, length: int = 2048, limit: int = 512, most: int = 200,
                 each: int = 5) -> None:  # fmt: skip
        self.before, self.after = special_tokens(tokenizer)
        self.room, self.limit = length - len(self.before) - len(self.after), limit
        self.documents: list[list[int]] = []
        self.queries: list[tuple[list[int], int]] = []  # a sentence, and the number of its document
        for document in documents:
            if len(self.documents) < most:
                self._add(tokenizer, document, each)
        if len(self.documents) < 2:
            raise ValueError(f"needs at least 2 documents of some thousand tokens, got {len(self.documents)}")

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
        """Of a way of reading: whole, truncated or chunked."""
        return float(self.found(model, way, size).double().mean())

    def found(self, model: PreTrainedModel, way: str, size: int | None = None) -> Tensor:
        """Of each sentence, whether its document comes first; pieces have `size` tokens, or `limit`."""
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
        rows = torch.tensor([[*self.before, *ids, *self.after]], device=model.device)
        with torch.no_grad():
            states: Tensor = model.base_model(input_ids=rows).last_hidden_state
        return pooled(states, torch.ones_like(rows)[..., None].to(states.dtype))[0]

    def chunked(self, model: PreTrainedModel, ids: list[int], piece: int) -> Tensor:
        chunks = [ids[at : at + piece] for at in range(0, len(ids), piece)]
        # A piece counts as much as it is long: a short rest says little.
        vectors = torch.stack([len(chunk) * self.whole(model, chunk) for chunk in chunks])
        return F.normalize(vectors.sum(0), dim=-1)

    def _piece(self, size: int | None) -> int:
        return (self.limit if size is None else size) - len(self.before) - len(self.after)
