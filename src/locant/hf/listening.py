"""Observers of attention: functions that run at every attention that goes through locant's seam.

    def record(call: AttentionCall) -> None: ...

    with observing(before=record):
        model(input_ids=ids)

`interface.attention` is the seam. The attention of a swapped model goes through it, whatever its family. For a model
as transformers made it, enter `seam.through_seam(model)` (its own attention, observed) or
`swapping.native_as_schemes(model)` (its own positions as schemes, so that every call has a `request`) as well.

Observers live in a ContextVar. They belong to the thread or task that entered the block; other threads do not see
them. Blocks nest: every observer runs, the outermost first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from locant.hf.call import AttentionCall

Before = Callable[[AttentionCall], "AttentionCall | None"]
"""Runs before the attention is computed. A call that it returns is computed in place of the one it received."""
After = Callable[[AttentionCall, Tensor], None]
"""Runs after it, with the output [B, Lq, H, D]."""


@dataclass(frozen=True)
class Observer:
    """A function for either moment."""

    before: Before | None
    after: After | None


_OBSERVERS: ContextVar[tuple[Observer, ...]] = ContextVar("observers of attention", default=())


@contextmanager
def observing(*, before: Before | None = None, after: After | None = None) -> Iterator[None]:
    """Adds an observer for as long as the block lasts. Compiled models run uncompiled inside it."""
    token = _OBSERVERS.set((*_OBSERVERS.get(), Observer(before, after)))
    try:
        with _uncompiled():
            yield
    finally:
        _OBSERVERS.reset(token)


def observers() -> tuple[Observer, ...]:
    """Returns the observers of this thread or task, the outermost first."""
    return () if torch.compiler.is_compiling() else _OBSERVERS.get()


def _uncompiled() -> Any:
    """Compiled code cannot call observers. Without the compiler loaded nothing can be compiled."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
