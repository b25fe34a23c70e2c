"""Folders that survive: what is written is there whole or not at all, and one process at a time writes.

run.json            what the run is: task, model, preset, scheme, seed; versions, host, when it began
metrics.jsonl       one line per log step, test and cost
model.safetensors   the trained model, which `locant.load` opens
curves.json         what its scheme does with the offset, for the page
checkpoint-N/       where a killed run goes on; gone when it is done
log.txt             what libraries had to say
DONE or FAILED      how it ended
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

METRICS, DONE, FAILED, WHOLE = "metrics.jsonl", "DONE", "FAILED", "WHOLE"


def check(folder: Path, name: str, *also: str) -> None:
    """Whether a folder can be written to: one that is new or empty, or ours, which has a file of this name.

    Hidden files are our lock, and what a process left that was killed while it wrote.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder")
    if folder.is_dir() and not (folder / name).exists():
        others = sorted(path.name for path in folder.iterdir() if path.name not in also and path.name[0] != ".")
        if others:
            raise ValueError(f"{folder} holds something else ({', '.join(others[:3])}); name a new folder")


def write(path: Path, content: str) -> None:
    """Replaces a file in one move: a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    write(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except json.JSONDecodeError as problem:
        raise ValueError(f"{path} is damaged ({problem}); delete its folder to run it anew") from None


def append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that another process may be writing to: a torn last one is left out."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def rewind(path: Path, step: int) -> None:
    """Takes out what was written after a step, tests and costs included."""
    kept = [line for line in lines(path) if line["kind"] == "step" and line["step"] <= step]
    write(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))


def last_checkpoint(folder: Path) -> Path | None:
    """The latest checkpoint that was written to its end. All others are deleted: one may be torn by being written, or
    by being deleted, and would be taken for whole if it were the last one left."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    whole = [path for path in found if (path / WHOLE).exists()]
    for other in found:
        if other not in whole[-1:]:
            shutil.rmtree(other)
    return whole[-1] if whole else None


def state(folder: Path) -> str:
    """done, failed, begun or new"""
    if (folder / DONE).exists():
        return "done"
    if (folder / FAILED).exists():
        return "failed"
    return "begun" if (folder / METRICS).exists() else "new"


class Busy(RuntimeError):
    """Another process has this folder."""


@contextmanager
def held(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Keeps a folder to this process. The lock is the system's own: it goes with the process, even when killed."""
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise Busy(f"another process works in {folder}") from None
    try:
        yield
    finally:
        lock.release()
