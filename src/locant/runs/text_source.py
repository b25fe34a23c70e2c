"""Reads texts: from a file, a folder, a data set of the Hugging Face hub, or the source of Python's standard library.

Every text is split into a training part and a test part.
"""

from __future__ import annotations

import gzip
import lzma
import os
import sysconfig
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locant.runs import untrusted
from locant.runs.machine_memory import available, spell

OPENERS: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}
SMALL, DENSEST = 64 * 2**20, 100
"""A compressed file may have this many bytes of content, or so many times its own size if that is more."""
HELD_OUT = 20
"""Every 20th file is held out for testing; of a text in fewer files, the last 20th."""
NOT_PYTHON = {"site-packages", "dist-packages", "test", "tests"}
"""Folders inside the standard library's that are not its source."""


@dataclass(frozen=True)
class Text:
    """The training part and the test part of a text, and its name."""

    train: str
    test: str
    name: str


def read(path: Path) -> str:
    """Returns the content of a UTF-8 text file, plain or compressed as .xz or .gz."""
    try:
        return read_bytes(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as problem:
        raise ValueError(f"{path} is not text in UTF-8: {problem}") from None


def read_bytes(path: Path) -> bytes:
    """Returns the content of a file, plain or compressed as .xz or .gz; ValueError if it does not fit into memory."""
    size, free, opener = untrusted.size_of(path), available(), OPENERS.get(path.suffix)
    if free is not None and size > free:
        raise ValueError(f"{path} has {spell(size)}, but only {spell(free)} of memory is free")
    if opener is None:
        return path.read_bytes()
    most = max(SMALL, DENSEST * size)
    try:
        with opener(path, "rb") as file:
            content: bytes = file.read(most + 1)
    except (lzma.LZMAError, EOFError, gzip.BadGzipFile, zlib.error) as problem:
        raise ValueError(f"{path} cannot be decompressed: {problem}") from None
    if len(content) > most:
        raise ValueError(
            f"{path} has {spell(size)} and decompresses to more than {spell(most)}; text does not compress so well. If "
            f"it is right, decompress it first"
        )
    return content


def text(where: str | None) -> Text:
    """Returns the text at a path or under a hub name; None means the source of Python's standard library."""
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
    """Files named train, valid, dev or test decide the split; without them every 20th file is held out."""
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
    """Holds out every 20th piece; of fewer than 20 pieces, the last 20th of the text."""
    if len(pieces) >= HELD_OUT:
        kept = [piece for number, piece in enumerate(pieces, 1) if number % HELD_OUT]
        return Text(_join(kept), _join(pieces[HELD_OUT - 1 :: HELD_OUT]), name)
    whole = _join(pieces)
    if not whole.strip():
        raise ValueError(f"{name} is empty")
    at = len(whole) - len(whole) // HELD_OUT
    return Text(whole[:at], whole[at:], name)


def _join(pieces: Iterable[str]) -> str:
    return "\n".join(pieces)


def _standard_library() -> Text:
    root, files = Path(sysconfig.get_path("stdlib")), []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in NOT_PYTHON]  # skipped: site-packages can be very large
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    pieces = [file.read_text(encoding="utf-8", errors="replace") for file in sorted(files)]
    if sum(map(len, pieces)) < 1_000_000:
        raise ValueError(f"the source of Python's standard library is not in {root}; name a text of your own")
    return _split(pieces, "the source of Python's standard library")


def _hub(name: str) -> Text:
    """A data set of the hub, "name" or "name:config", with a column "text"."""
    from datasets import load_dataset

    dataset, _, config = name.partition(":")
    try:
        parts = load_dataset(dataset, config or None)
    except Exception as problem:  # datasets raises a different class for offline, unknown and gated data sets
        raise ValueError(
            f"{name} is not a file or folder, and it cannot be loaded from the Hugging Face hub: {problem}"
        ) from None
    column = "text"
    if "train" not in parts or column not in parts["train"].column_names:
        raise ValueError(f"{name} must have a part 'train' with a column 'text'; got {parts}")
    rest = [part for part in ("validation", "test") if part in parts]
    if rest:
        return Text(_join(parts["train"][column]), _join(parts[rest[0]][column]), name)
    return _split(list(parts["train"][column]), name)
