"""Interrupts that wait until a model is whole again.

Python raises KeyboardInterrupt between any two instructions, also in the middle of a `finally`. A model that is being
changed, or changed back, would then be left half-way. Inside `deferred` a signal is only noted. Its handler runs at the
next `check`, which stands where everything that was changed is undone by a `finally`, or at the end of the block.

    with deferred():
        change(model)
        try:
            for part in work:
                check()
                part()
        finally:
            undo(model)
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGALRM", "SIGTERM", "SIGINT") if hasattr(signal, name))
"""Ctrl-C, timeouts and requests to end. Only handlers that are written in Python are deferred; others raise nothing."""


class _Signals:
    """The handlers that are set aside, and the signals that came since. Python runs handlers in the main thread."""

    def __init__(self) -> None:
        self.depth = 0
        self.before: dict[int, Any] = {}
        self.came: dict[int, Any] = {}

    def note(self, number: int, frame: Any) -> None:
        self.came[number] = frame

    def enter(self) -> None:
        if self.depth == 0:
            self.before.clear()
            for number in reversed(SIGNALS):  # Ctrl-C first
                handler = signal.getsignal(number)
                if callable(handler) and handler != self.note:
                    self.before[number] = handler
                    signal.signal(number, self.note)
        self.depth += 1

    def leave(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            for number in SIGNALS:
                if number in self.before:
                    signal.signal(number, self.before[number])
            self.deliver()

    def deliver(self) -> None:
        while self.came:
            number, frame = self.came.popitem()
            self.before[number](number, frame)


_SIGNALS = _Signals()


@contextmanager
def deferred() -> Iterator[None]:
    """Notes interrupts while the block lasts, and raises them at its end. Blocks nest; the outermost one counts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _SIGNALS.enter()
    try:
        yield
    finally:
        _SIGNALS.leave()


def check() -> None:
    """Raises an interrupt that came inside `deferred`. Call it where a `finally` undoes everything."""
    if _SIGNALS.came and threading.current_thread() is threading.main_thread():
        _SIGNALS.deliver()
