"""A mechanism that depends on a model's config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from locant.hf.mechanisms.base import Mechanism, Read, Replaced, Run
from locant.schemes import Scheme


@dataclass(frozen=True)
class Choice:
    """One of several mechanisms. `of` returns the one of a stack; it is at the top of a module, for pickle."""

    of: Callable[[nn.Module], Mechanism]
    kind: str

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        return self.of(stack).silence(stack, embed, keep)

    def read(self, stack: nn.Module, attentions: list[nn.Module], run: Run) -> Read:
        return self.of(stack).read(stack, attentions, run)

    def own_table(self, stack: nn.Module) -> Tensor | None:
        return self.of(stack).own_table(stack)

    def width(self, stack: nn.Module) -> int:
        return self.of(stack).width(stack)
