"""Reads files that somebody else may have written, with limits and with errors that name the file.

Such a file may be a pipe that never ends, a terabyte of zeros, or JSON that is nested a million times.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

LARGEST_JSON = 64 * 2**20
"""Bytes of the largest JSON file. The largest that locant or transformers writes have a few MiB."""


def size_of(path: Path) -> int:
    """Returns the size of a regular file in bytes; ValueError for a pipe, a device or a folder, which has none."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is not a regular file; expected a file with content, not a folder, pipe or device")
    return found.st_size


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; ValueError if there is something else in it."""
    return parse_object(_content(path), str(path))


def read_list(path: Path) -> list[Any]:
    """Returns the list in a JSON file; ValueError if there is something else in it."""
    found = _parse(_content(path), str(path))
    if not isinstance(found, list):
        raise ValueError(f"{path} is damaged: expected a JSON list, got {type(found).__name__}")
    return found


def _content(path: Path) -> bytes:
    size = size_of(path)
    if size > LARGEST_JSON:
        raise ValueError(f"{path} has {size:,} bytes; a JSON file may have {LARGEST_JSON:,}")
    return path.read_bytes()


def parse_object(content: bytes, name: str) -> dict[str, Any]:
    """Returns the JSON object in `content`; ValueError, which calls it `name`, if it is anything else."""
    found = _parse(content, name)
    if not isinstance(found, dict):
        raise ValueError(f"{name} is damaged: expected a JSON object, got {type(found).__name__}")
    return found


def _parse(content: bytes, name: str) -> Any:
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"{name} is damaged: its JSON is nested too deeply") from None
    except ValueError as problem:  # not JSON, not UTF-8, a number with thousands of digits, or a name twice
        raise ValueError(f"{name} is damaged: {problem}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python would keep the last of two values with the same name, other readers the first."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return made


def shortened(value: object, most: int = 80) -> str:
    """Returns a value for an error message: its repr, cut to `most` characters."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 1] + "…"


def first_line(problem: BaseException) -> str:
    """Returns the first line of the message of an error; its class if it has no message."""
    return next(iter(str(problem).strip().splitlines()), type(problem).__name__)
