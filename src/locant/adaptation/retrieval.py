"""Retrieval of long documents, as LongEmbed measures it (Zhu et al. 2024, arXiv 2404.12096).

A query must find its document among all documents, by the cosine of their vectors. A query whose document has rank n
scores 1 / log2(1 + n), or 0 beyond rank 10 (nDCG@10). A model can read a long document in several ways:

    Whole(n)         its first n tokens at once: one vector. The baseline that truncates is Whole(limit of the original)
    Averaged(n)      pieces of n tokens: one vector, the mean of theirs
    BestPiece(n)     pieces of n tokens: a vector each, and the most similar one counts
    LatePieces(n)    all tokens at once, then a vector for each n of them (late chunking, arXiv 2409.04701)

The last two need an index with many vectors per document, so their scores do not compare with those of the others.
Of every document the first `length` tokens are read, special tokens included.

Intervals are 95 %, by a bootstrap over documents: queries of one document are not independent.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.adaptation.batch import grouped, padded, to_device
from locant.adaptation.sample import longest
from locant.analysis.text import special_tokens
from locant.hf.modes import evaluating
from locant.runs.float32_products import fast_products
from locant.runs.text_source import read, read_bytes
from locant.runs.untrusted import shortened

CUT = 10
"""Last rank that counts."""
LENGTH = 4096
"""Tokens that are read of a document."""
BATCH_TOKENS = 4096
"""Tokens per forward pass; a longer sequence is a batch of its own."""
DRAWS = 2000
"""Samples of the bootstrap."""


@dataclass(frozen=True)
class Collection:
    """Documents, and queries with the number of the document that each must find."""

    documents: tuple[str, ...]
    queries: tuple[tuple[str, int], ...]


def read_collection(path: Path, most: int = 0) -> Collection:
    """Returns the collection in a file; of more than `most` documents (0: no limit) those evenly spaced over it.

    Each line is a JSON object: {"kind": "doc", "id", "text"}, or {"kind": "query", "doc", "summary"}. A query without a
    summary has a "text", or a "question".
    """
    documents: dict[str, str] = {}
    asked: list[tuple[str, str]] = []
    for row in _rows(path):
        if row["kind"] == "query":
            asked.append((_words(row), str(row["doc"])))
        elif str(row["id"]) in documents:
            raise ValueError(f"{path} has two documents with the id {shortened(row['id'])}")
        else:
            documents[str(row["id"])] = row["text"]
    lost = sorted({name for _, name in asked} - set(documents))
    if lost:
        raise ValueError(f"{path} has queries for documents that it does not have: {', '.join(lost[:3])}")
    names = list(documents)
    if 0 < most < len(names):
        names = [names[at * len(names) // most] for at in range(most)]
    place = {name: number for number, name in enumerate(names)}
    queries = tuple((text, place[name]) for text, name in asked if name in place)
    if len(names) < 2 or not queries:
        raise ValueError(f"{path} has {len(names)} documents and {len(queries)} queries; retrieval needs 2 and 1")
    return Collection(tuple(documents[name] for name in names), queries)


def read_documents(path: Path) -> list[str]:
    """Returns the documents of a collection, without its queries; of a folder, its text files but hidden ones."""
    if path.is_dir():
        hidden = {file for file in path.rglob("*") if any(part[0] == "." for part in file.relative_to(path).parts)}
        return [read(file) for file in sorted({*path.rglob("*")} - hidden) if file.is_file()]
    return [row["text"] for row in _rows(path) if row["kind"] == "doc"]


KEYS = {"doc": ("id", "text"), "query": ("doc",)}
"""Kind of a line of a collection -> what it must have."""


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the checked lines of a collection."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        lines = read_bytes(path).decode("utf-8-sig").split("\n")  # not splitlines: JSON may contain other line ends
    except UnicodeDecodeError as problem:
        raise ValueError(f"{path} is not text in UTF-8: {problem}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if row["kind"] not in KEYS:
                raise KeyError(f"kind {row['kind']!r}")
            for key in KEYS[row["kind"]]:
                row[key]
            if not isinstance(_words(row) if row["kind"] == "query" else row["text"], str):
                raise TypeError("the text is not a string")
        except (json.JSONDecodeError, KeyError, TypeError) as problem:
            raise ValueError(
                f'{path}, line {number}: each line must be an object {{"kind": "doc", "id", "text"}} or {{"kind": '
                f'"query", "doc", "summary"}}; {type(problem).__name__}: {problem}'
            ) from None
        yield row


def _words(row: dict[str, Any]) -> Any:
    return row[next((name for name in ("summary", "text", "question") if name in row), "summary")]


@dataclass(frozen=True)
class Reader:
    """A model that makes vectors of texts."""

    model: Any
    tokenizer: Any
    pooling: Callable[[Tensor, Tensor], Tensor]  # states [B, L, d] and mask [B, L] -> vectors [B, n] of length 1
    length: int = LENGTH  # tokens that are read of a text, special tokens included

    @property
    def limit(self) -> int:
        """Tokens that the model reads at once."""
        return longest(self.model, self.length)

    def tokens(self, text: str) -> list[int]:
        """Returns the tokens of a text without special tokens, as many as are read."""
        before, after = special_tokens(self.tokenizer)
        needed = self.length - len(before) - len(after)
        # Tokenizing takes time. A token rarely has more than 12 letters, so the beginning of a long text is enough.
        begin = text[: 12 * needed + 1000]
        ids: list[int] = self.tokenizer(begin, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) < needed + 100 and len(begin) < len(text):  # the last tokens are those of a word that was cut
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids[:needed]

    def pieces(self, ids: list[int], size: int) -> list[list[int]]:
        """Returns pieces of `size` tokens, special tokens included."""
        before, after = special_tokens(self.tokenizer)
        room = size - len(before) - len(after)
        if room < 1:
            raise ValueError(f"a piece of {size} tokens has no room beside its special tokens; use more")
        return [[*before, *ids[at : at + room], *after] for at in range(0, max(1, len(ids)), room)]

    def vectors(self, rows: Sequence[list[int]]) -> Tensor:
        """Returns the pooled vectors [n, d] of token sequences."""
        found: dict[int, Tensor] = {}
        for numbers in grouped(rows, BATCH_TOKENS):
            batch = to_device(padded([rows[number] for number in numbers], self.tokenizer), self.model)
            vectors = self.pooling(self._states(batch), batch["attention_mask"]).cpu()
            found.update(zip(numbers, vectors, strict=True))
        return torch.stack([found[number] for number in range(len(rows))])

    def late(self, ids: list[int], size: int) -> Tensor:
        """Returns a vector for each `size` tokens of one pass over all of them, [n, d]."""
        if self.limit < self.length:
            raise ValueError(f"late pooling reads {self.length:,} tokens at once, and the model reads {self.limit:,}")
        (row,) = self.pieces(ids, self.length)
        batch = to_device(padded([row], self.tokenizer), self.model)
        states = self._states(batch)
        parts = states.split(size, dim=1)
        return torch.cat([self.pooling(part, torch.ones(part.shape[:2], device=part.device)) for part in parts]).cpu()

    @torch.no_grad()
    @fast_products()
    def _states(self, batch: dict[str, Tensor]) -> Tensor:
        with evaluating(self.model):
            states: Tensor = self.model.base_model(**batch).last_hidden_state.float()
        return states


class Way(ABC):
    """A way to read a document."""

    many: bool = False
    """Whether a document has several vectors."""

    @property
    @abstractmethod
    def reads(self) -> tuple[object, ...]:
        """What is read. Ways in which it is equal read the same vectors."""

    @abstractmethod
    def read(self, reader: Reader, ids: list[int]) -> Tensor:
        """Returns the vectors [n, d] that the model makes, each of length 1."""

    def of_document(self, read: Tensor) -> Tensor:
        """Returns the vectors [n, d] of the document, each of length 1."""
        return read

    def vectors(self, reader: Reader, ids: list[int]) -> Tensor:
        """Returns the vectors [n, d] of a document, each of length 1."""
        return self.of_document(self.read(reader, ids))


@dataclass(frozen=True)
class Whole(Way):
    """The first tokens at once; by default as many as the model reads."""

    tokens: int | None = None

    @property
    def reads(self) -> tuple[object, ...]:
        return "first", self.tokens

    def read(self, reader: Reader, ids: list[int]) -> Tensor:
        return reader.vectors(reader.pieces(ids, reader.limit if self.tokens is None else self.tokens)[:1])

    def __str__(self) -> str:
        return "whole" if self.tokens is None else f"first {self.tokens:,} tokens"


@dataclass(frozen=True)
class BestPiece(Way):
    """A vector for each piece."""

    tokens: int
    many = True

    @property
    def reads(self) -> tuple[object, ...]:
        return "pieces", self.tokens

    def read(self, reader: Reader, ids: list[int]) -> Tensor:
        return reader.vectors(reader.pieces(ids, self.tokens))

    def __str__(self) -> str:
        return f"pieces of {self.tokens:,}, the best one (many vectors)"


@dataclass(frozen=True)
class Averaged(Way):
    """The mean of the vectors of pieces, scaled to length 1."""

    tokens: int
    most: int = 0  # pieces that are read, evenly spaced; 0 for all

    @property
    def reads(self) -> tuple[object, ...]:
        return ("pieces", self.tokens, self.most) if self.most else ("pieces", self.tokens)

    def read(self, reader: Reader, ids: list[int]) -> Tensor:
        pieces = reader.pieces(ids, self.tokens)
        if 0 < self.most < len(pieces):
            pieces = [pieces[at * len(pieces) // self.most] for at in range(self.most)]
        return reader.vectors(pieces)

    def of_document(self, read: Tensor) -> Tensor:
        return F.normalize(read.mean(0, keepdim=True), dim=-1)

    def __str__(self) -> str:
        return f"{f'{self.most} ' if self.most else ''}pieces of {self.tokens:,}, averaged"


@dataclass(frozen=True)
class LatePieces(Way):
    """A vector for each piece of the token states of one pass."""

    tokens: int
    many = True

    @property
    def reads(self) -> tuple[object, ...]:
        return "late", self.tokens

    def read(self, reader: Reader, ids: list[int]) -> Tensor:
        return reader.late(ids, self.tokens)

    def __str__(self) -> str:
        return f"one pass, pooled in pieces of {self.tokens:,}, the best one (many vectors)"


@dataclass(frozen=True)
class Reading:
    """How well queries find their documents, for one way of reading."""

    way: str
    ndcg: float
    low: float
    high: float
    accuracy: float  # share of queries whose document comes first
    each: tuple[float, ...]  # nDCG@10 of each query


def evaluate(reader: Reader, collection: Collection, way: Way, seed: int = 0) -> Reading:
    """Measures a way of reading. Of a query the model reads as many tokens as it can at once."""
    return evaluate_all(reader, collection, [way], seed)[0]


def evaluate_all(reader: Reader, collection: Collection, ways: Sequence[Way], seed: int = 0) -> list[Reading]:
    """Measures several ways of reading. What they have in common is read once: the queries, and pieces of one size."""
    vectors = read_all(reader, collection, ways)
    return [vectors.score(way, seed=seed) for way in ways]


@dataclass(frozen=True)
class Vectors:
    """The vectors of a collection."""

    queries: Tensor  # [queries, n]
    documents: tuple[dict[tuple[object, ...], Tensor], ...]  # for each, `Way.reads` -> the vectors that were read
    wanted: tuple[int, ...]  # the number of the document of each query

    def score(self, way: Way, map: Callable[[Tensor], Tensor] = lambda vectors: vectors, seed: int = 0) -> Reading:
        """Measures a way of reading, with every vector [n] mapped to another one of length 1."""
        queries = map(self.queries)
        found = [(queries @ way.of_document(map(read[way.reads])).T).amax(1) for read in self.documents]
        return _reading(way, torch.stack(found, dim=1), list(self.wanted), seed)


def read_all(reader: Reader, collection: Collection, ways: Sequence[Way]) -> Vectors:
    """Reads a collection in several ways."""
    queries = reader.vectors([reader.pieces(reader.tokens(text), reader.limit)[0] for text, _ in collection.queries])
    documents = []
    for text in collection.documents:
        ids, found = reader.tokens(text), dict[tuple[object, ...], Tensor]()
        for way in ways:
            if way.reads not in found:
                found[way.reads] = way.read(reader, ids)
        documents.append(found)
    return Vectors(queries, tuple(documents), tuple(number for _, number in collection.queries))


def _reading(way: Way, similarities: Tensor, wanted: list[int], seed: int) -> Reading:
    each = torch.tensor(ndcg(similarities, wanted), dtype=torch.float64)
    low, high = interval(each, torch.tensor(wanted), seed)
    return Reading(str(way), float(each.mean()), low, high, float((each == 1).double().mean()), tuple(each.tolist()))


def ndcg(similarities: Tensor, wanted: Sequence[int]) -> list[float]:
    """Returns nDCG@10 of each query, from similarities [queries, documents] and the number of its document.

    A document that is as similar as the wanted one counts as ranked before it.
    """
    if not bool(torch.isfinite(similarities).all()):
        raise ValueError("some similarities are not finite numbers: the model returned NaN or infinity")
    own = similarities.gather(1, torch.tensor(wanted)[:, None])
    ranks = (similarities >= own).sum(1).tolist()
    return [1 / math.log2(1 + rank) if rank <= CUT else 0.0 for rank in ranks]


def interval(each: Tensor, document: Tensor, seed: int = 0) -> tuple[float, float]:
    """Returns the 95 % interval of the mean over queries, by drawing documents with all of their queries."""
    names, document = torch.unique(document, return_inverse=True)
    count = len(names)
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, document, each.double())
    sizes = torch.bincount(document, minlength=count).double()
    drawn = torch.randint(count, (DRAWS, count), generator=torch.Generator().manual_seed(seed))
    means = sums[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
