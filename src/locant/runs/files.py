"""Files are replaced as a whole: no reader finds a half-written file, even if the writer is killed.

This is the only atomic write in locant. `append` adds a line and is not atomic.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from locant.runs import untrusted


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`. The file written there replaces `path` when the block ends.

    If the block raises, `path` keeps its content and the temporary file is deleted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())  # content before name: a power cut must not leave an empty file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write(path: Path, content: str) -> None:
    """Replaces a text file. Readers see the old content or the new content, never a mixture."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode("utf-8"))  # line ends as given, on every system


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replaces a JSON file."""
    write(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file of a run; ValueError if it is damaged."""
    try:
        return untrusted.read_json(path)
    except ValueError as problem:
        raise ValueError(f"{problem}; delete its folder to run it again") from None


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Appends one line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def lines(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file of JSON lines; ValueError if one is damaged.

    Another process may be appending, so an incomplete last line is skipped.
    """
    if not path.exists():
        return []
    untrusted.size_of(path)
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [untrusted.parse_object(line, f"{path}, line {n}") for n, line in enumerate(whole.splitlines(), 1)]
