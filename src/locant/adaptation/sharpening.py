"""Sharpens a sentence encoder for a collection: a linear map shrinks directions in which pieces of a document differ.

Every document d is read in pieces, and x_di is the vector of piece i, scaled to length 1. With their covariance around
the mean of their document,

    C = Σ_d Σ_i (x_di − x̄_d)(x_di − x̄_d)ᵀ / Σ_d (n_d − 1)
    M = (1 − shrink) · C + shrink · (tr C / n) · 1
    x → A x / ‖A x‖,    A = (M · n / tr C)^(−1/2)

for documents and queries alike. What changes from piece to piece of one document (a speaker's way of talking, the
subject of the moment) does not tell it from others. The map is within-class covariance normalization (Hatch, Kajarekar
& Stolcke 2006) with documents as classes, so it needs no labels; M is shrunk as in regularized discriminant analysis
(Friedman 1989). shrink = 1 changes nothing.

The map is a linear layer and a normalization, so the sharpened encoder is an ordinary sentence-transformers model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.adaptation.retrieval import LENGTH, Reader, read_documents
from locant.hf.modes import evaluating
from locant.runs import files
from locant.runs.budget import spell_time
from locant.runs.new_folder import new_folder

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

PIECE = 256
"""Tokens of a piece, if the encoder reads as many."""
SHRINK = 0.5
"""Fixed before QMSum was measured, from trials on novels and SQuAD (docs/log.md)."""
MOST = 500
"""Documents that are read, at most. More than 197 were not measured."""
FILE = "sharpen.json"
"""In the folder of a sharpened encoder: what it was made of."""


@dataclass(frozen=True)
class Sharpened:
    """A sharpened encoder, and whether pieces of documents find the rest of their document.

    The map of this check was computed from the other half of the documents. `before` and `after` are None with fewer
    than four documents.
    """

    model: SentenceTransformer
    matrix: Tensor  # A, float64 [n, n]
    documents: int  # that have more than one piece
    pieces: int
    before: float | None  # share of pieces that are nearest to the rest of their own document
    after: float | None

    def map(self, vectors: Tensor) -> Tensor:
        """Returns the mapped vectors [B, n], from those of the encoder before it was sharpened."""
        mapped: Tensor = vectors @ self.matrix.to(vectors)
        return F.normalize(mapped, dim=-1)

    @property
    def notices(self) -> list[str]:
        """Returns why the map may not help, if so."""
        if self.before is None or self.after is None:
            return ["there are too few documents to check whether the map helps on documents that it has not seen"]
        if self.after > self.before:
            return []
        return [
            f"it is not shown that the map tells these documents apart: {self.after:.1%} of the pieces find the rest "
            f"of their document, {self.before:.1%} before. Measure retrieval before you use it"
        ]


class AfterTransformer:
    """The modules of a sentence-transformers model behind its transformer, as a pooling for `Reader` and scores."""

    def __init__(self, encoder: SentenceTransformer) -> None:
        self.modules: list[Any] = list(encoder)[1:]

    @torch.no_grad()
    def __call__(self, states: Tensor, mask: Tensor) -> Tensor:
        """Returns the vectors [B, n] of texts, of length 1, from states [B, L, d] and a mask [B, L]."""
        features: dict[str, Tensor] = {"token_embeddings": states, "attention_mask": mask}
        for module in self.modules:
            features = module(features)
        return F.normalize(features["sentence_embedding"], dim=-1)


def reader_of(encoder: SentenceTransformer, length: int = LENGTH) -> Reader:
    """Returns a reader that makes the vectors of a sentence-transformers model, dense layers included."""
    transformer = encoder[0]
    if getattr(encoder, "truncate_dim", None) is not None:
        raise ValueError(
            f"the encoder truncates its vectors to {encoder.truncate_dim} numbers, and the map mixes all of them; open "
            f"it without truncate_dim"
        )
    if not hasattr(transformer, "auto_model"):
        raise ValueError(
            f"expected a sentence encoder that begins with a transformer, got {type(transformer).__name__}; only those "
            f"read pieces of tokens"
        )
    if transformer.auto_model.dtype != torch.float32:
        raise ValueError(f"expected float32 weights, got {transformer.auto_model.dtype}; call model.float() first")
    return Reader(transformer.auto_model, encoder.tokenizer, AfterTransformer(encoder), length)


def sharpen(
    model: SentenceTransformer | str | Path,
    documents: Sequence[str] | Path,
    *,
    out: str | Path | None = None,
    piece: int | None = None,
    length: int = LENGTH,
    most: int = MOST,
    shrink: float = SHRINK,
    on_stage: Callable[[str], None] = lambda words: None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Sharpened:
    """Adds the map of this file to a sentence encoder, in place, and saves it if `out` is given.

    model       a SentenceTransformer, a folder or a hub name.
    documents   texts; or a file of a collection, or a folder of text files (`read_documents`). No labels are used.
    piece       tokens of a piece; by default 256, or as many as the encoder reads.
    length      tokens that are read of a document.
    most        documents that are read; if there are more, those evenly spaced over them.
    """
    if isinstance(documents, (str, Path)):
        documents = read_documents(Path(documents))
    if not 0 < shrink <= 1:
        raise ValueError(f"shrink must be above 0 and at most 1, got {shrink}")
    if most < 2:
        raise ValueError(f"most must be at least 2, got {most}")
    encoder = _opened(model)
    reader = reader_of(encoder, length)
    size = min(PIECE, reader.limit) if piece is None else piece
    if not 1 <= size <= reader.limit:
        raise ValueError(f"piece must be from 1 to {reader.limit:,}, the tokens that the model reads; got {size:,}")
    if len(documents) > most:
        documents = [documents[at * len(documents) // most] for at in range(most)]
    rows = [pieces for pieces in (reader.pieces(reader.tokens(text), size) for text in documents) if len(pieces) > 1]
    if len(rows) < 2:
        raise ValueError(
            f"{len(rows)} of {len(documents)} documents have more than one piece of {size:,} tokens, and at least 2 "
            f"must; pass longer or more documents, or a smaller piece"
        )
    with nullcontext() if out is None else new_folder(Path(out)) as folder:
        with evaluating(encoder):
            vectors = _read(reader, rows, on_stage, on_progress)
        before, after = _checked(vectors, shrink)
        matrix = sharpening(vectors, shrink)
        found = Sharpened(encoder, matrix, len(rows), sum(map(len, rows)), before, after)
        _append(encoder, matrix)
        if folder is not None:
            encoder.save(str(folder))
            numbers = {"documents": found.documents, "pieces": found.pieces, "before": before, "after": after}
            files.write_json(folder / FILE, {**numbers, "piece": size, "length": length, "shrink": shrink})
    return found


def sharpening(documents: Sequence[Tensor], shrink: float = SHRINK) -> Tensor:
    """Returns the matrix A, float64 [n, n], from the vectors [pieces, n] of each document."""
    parts = [part.double() for part in documents]
    centred = torch.cat([part - part.mean(0) for part in parts])
    covariance = centred.T @ centred / (len(centred) - len(parts))
    mean = covariance.trace() / len(covariance)
    if not bool(mean > 0) or not bool(torch.isfinite(mean)):
        raise ValueError(f"the pieces of documents have a mean variance of {float(mean):.3g}; it must be above 0")
    values, directions = torch.linalg.eigh(covariance / mean)
    matrix: Tensor = directions @ torch.diag(((1 - shrink) * values.clamp(min=0) + shrink).rsqrt()) @ directions.T
    return matrix


def own_document(documents: Sequence[Tensor], matrices: Sequence[Tensor]) -> float:
    """Returns the share of pieces that are nearest to the rest of their own document, among all documents.

    documents   vectors [pieces, n] of each, two or more.
    matrices    for each document, the map [n, n] that is applied to all vectors when its pieces are the queries.
    """
    means, hits, count = torch.stack([part.mean(0) for part in documents]), 0, 0
    for number, (part, matrix) in enumerate(zip(documents, matrices, strict=True)):
        asking = F.normalize(part @ matrix, dim=-1)
        found = asking @ F.normalize(means @ matrix, dim=-1).T
        rest = F.normalize((part.sum(0) - part) @ matrix, dim=-1)
        own = (asking * rest).sum(-1)
        found[:, number] = -torch.inf
        hits, count = hits + int((own > found.amax(1)).sum()), count + len(part)
    return hits / count


def _checked(documents: list[Tensor], shrink: float) -> tuple[float | None, float | None]:
    """The shares of `own_document` before and after, with the map of the documents of the other half."""
    if len(documents) < 4:
        return None, None
    parts = [part.double() for part in documents]
    halves = [sharpening(parts[1::2], shrink), sharpening(parts[::2], shrink)]
    same = torch.eye(parts[0].shape[1], dtype=torch.float64)
    count = len(parts)
    return own_document(parts, [same] * count), own_document(parts, [halves[at % 2] for at in range(count)])


def _read(
    reader: Reader,
    rows: list[list[list[int]]],
    on_stage: Callable[[str], None],
    on_progress: Callable[[int, int], None],
) -> list[Tensor]:
    """The vectors of all pieces, document by document."""
    total, done, start, found = sum(map(len, rows)), 0, time.monotonic(), list[Tensor]()
    for number, pieces in enumerate(rows):
        found.append(reader.vectors(pieces))
        done += len(pieces)
        if number == 0:
            seconds = (time.monotonic() - start) / done * total
            on_stage(f"reading {len(rows):,} documents in {total:,} pieces, about {spell_time(seconds)}")
        on_progress(done, total)
        if not bool(torch.isfinite(found[-1]).all()):
            raise ValueError("some vectors are not finite numbers: the model returned NaN or infinity")
    return found


def _opened(model: SentenceTransformer | str | Path) -> SentenceTransformer:
    """The encoder, in evaluation mode."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as missing:
        raise ImportError(
            f"locant.sharpen needs sentence-transformers ({missing}); install it with: pip install 'locant[sentences]'"
        ) from missing
    if isinstance(model, (str, Path)):
        model = SentenceTransformer(str(model))
    if not isinstance(model, SentenceTransformer):
        raise TypeError(f"model must be a SentenceTransformer, a folder or a hub name, got {type(model).__name__}")
    return model


def _append(encoder: SentenceTransformer, matrix: Tensor) -> None:
    """Appends x → A x / ‖A x‖ to an encoder. Its vectors may have any length."""
    modules: Any = _modules()
    size = len(matrix)
    weight = matrix.float().to(encoder.device)  # symmetric, so x ↦ x Aᵀ of a linear layer is A x
    dense = modules.Dense(size, size, bias=False, activation_function=torch.nn.Identity(), init_weight=weight)
    encoder.append(dense)
    encoder.append(modules.Normalize())


def _modules() -> ModuleType:
    try:
        return import_module("sentence_transformers.sentence_transformer.modules")
    except ImportError:  # before version 6
        return import_module("sentence_transformers.models")
