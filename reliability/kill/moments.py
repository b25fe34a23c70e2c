"""Moments in the life of a command: the appearance of a file, or a share of the work that it does in all.

Work is CPU time, because other programs of the machine may slow a command down.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reliability.kill.processes import Command
from reliability.kill.subjects import Subject


@dataclass(frozen=True)
class Moment:
    """A name, and a function that returns, for a command, a function that returns whether the moment has come."""

    name: str
    watch: Callable[[Command], Callable[[], bool]]
    pause: float  # seconds between two looks
    delay: float = 0.0

    def wait(self, command: Command) -> bool:
        """Waits for the moment; returns whether it came before the command ended."""
        has_come = self.watch(command)
        while command.running() and not has_come():
            time.sleep(self.pause)
        time.sleep(self.delay)
        return command.running()


def file_appears(subject: Subject, name: str, delay: float = 0.0) -> Moment:
    """Returns the moment at which a new file of this name in `subject.moments` appears, or some seconds later."""
    pattern = subject.moments[name]

    def watch(command: Command) -> Callable[[], bool]:
        before = _present(command.out, pattern)
        return lambda: bool(_present(command.out, pattern) - before)

    return Moment(f"{name} + {1000 * delay:.0f} ms", watch, 0.002, delay)


def share_of_work(share: float, whole: float) -> Moment:
    """Returns the moment at which a command has done a share of `whole`, its CPU seconds if nothing disturbs it."""
    return Moment(f"{share:.0%} of its work", lambda command: lambda: command.work() >= share * whole, 0.03)


def _present(out: Path, pattern: str) -> set[Path]:
    found: set[Path] = set()
    with contextlib.suppress(OSError):  # the command deletes folders meanwhile
        found.update(out.glob(pattern))
    return found
