"""A model for one analysis at a time.

An analysis changes a model for a while: its attention goes through the seam, parameters stop requiring gradients,
modules get other methods. Two analyses in two threads would undo each other's changes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from locant.hf.interrupts import check, deferred

POLL = 0.05
"""Seconds between looks for an interrupt while a thread waits for a model."""

_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_NEW = threading.Lock()


@contextmanager
def exclusive(*models: PreTrainedModel) -> Iterator[None]:
    """Lets one thread at a time have these models, and defers interrupts (`interrupts`).

    A second thread that enters with the same model, its base model or its encoder waits. One that calls the model
    without entering gets a RuntimeError. A thread may enter again inside the block.
    """
    found = {part for model in models for part in model.modules() if isinstance(part, PreTrainedModel)}
    parts = sorted(found, key=id)  # every thread takes locks in this order
    with _NEW:
        locks = [_LOCKS.setdefault(part, threading.RLock()) for part in parts]
    with deferred(), ExitStack() as stack:
        for lock in locks:
            while not lock.acquire(timeout=POLL):
                check()
            stack.callback(lock.release)
        for part in parts:
            stack.callback(part.register_forward_pre_hook(_refusing(threading.get_ident()), prepend=True).remove)
        yield


def _refusing(owner: int) -> Any:
    """A hook that raises in all other threads."""

    def refuse(module: nn.Module, args: Any) -> None:
        if threading.get_ident() != owner:
            raise RuntimeError(
                f"{type(module).__name__} is being analysed in another thread, which changes it meanwhile; wait until "
                f"that ends, or run a copy of the model (copy.deepcopy) in this thread"
            )

    return refuse
