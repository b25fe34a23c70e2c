"""The folder of a training run: which files it has, what state it is in, and the lock that one process holds.

run.json            what the run is: task, model, preset, scheme, seed; versions, host, start time
metrics.jsonl       one line per logged step, evaluation and cost
model.safetensors   the trained model, which `locant.load` opens
curves.json         what the trained scheme does with the offset, for the page
kept/step-N/        the model after N steps, if the preset keeps some; `locant.load` opens it
checkpoint-N/       where a killed run resumes; deleted when the run is done
log.txt             the output of libraries
DONE or FAILED      how the run ended
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from locant.runs import files
from locant.runs.new_folder import Undo
from locant.runs.untrusted import shortened

METRICS, DONE, FAILED, WHOLE, KEPT, LOCK = "metrics.jsonl", "DONE", "FAILED", "WHOLE", "kept", ".lock"
NUMBER = (int, float)
ENTRIES: dict[str, dict[str, Any]] = {
    "step": {"step": int, "seconds": NUMBER},
    "test": {"length": int, "values": dict, "refused": str},
    "cost": {"seconds_per_step": NUMBER, "seconds": dict, "memory_mb": NUMBER, "scheme_parameters": int},
}
"""The kinds of lines in the metrics, and the entries that each must have."""


def check(folder: Path, name: str, *also: str) -> None:
    """Raises ValueError unless a folder is new, empty or ours. It is ours if it has a file called `name`.

    Files called `also` do not count as foreign. Neither do hidden files: our lock, and temporary files of a process
    that was killed.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder")
    if folder.is_dir() and not (folder / name).exists():
        others = sorted(path.name for path in folder.iterdir() if path.name not in also and path.name[0] != ".")
        if others:
            names = ", ".join(others[:3])
            raise ValueError(f"{folder} contains files that locant did not write ({names}); name a new folder")


def metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a metrics file; ValueError if one is not of a known kind with its entries."""
    found = files.lines(path)
    for number, line in enumerate(found, 1):
        entries = ENTRIES.get(str(line.get("kind")))
        if entries is None or not all(isinstance(line.get(name), kind) for name, kind in entries.items()):
            kinds = ", ".join(f"{kind} with {' and '.join(names)}" for kind, names in ENTRIES.items())
            raise ValueError(f"{path}, line {number} is damaged: got {shortened(line)}; expected one of: {kinds}")
    return found


def rewind(path: Path, step: int) -> None:
    """Deletes from a metrics file everything after a step, all evaluations and costs included."""
    kept = [line for line in metrics(path) if line["kind"] == "step" and line["step"] <= step]
    files.write(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))


def mark_checkpoint(folder: Path, step: int) -> None:
    """Marks a checkpoint as complete and deletes the others.

    Trainer could delete them, but it goes by modification time: after the clock was set back, the newest would go.
    """
    (folder / f"checkpoint-{step}" / WHOLE).touch()
    last_checkpoint(folder)


def delete_checkpoints(folder: Path) -> None:
    """Deletes all checkpoints of a run that is done. A process that is killed here leaves some to the next one."""
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)


def last_checkpoint(folder: Path) -> Path | None:
    """Returns the latest complete checkpoint and deletes all others.

    A partly deleted checkpoint keeps its marker, so it must not survive alone.
    """
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    whole = [path for path in found if (path / WHOLE).exists()]
    for other in found:
        if other not in whole[-1:]:
            shutil.rmtree(other)
    return whole[-1] if whole else None


def kept_steps(steps: int, count: int) -> list[int]:
    """Returns the steps after which a run of `steps` keeps its model: 1/2, 1/4, 1/8 … of them, `count` at most."""
    return sorted({steps >> halvings for halvings in range(1, count + 1)} - {0})


def kept_model(folder: Path, step: int) -> Path:
    """Returns the folder of the model that a run kept after a step."""
    return folder / KEPT / f"step-{step}"


def state(folder: Path) -> str:
    """Returns done, failed, begun or new."""
    if (folder / DONE).exists():
        return "done"
    if (folder / FAILED).exists():
        return "failed"
    return "begun" if (folder / METRICS).exists() else "new"


class Busy(RuntimeError):
    """Another process holds the lock of this folder."""


@contextmanager
def held(folder: Path, *, wait: bool = False, resumes: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Holds the lock of a folder. The operating system releases it when the process ends, even when killed.

    If the block raises and `resumes` says that there is nothing to continue, what the block wrote is deleted.
    """
    undo = Undo(folder)
    try:
        lock = _acquire(folder, wait=wait)
    except OSError:
        undo.delete()
        raise
    try:
        undo.look()
        yield
    except BaseException:
        if not resumes():
            undo.delete()
            if [path.name for path in folder.iterdir()] == [LOCK]:
                # While it is held: a process that waits for it finds that the file is gone, and makes a new one.
                (folder / LOCK).unlink()
                undo.delete()
        raise
    finally:
        lock.release()


def _acquire(folder: Path, *, wait: bool) -> Any:
    """Returns the lock of a folder, held. A process that failed may have deleted the file or the folder meanwhile."""
    from filelock import FileLock, Timeout

    while True:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK)
        try:
            lock.acquire(timeout=-1 if wait else 0)
        except Timeout:
            raise Busy(f"another process is working in {folder}") from None
        except FileNotFoundError:
            continue
        if (folder / LOCK).exists():
            return lock
        lock.release()
