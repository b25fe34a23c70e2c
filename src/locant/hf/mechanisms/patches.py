"""Positions of the patches of an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locant.hf.interface import EMBED
from locant.hf.mechanisms.base import Read, Replaced, Run, find
from locant.hf.mechanisms.table import learned
from locant.schemes import Scheme


class EmbeddedPatches(nn.Module):
    """The same for a model that adds its table as a parameter: recomputed before each forward pass."""

    def __init__(self, scheme: Scheme | None, native: nn.Parameter | None, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scheme, self.native, self.shape = scheme, native, shape

    def forward(self, like: Tensor) -> Tensor:
        total = torch.zeros((), dtype=like.dtype, device=like.device).expand(1, *self.shape)
        if self.native is not None:
            total = total + self.native
        if self.scheme is not None:
            embedded = self.scheme.embed(torch.arange(self.shape[0], device=like.device))
            assert embedded is not None
            total = total + embedded.to(like.dtype)
        return total


def _put_patches(module: nn.Module, args: Any) -> None:
    like = next(module.parameters())
    module.__dict__["position_embeddings"] = getattr(module, EMBED)(like)


def _take_patches(module: nn.Module, args: Any, output: Any) -> None:
    module.__dict__["position_embeddings"] = torch.zeros(1)  # a tensor with a gradient history cannot be deep-copied


@dataclass(frozen=True)
class Patches:
    """A parameter [1, patches + 1, width] added to the class token and the patches of an image (ViT)."""

    path: str = "embeddings.position_embeddings"
    kind: str = "absolute"

    def table(self, stack: nn.Module) -> nn.Parameter:
        """Returns the table, [1, patches + 1, width]."""
        parent, name = find(stack, self.path)
        table = parent._parameters[name]
        assert table is not None
        return table

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        if keep and embed is None:
            return []
        parent, name = find(stack, self.path)
        original = self.table(stack)
        delattr(parent, name)
        parent.add_module(EMBED, EmbeddedPatches(embed, original if keep else None, tuple(original.shape[1:])))
        parent.__dict__[name] = torch.zeros(1)  # transformers initialises it; recomputed before each forward pass
        parent.register_forward_pre_hook(_put_patches)
        parent.register_forward_hook(_take_patches)
        return [Replaced(parent, name, original, hooks=(_put_patches, _take_patches)), Replaced(parent, EMBED, None)]

    def read(self, stack: nn.Module, attentions: list[nn.Module], run: Run) -> Read:
        return Read(self.kind, learned(self.table(stack)[0]), None)

    def own_table(self, stack: nn.Module) -> Tensor | None:
        kept = find(stack, self.path)[0]._modules.get(EMBED)
        table = kept.native if isinstance(kept, EmbeddedPatches) else self.table(stack)
        return None if table is None else table[0]

    def width(self, stack: nn.Module) -> int:
        return self.table(stack).shape[2]
