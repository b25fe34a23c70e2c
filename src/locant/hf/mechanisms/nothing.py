"""No positions of its own: a model whose attention knows no order, such as the attention layers of Jamba."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from locant.hf.mechanisms.base import Read, Replaced, Run, add_embedding, embedding_width
from locant.schemes import Nope, Scheme


@dataclass(frozen=True)
class Nothing:
    """Nothing is removed, and nothing is read."""

    kind: str = "none"

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        return add_embedding(stack, embed)

    def read(self, stack: nn.Module, attentions: list[nn.Module], run: Run) -> Read:
        return Read(self.kind, None, [Nope() for _ in attentions])

    def own_table(self, stack: nn.Module) -> Tensor | None:
        return None

    def width(self, stack: nn.Module) -> int:
        return embedding_width(stack)
