"""The command that sharpens a sentence encoder for a collection: `locant sharpen`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from sentence_transformers import SentenceTransformer

from locant.adaptation import sharpening
from locant.adaptation.retrieval import (
    Averaged,
    BestPiece,
    Reading,
    Way,
    Whole,
    read_all,
    read_collection,
    read_documents,
)
from locant.adaptation.scores import Stsb
from locant.cli.terminal import console
from locant.experiments.run import quiet
from locant.hf.modes import evaluating
from locant.hf.pooling import Pooling
from locant.runs.new_folder import check_new, check_writable


def sharpen(
    model: str, documents: Path, out: Path, piece: int | None, length: int, most: int, shrink: float,
    evaluate: list[str] | None,
) -> None:  # fmt: skip
    """Sharpens an encoder, saves it, and prints what the map changes."""
    quiet()
    check_new(out)
    check_writable(out)
    tasks = [_task(each) for each in evaluate or []]
    texts = read_documents(documents)
    encoder = sharpening.opened(model)
    if tasks:  # they read before sharpen() checks its arguments
        sharpening.prepared(encoder, texts, piece=piece, length=length, most=most, shrink=shrink)
    for task in tasks:
        task.read(encoder, length, piece)
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
                   console=console, transient=True)  # fmt: skip
    with bar:
        job = bar.add_task("opening", total=None)

        def on_stage(stage: str) -> None:
            bar.update(job, description=stage)
            if not console.is_terminal:  # a log has no bar
                console.print(escape(stage), highlight=False)

        done = sharpening.sharpen(
            encoder, texts, out=out, piece=piece, length=length, most=most, shrink=shrink, on_stage=on_stage,
            on_progress=lambda read, total: bar.update(job, completed=read, total=total),
        )  # fmt: skip
    if tasks:
        table = Table("", "before", "after")
        for task in tasks:
            for row in task.rows(done):
                table.add_row(*row)
        console.print(table)
    if done.before is not None:
        console.print(
            f"pieces that find the rest of their document: {done.before:.1%} before, {done.after:.1%} after "
            f"({done.pieces:,} pieces, with the map of the other half of the documents)",
            highlight=False,
        )
    for notice in done.notices:
        console.print(f"[yellow]note[/] {escape(notice)}", highlight=False)
    transformer: Any = encoder[0]
    swapped = "import locant, and then " if hasattr(transformer.auto_model.config, "locant") else ""
    console.print(
        f"saved: {out}    open it with {swapped}SentenceTransformer({str(out)!r})", markup=False, highlight=False
    )


class _Similarity:
    """STS-B."""

    def __init__(self, where: str) -> None:
        self.where = where
        Stsb(where, Pooling())  # raises if the data is missing

    def read(self, encoder: SentenceTransformer, length: int, piece: int | None) -> None:
        """Measures the encoder before it is sharpened."""
        self.before = self._measured(encoder)

    def rows(self, done: sharpening.Sharpened) -> list[tuple[str, str, str]]:
        """Returns one row of the table: the name of the score, before and after."""
        return [("STS-B dev, Spearman", f"{self.before:.4f}", f"{self._measured(done.model):.4f}")]

    @torch.no_grad()
    def _measured(self, encoder: SentenceTransformer) -> float:
        reader = sharpening.reader_of(encoder)
        with evaluating(encoder):
            return Stsb(self.where, reader.pooling)(reader.model, reader.tokenizer)


class _Retrieval:
    """nDCG@10 of a collection, for each way of reading. A collection is read once."""

    def __init__(self, where: str) -> None:
        self.collection = read_collection(Path(where))

    def read(self, encoder: SentenceTransformer, length: int, piece: int | None) -> None:
        """Reads the collection before the encoder is sharpened."""
        reader = sharpening.reader_of(encoder, length)
        at_once = sharpening.at_once(encoder, reader)
        size = min(piece or sharpening.PIECE, at_once)
        self.ways: list[Way] = [Whole(at_once), Averaged(size), BestPiece(size)]
        console.print(f"reading {len(self.collection.documents):,} documents to measure retrieval")
        with evaluating(encoder):
            self.vectors = read_all(reader, self.collection, self.ways)

    def rows(self, done: sharpening.Sharpened) -> list[tuple[str, str, str]]:
        """Returns a row of the table for each way of reading: its nDCG@10 before and after."""
        pairs = [(self.vectors.score(way), self.vectors.score(way, done.map)) for way in self.ways]
        return [(f"nDCG@10, {before.way}", _spelled(before), _spelled(after)) for before, after in pairs]


def _spelled(found: Reading) -> str:
    return f"{found.ndcg:.3f} ({found.low:.3f} … {found.high:.3f})"


def _task(wanted: str) -> _Similarity | _Retrieval:
    name, _, where = wanted.partition(":")
    if name not in TASKS or not where:
        raise ValueError(f"a score must be stsb:FOLDER or longembed:FILE, got {wanted!r}")
    return TASKS[name](where)


TASKS: dict[str, type[_Similarity] | type[_Retrieval]] = {"stsb": _Similarity, "longembed": _Retrieval}
