"""Carries the positions of a pass from a stack to modules that its layers pass no arguments to.

`following` passes positions to attention modules as a keyword argument. Layers of some models drop arguments that they
do not know, and some position tables count tokens themselves. There, the positions come from a `Carrier`, which the
stack and the modules below it share.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import Tensor, nn

from locant.hf.call import Positions

CARRIER = "locant_carrier"
"""Attribute of a stack and of modules below it."""
CHECKPOINTING = "_gradient_checkpointing_func"
"""Attribute of transformers' modules: the function that runs a layer again in the backward pass."""


class Pass:
    """The positions of the tokens of one forward pass: in attention, and for a table [B or 1, L] (below 0: none).

    causal   whether attention is causal in this pass, for a model that is told so in every call; None for others.
    kinds    Longformer's mask [B, L]: 0 for padding, 1 for other tokens, 2 for global ones; None for other models.
    """

    def __init__(self, positions: Positions, places: Tensor | None) -> None:
        self.positions, self.places = positions, places
        self.causal: bool | None = None
        self.kinds: Tensor | None = None


_NOW: ContextVar[Pass | None] = ContextVar("positions of the tokens of a forward pass", default=None)


class Carrier:
    """Knows the pass that is running in this thread or task.

    Compiled code cannot use a ContextVar. There the pass is an attribute, which the compiler follows.
    """

    def __init__(self) -> None:
        self.traced: Pass | None = None

    def put(self, current: Pass) -> Token[Pass | None] | None:
        """Begins a pass. The result is the argument of `end`."""
        if torch.compiler.is_compiling():
            self.traced = current
            return None
        return _NOW.set(current)

    def end(self, token: Token[Pass | None] | None) -> None:
        """Ends a pass."""
        if token is None:
            self.traced = None
        else:
            _NOW.reset(token)

    def now(self) -> Pass | None:
        """Returns the pass that is running; None outside the model."""
        return self.traced if torch.compiler.is_compiling() else _NOW.get()


def carried(module: nn.Module) -> Pass | None:
    """Returns the pass that reaches a module; None if the module is not below a followed stack that is running."""
    carrier: Carrier | None = module.__dict__.get(CARRIER)
    return None if carrier is None else carrier.now()


class SamePass:
    """Gradient checkpointing that runs a layer again with the positions of its first run."""

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        current = _NOW.get()

        def again(*inner: Any, **named: Any) -> Any:
            with _during(current):
                return function(*inner, **named)

        return self.checkpoint(again, *args, **kwargs)


@contextmanager
def _during(current: Pass | None) -> Iterator[None]:
    token = _NOW.set(current)
    try:
        yield
    finally:
        _NOW.reset(token)


def bind_checkpointing(stack: nn.Module) -> None:
    """Makes the gradient checkpointing of a stack keep positions. Called in every pass: it may be turned on late."""
    if not (stack.training and getattr(stack, "is_gradient_checkpointing", False)):
        return
    for module in stack.modules():
        function = module.__dict__.get(CHECKPOINTING)
        if function is not None and not isinstance(function, SamePass):
            module.__dict__[CHECKPOINTING] = SamePass(function)


def unbind_checkpointing(stack: nn.Module) -> None:
    """Undoes `bind_checkpointing`."""
    for module in stack.modules():
        function = module.__dict__.get(CHECKPOINTING)
        if isinstance(function, SamePass):
            module.__dict__[CHECKPOINTING] = function.checkpoint
