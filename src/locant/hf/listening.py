"""Observers of attention: functions that run at every attention that goes through locant's seam.

    def record(call: AttentionCall) -> None: ...

    with observing(before=record):
        model(input_ids=ids)

`interface.attention` is the seam. The attention of a swapped model goes through it, whatever its family. For a model
as transformers made it, enter `seam.through_seam(model)` (its own attention, observed) or
`swapping.native_as_schemes(model)` (its own positions as schemes, so that every call has a `request`) as well.

Observers are stored in a ContextVar. They belong to the thread or task that entered the block and have no effect in
other threads. Tasks and `asyncio.to_thread` calls that start inside the block inherit its observers until the block
ends. Blocks nest: every observer runs, the outermost first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from locant.hf.call import AttentionCall

Before = Callable[[AttentionCall], "AttentionCall | None"]
"""Runs before the attention is computed. A call that it returns is computed in place of the one it received."""
After = Callable[[AttentionCall, Tensor], None]
"""Runs after it, with the output [B, Lq, H, D]."""


@dataclass(eq=False)
class Observer:
    """The functions of one block."""

    before: Before | None
    after: After | None
    active: bool = True  # False once the block has ended: a task that outlives it still has a copy of the context

    def changed(self, call: AttentionCall) -> AttentionCall:
        """Runs `before` and returns the call to compute."""
        found = None if self.before is None else self.before(call)
        if found is not None and not isinstance(found, AttentionCall):
            raise TypeError(
                f"the function given as before= returned {type(found).__name__}; return an AttentionCall to compute "
                f"in place of the one received, or None to leave it as it is"
            )
        return call if found is None else found


_OBSERVERS: ContextVar[tuple[Observer, ...]] = ContextVar("observers of attention", default=())


@contextmanager
def observing(*, before: Before | None = None, after: After | None = None) -> Iterator[None]:
    """Adds an observer for as long as the block lasts. Compiled models run uncompiled inside it."""
    observer = Observer(before, after)
    _OBSERVERS.set((*_OBSERVERS.get(), observer))
    try:
        with _COMPILER.off():
            yield
    finally:
        observer.active = False
        # Not `reset`: blocks may not end in reverse order of entry.
        _OBSERVERS.set(tuple(other for other in _OBSERVERS.get() if other is not observer))


def observers() -> tuple[Observer, ...]:
    """Returns the observers of this thread or task, the outermost first."""
    if torch.compiler.is_compiling():
        return ()
    return tuple(observer for observer in _OBSERVERS.get() if observer.active)


class _Compiler:
    """Compiled code cannot call observers, so models run uncompiled while any block is open.

    torch has one stance for all threads. The first block sets it, and the last one to end restores it.
    """

    def __init__(self) -> None:
        self.lock, self.blocks, self.stance = Lock(), 0, ExitStack()

    @contextmanager
    def off(self) -> Iterator[None]:
        with self.lock:
            if self.blocks == 0:
                self.stance.enter_context(torch.compiler.set_stance("force_eager"))
            self.blocks += 1
        try:
            yield
        finally:
            with self.lock:
                self.blocks -= 1
                if self.blocks == 0:
                    self.stance.close()


_COMPILER = _Compiler()
