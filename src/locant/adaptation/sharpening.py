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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.adaptation.retrieval import LENGTH, Reader, read_documents
from locant.analysis.text import special_tokens
from locant.hf.modes import evaluating
from locant.runs import files
from locant.runs.budget import spell_time
from locant.runs.new_folder import new_folder
from locant.runs.untrusted import shortened

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

PIECE = 256
"""Tokens of a piece, if the encoder reads as many."""
SHRINK = 0.5
"""Fixed before QMSum was measured, from trials on novels and SQuAD (docs/log.md)."""
MOST = 500
"""Documents that are read, at most. More than 197 were not measured."""
SMALLEST_SHRINK = 1e-6
"""Below it the map overflows float32 where pieces do not differ at all in a direction."""
PROBE = 200
"""Characters of the text on which the reader is compared with `encode`."""
SAME = 1 - 1e-5
"""Cosine of two vectors of one text that count as equal."""
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
            return [
                "it was not checked whether the map helps on documents that it has not seen: there are too few "
                "documents, or all their pieces are equal"
            ]
        if self.after > self.before:
            return []
        return [
            f"it is not shown that the map tells these documents apart: {self.after:.1%} of the {self.pieces} "
            f"pieces find the rest of their document, {self.before:.1%} before. Measure retrieval before you use it"
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
    other = next((p.dtype for p in encoder.parameters() if p.is_floating_point() and p.dtype != torch.float32), None)
    if other is not None:
        raise ValueError(f"expected float32 weights, got {other}; call model.float() first")
    return Reader(transformer.auto_model, encoder.tokenizer, AfterTransformer(encoder), length)


def at_once(encoder: SentenceTransformer, reader: Reader) -> int:
    """Returns the tokens that `encode` reads of a text, special tokens included: it cuts texts at `max_seq_length`."""
    return min(reader.limit, getattr(encoder, "max_seq_length", None) or reader.limit)


def sharpen(
    model: SentenceTransformer | str | Path,
    documents: Iterable[str] | str | Path,
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
    documents   texts; or the path of a collection's file or of a folder of text files (`read_documents`). No labels are
                used.
    piece       tokens of a piece, special tokens included; by default 256, or as many as the encoder reads at once.
    length      tokens that are read of a document.
    most        documents that are read; if there are more, those evenly spaced over them.

    If it fails or is interrupted, the encoder is as it was.
    """
    encoder = opened(model)
    with torch.inference_mode(False), torch.autocast(encoder.device.type, enabled=False):
        reader, size, rows = prepared(encoder, documents, piece=piece, length=length, most=most, shrink=shrink)
        with nullcontext() if out is None else new_folder(Path(out)) as folder:
            with evaluating(encoder):
                vectors = _read(reader, rows, on_stage, on_progress)
            before, after = _checked(vectors, shrink)
            matrix = sharpening(vectors, shrink)
            found = Sharpened(encoder, matrix, len(rows), sum(map(len, rows)), before, after)
            with _appended(encoder, matrix):
                if folder is not None:
                    encoder.save(str(folder))
                    numbers = {"documents": found.documents, "pieces": found.pieces, "before": before, "after": after}
                    files.write_json(folder / FILE, {**numbers, "piece": size, "length": length, "shrink": shrink})
    return found


def prepared(
    encoder: SentenceTransformer, documents: Iterable[str] | str | Path, *, piece: int | None, length: int, most: int,
    shrink: float,
) -> tuple[Reader, int, list[list[list[int]]]]:  # fmt: skip
    """Checks everything before anything takes time; returns a reader, the size of a piece, and pieces by document."""
    if not SMALLEST_SHRINK <= shrink <= 1:
        raise ValueError(f"shrink must be from {SMALLEST_SHRINK:g} to 1, got {shrink}")
    if most < 2:
        raise ValueError(f"most must be at least 2, got {most}")
    texts = _texts(documents)
    reader = reader_of(encoder, length)
    before, after = special_tokens(reader.tokenizer)
    least, limit = len(before) + len(after) + 1, at_once(encoder, reader)
    if length < least:
        raise ValueError(f"length must be at least {least}, got {length}")
    size = min(PIECE, limit) if piece is None else piece
    if not least <= size <= limit:
        raise ValueError(
            f"piece must be from {least} to {limit:,}, the tokens that the encoder reads at once; got {size:,}"
        )
    # No token has less than a byte, so these have one piece; without them `most` long documents can be chosen.
    long = [text for text in texts if len(text.encode()) > size - least] or texts
    chosen = [long[at * len(long) // most] for at in range(most)] if len(long) > most else long
    rows = [pieces for pieces in (reader.pieces(reader.tokens(text), size) for text in chosen) if len(pieces) > 1]
    if len(rows) < 2:
        looked_at = len(texts) - len(long) + len(chosen)
        raise ValueError(
            f"{len(rows)} of {looked_at} documents have more than one piece of {size:,} tokens, and at least 2 "
            f"must; pass longer or more documents, a smaller piece, or a larger length (it is {length:,})"
        )
    _check_vectors(encoder, reader, chosen[0][:PROBE])
    return reader, size, rows


def _texts(documents: Iterable[str] | str | Path) -> list[str]:
    """The documents as a list of texts."""
    if isinstance(documents, (str, Path)):
        there = False
        with suppress(OSError):  # a long text is no file name
            there = Path(documents).exists()
        if not there:
            raise FileNotFoundError(
                f"there is no file or folder {shortened(str(documents))}; pass the path of a collection or of a folder "
                f"of texts, or a list of texts"
            )
        documents = read_documents(Path(documents))
    if isinstance(documents, Mapping) or not isinstance(documents, Iterable):
        raise TypeError(f"documents must be texts or a path, got {type(documents).__name__}; pass a list of texts")
    texts = list(documents)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"document {number} must be a text (str), got {type(text).__name__}")
    if not texts:
        raise ValueError("there are no documents; pass a list of texts, a collection, or a folder of text files")
    return texts


def _check_vectors(encoder: SentenceTransformer, reader: Reader, text: str) -> None:
    """Raises ValueError if the reader's vector of a text is not that of `encode`: the map would be of other vectors."""
    row = reader.pieces(reader.tokens(text), at_once(encoder, reader))[0]
    try:
        own = reader.vectors([row])[0]
    except (KeyError, RuntimeError) as problem:
        names = ", ".join(type(module).__name__ for module in encoder)
        raise ValueError(
            f"cannot compute vectors of pieces with the modules {names} ({type(problem).__name__}: {problem}); "
            f"expected modules that read the last hidden states of a transformer"
        ) from None
    encoded: Any = encoder.encode([text], convert_to_tensor=True, show_progress_bar=False)
    cosine = float(F.cosine_similarity(own.double(), encoded[0].cpu().double(), dim=0))
    if cosine < SAME:
        prompt = getattr(encoder, "default_prompt_name", None)
        reason = (
            f"it writes its prompt {prompt!r} before every text; set default_prompt_name to None to make the map "
            f"without it"
            if prompt
            else "it has modules that read more than the last hidden states of its transformer, which is not supported"
        )
        raise ValueError(
            f"the encoder's own vector of a text differs from that of its tokens (cosine {cosine:.4f}): {reason}"
        )


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
    """The shares of `own_document` before and after, with the map of the documents of the other half.

    None if there are too few documents, or if all pieces of the documents of a half are equal.
    """
    if len(documents) < 4:
        return None, None
    parts = [part.double() for part in documents]
    try:
        halves = [sharpening(parts[1::2], shrink), sharpening(parts[::2], shrink)]
    except ValueError:
        return None, None
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


def opened(model: SentenceTransformer | str | Path) -> SentenceTransformer:
    """Returns the encoder; OSError with its name if it cannot be opened."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as missing:
        raise ImportError(
            f"locant.sharpen needs sentence-transformers ({missing}); install it with: pip install 'locant[sentences]'"
        ) from missing
    if isinstance(model, (str, Path)):
        try:
            model = SentenceTransformer(str(model))
        except OSError as problem:
            raise OSError(f"{model} is no folder here, and cannot be opened as a hub name: {problem}") from None
    if not isinstance(model, SentenceTransformer):
        raise TypeError(f"model must be a SentenceTransformer, a folder or a hub name, got {type(model).__name__}")
    return model


@contextmanager
def _appended(encoder: SentenceTransformer, matrix: Tensor) -> Iterator[None]:
    """Appends x → A x / ‖A x‖ to an encoder, whose vectors may have any length; removes it if the block raises."""
    modules: Any = _modules()
    size, trained = len(matrix), any(parameter.requires_grad for parameter in encoder.parameters())
    weight = matrix.float().to(encoder.device)  # symmetric, so x ↦ x Aᵀ of a linear layer is A x
    with torch.random.fork_rng(devices=[]):  # a new layer draws weights
        dense = modules.Dense(size, size, bias=False, activation_function=torch.nn.Identity(), init_weight=weight)
    first = max((int(name) for name, _ in encoder.named_children() if name.isdigit()), default=-1) + 1
    added = {str(first): dense.requires_grad_(trained), str(first + 1): modules.Normalize()}
    for name, module in added.items():  # not encoder.append: it names a module by their number, which may be taken
        encoder.add_module(name, module.train(encoder.training))
    try:
        yield
    except BaseException:
        for name in added:
            delattr(encoder, name)
        raise


def _modules() -> ModuleType:
    try:
        return import_module("sentence_transformers.sentence_transformer.modules")
    except ImportError:  # before version 6
        return import_module("sentence_transformers.models")
