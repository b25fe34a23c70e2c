"""Where a text comes from: a file, a folder, a name of the hub, or what is on every machine with Python."""

from __future__ import annotations

import gzip
import lzma
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPENERS: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}
HELD_OUT = 20
"""One file in so many, or one part of a text in so many, is kept for testing."""
NOT_PYTHON = {"site-packages", "dist-packages", "test", "tests"}
"""Folders of the standard library that are not its source."""


@dataclass(frozen=True)
class Text:
    """What is trained on and what is tested on, and where they are from."""

    train: str
    test: str
    name: str


def read(path: Path) -> str:
    """A file of text in UTF-8, plain or packed as .xz or .gz."""
    opener = OPENERS.get(path.suffix)
    try:
        if opener is None:
            return path.read_text(encoding="utf-8")
        with opener(path, "rt", encoding="utf-8") as file:
            return str(file.read())
    except UnicodeDecodeError as problem:
        raise ValueError(f"{path} is not text in UTF-8: {problem}") from None
    except (lzma.LZMAError, EOFError, gzip.BadGzipFile) as problem:
        raise ValueError(f"{path} cannot be unpacked: {problem}") from None


def text(where: str | None) -> Text:
    """The text named by `--data`; None is the source of the standard library of Python."""
    if where is None:
        return _standard_library()
    path = Path(where)
    if path.is_file():
        return _split([read(path)], path.name)
    if path.is_dir():
        return _folder(path)
    if where.startswith((".", "/", "~")) or path.suffix:
        raise FileNotFoundError(f"there is no file or folder {where}")
    return _hub(where)


def _folder(path: Path) -> Text:
    files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    if not files:
        raise ValueError(f"{path} has no files")
    named = {
        part: [file for file in files if any(word in file.name.lower() for word in words)]
        for part, words in {"train": ("train",), "test": ("valid", "dev"), "last": ("test",)}.items()
    }
    held_out = named["test"] or named["last"]
    if named["train"] and held_out:
        return Text(_join(map(read, named["train"])), _join(map(read, held_out)), path.name)
    return _split([read(file) for file in files], path.name)


def _split(pieces: list[str], name: str) -> Text:
    """Every 20th piece is held out; of a few long ones, the end."""
    if len(pieces) >= HELD_OUT:
        kept = [piece for number, piece in enumerate(pieces, 1) if number % HELD_OUT]
        return Text(_join(kept), _join(pieces[HELD_OUT - 1 :: HELD_OUT]), name)
    whole = _join(pieces)
    if not whole.strip():
        raise ValueError(f"{name} is empty")
    at = len(whole) - len(whole) // HELD_OUT
    return Text(whole[:at], whole[at:], name)


def _join(pieces: object) -> str:
    return "\n".join(pieces)  # type: ignore[arg-type]


def _standard_library() -> Text:
    root, files = Path(sysconfig.get_path("stdlib")), []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in NOT_PYTHON]  # not even looked into: it can be large
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    pieces = [file.read_text(encoding="utf-8", errors="replace") for file in sorted(files)]
    if sum(map(len, pieces)) < 1_000_000:
        raise ValueError(f"the source of Python is not in {root}; name a text with --data")
    return _split(pieces, "the source of Python's standard library")


def _hub(name: str) -> Text:
    from datasets import load_dataset

    dataset, _, config = name.partition(":")
    try:
        parts = load_dataset(dataset, config or None)
    except Exception as problem:  # offline, unknown, gated: datasets has an exception for each
        raise ValueError(f"{name} is no file or folder here, and the hub does not give it: {problem}") from None
    column = "text"
    if "train" not in parts or column not in parts["train"].column_names:
        raise ValueError(f"{name} must have a part 'train' with a column 'text'; got {parts}")
    rest = [part for part in ("validation", "test") if part in parts]
    if rest:
        return Text(_join(parts["train"][column]), _join(parts[rest[0]][column]), name)
    return _split(list(parts["train"][column]), name)
