"""What every mechanism has: `silence` and `read`, and the records they return."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from locant.hf.interface import EMBED
from locant.schemes import Scheme


@dataclass
class Replaced:
    """A module or parameter that was replaced, and where it was."""

    parent: nn.Module
    name: str
    original: Any
    hooks: tuple[Any, ...] = ()  # functions that were registered as hooks of the parent

    def put_back(self) -> None:
        """Restores the original."""
        for hooks in (self.parent._forward_pre_hooks, self.parent._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in self.hooks]:
                del hooks[key]
        in_place = isinstance(self.original, nn.Module) and self.name in self.parent._modules
        if hasattr(self.parent, self.name) and not in_place:  # in place: optimizers identify parameters by their order
            delattr(self.parent, self.name)
        if self.original is not None:
            setattr(self.parent, self.name, self.original)


@dataclass(frozen=True)
class Read:
    """The positions of a stack as schemes: one for the token embeddings, one per layer."""

    kind: str
    embed: Scheme | None
    layers: list[Scheme] | None  # None: nothing inside attention
    native_count: bool = True  # they belong to tokens as the model itself numbers them

    @property
    def shift_invariant(self) -> bool:
        """Whether it makes no difference at which number the positions begin."""
        return all(scheme is None or scheme.shift_invariant for scheme in [self.embed, *(self.layers or [])])


Run = Callable[[], object]
"""Runs a few tokens through a model. Its attention goes through the seam, so observers see every call."""


class Mechanism(Protocol):
    """One way in which positions enter a stack."""

    @property
    def kind(self) -> str:
        """Value of `Native.kind` for this mechanism: absolute, rotary, bias, …"""
        ...

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        """Removes the native positions (unless `keep`), adds `embed`, and returns what was replaced."""
        ...

    def read(self, stack: nn.Module, attentions: list[nn.Module], run: Run) -> Read:
        """Returns the native positions as schemes, one per attention module. `run` is for measurements."""
        ...

    def own_table(self, stack: nn.Module) -> Tensor | None:
        """Returns the native absolute positions [length, width] as the model has them now; None if there are none.

        A swap with keep_native leaves them in the model, so this also finds them after `silence` with `keep`.
        """
        ...

    def width(self, stack: nn.Module) -> int:
        """Returns the size of the vectors that are added to the token embeddings."""
        ...


def find(stack: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Returns the module that has the part at `path`, and its name there."""
    parent, _, name = path.rpartition(".")
    return (stack.get_submodule(parent) if parent else stack), name


def add_embedding(stack: nn.Module, embed: Scheme | None) -> list[Replaced]:
    """Adds a scheme to the token embeddings of a stack that has no place for it; `following` applies it."""
    if embed is None:
        return []
    if "inputs_embeds" not in inspect.signature(type(stack).forward).parameters:
        raise NotImplementedError(
            f"{type(stack).__name__} takes no inputs_embeds, so {embed} cannot be added to its token embeddings; use a "
            f"scheme that acts in attention"
        )
    stack.add_module(EMBED, embed)
    return [Replaced(stack, EMBED, None)]


def embedding_width(stack: nn.Module) -> int:
    """Returns the size of the token embeddings of a stack."""
    try:
        weight = getattr(stack.get_input_embeddings(), "weight", None)  # type: ignore[operator]
    except NotImplementedError:  # Dia: transformers does not know which of its modules it is
        weight = None
    return int(stack.config.hidden_size if weight is None else weight.shape[1])  # type: ignore[union-attr, arg-type]
