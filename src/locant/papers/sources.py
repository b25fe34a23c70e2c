"""The data of the reproductions: which files, under which names in one folder, and where to get them.

    DATA/wikitext-2-raw/     wiki.train.raw, wiki.valid.raw
    DATA/books/              *.txt, public-domain prose
    DATA/glue/CoLA/ …        train.tsv, dev.tsv of each task
    DATA/squad/              train-v1.1.json, dev-v1.1.json
    DATA/models/NAME/        pretrained models: all-MiniLM-L6-v2; bert-base-uncased for the preset paper
    DATA/tables/             *.safetensors with position tables of other models
    DATA/stories/            stories15M.bin and tokenizer.bin of llama2.c
    DATA/qmsum.jsonl         LongEmbed's QMSum

Files may be compressed as .xz or .gz.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locant.runs.text_source import OPENERS, read

ENDINGS = ("", *OPENERS)
TEXT = (".txt", ".raw", ".tsv", ".json", ".jsonl")
"""Endings of files that are read as text, before a compression is added."""


@dataclass(frozen=True)
class Source:
    """A data set or a model: its place in the data folder, the files that it must have, and where to get it."""

    place: str
    files: tuple[str, ...]  # patterns below `place`; none if `place` is a file
    get: str

    def find(self, folder: Path) -> Path | None:
        """Returns its path in the data folder; None if a file is missing."""
        if not self.files:
            found = [folder / f"{self.place}{ending}" for ending in ENDINGS]
            return next((path for path in found if path.is_file()), None)
        path = folder / self.place
        there = all(any(list(path.glob(pattern + ending)) for ending in ENDINGS) for pattern in self.files)
        return path if there else None

    def check_text(self, folder: Path) -> None:
        """Raises ValueError if a file of text is not in UTF-8 or cannot be decompressed."""
        path = self.find(folder)
        patterns = [pattern + ending for pattern in self.files for ending in ENDINGS]
        found = [path] if path and path.is_file() else [one for each in patterns for one in (path or folder).glob(each)]
        for one in found:
            if one.with_suffix("" if one.suffix in OPENERS else one.suffix).suffix in TEXT:
                read(one)

    def missing(self, folder: Path) -> str:
        """Returns a line that names the files and where to get them."""
        files = ", ".join(str(folder / self.place / name) for name in self.files) or str(folder / self.place)
        return f"{files}: {self.get}"


def _glue(task: str) -> Source:
    return Source(f"glue/{task}", ("train.tsv", "dev.tsv"), f"GLUE's own files of {task}, gluebenchmark.com/tasks")


SOURCES: dict[str, Source] = {
    "wikitext": Source(
        "wikitext-2-raw",
        ("wiki.train.raw", "wiki.valid.raw"),
        "WikiText-2, raw (Merity et al. 2016), the data set Salesforce/wikitext, wikitext-2-raw-v1, on the hub",
    ),
    "books": Source("books", ("*.txt",), "any public-domain prose, such as the books of Project Gutenberg in NLTK"),
    **{f"glue:{task}": _glue(task) for task in ("CoLA", "SST-2", "MRPC", "STS-B", "RTE", "WNLI")},
    "squad": Source("squad", ("train*.json", "dev*.json"), "SQuAD v1.1, rajpurkar.github.io/SQuAD-explorer"),
    "minilm": Source(
        "models/all-MiniLM-L6-v2",
        ("config.json", "model.safetensors", "tokenizer.json"),
        "the model sentence-transformers/all-MiniLM-L6-v2 on the hub",
    ),
    "bert": Source(
        "models/bert-base-uncased",
        ("config.json", "model.safetensors", "tokenizer.json"),
        "the model google-bert/bert-base-uncased on the hub",
    ),
    "tables": Source("tables", ("*.safetensors",), "position tables cut out of models that you have, one key each"),
    "stories": Source("stories", ("stories15M.bin", "tokenizer.bin"), "stories15M of github.com/karpathy/llama2.c"),
    "qmsum": Source("qmsum.jsonl", (), "QMSum as LongEmbed uses it: github.com/Yale-LILY/QMSum, data/ALL"),
}


ENCODER = "encoder"
"""Stands for the pretrained encoder of a preset: the source that its sizes name."""


def find_source(name: str, folder: Path | None) -> Path:
    """Returns the path of a source; FileNotFoundError if it is missing."""
    check_sources([name], folder)
    assert folder is not None
    found = SOURCES[name].find(folder)
    assert found is not None
    return found


def name_of_source(name: str, size: Any) -> str:
    """Returns the name of a source; of ENCODER, the one that the sizes of a preset name."""
    return str(size.encoder) if name == ENCODER else name


def check_sources(names: Iterable[str], folder: Path | None) -> None:
    """Raises FileNotFoundError with every missing file and where to get it."""
    wanted = [SOURCES[name] for name in dict.fromkeys(names)]
    if not wanted:
        return
    if folder is None:
        listed = "\n".join(f"  {source.missing(Path('DATA'))}" for source in wanted)
        raise FileNotFoundError(f"this needs data in one folder; name it with --data. It must have\n{listed}")
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    lines = [f"  {source.missing(folder)}" for source in wanted if source.find(folder) is None]
    if lines:
        raise FileNotFoundError("these files are missing:\n" + "\n".join(lines))


def check_texts(names: Iterable[str], folder: Path | None) -> None:
    """Raises ValueError if a file of text cannot be read. The files must be there."""
    for name in dict.fromkeys(names):
        SOURCES[name].check_text(folder or Path())
