"""T5's biases, and MPNet's: the same beside a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locant.hf.mechanisms.base import Read, Replaced, Run, add_embedding, embedding_width, find
from locant.hf.mechanisms.table import TableAfterPadding, learned
from locant.hf.methods import replace_method
from locant.schemes import T5, Scheme


class Unbiased(nn.Module):
    """Replaces T5's table of biases: zeros that take no memory."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.__dict__["weight"] = torch.zeros(0)  # transformers initialises it; not a parameter, and not saved

    def forward(self, bucket: Tensor) -> Tensor:
        return torch.zeros((), device=bucket.device).expand(*bucket.shape, self.n_heads)


@dataclass(frozen=True)
class Bias:
    """T5: a bias per head and bucket of offsets, computed in the first layer and used in all."""

    path: str = "block.0.layer.0.SelfAttention.relative_attention_bias"
    kind: str = "bias"

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        return [_unbias(stack, self.path), *add_embedding(stack, embed)]

    def read(self, stack: nn.Module, attentions: list[nn.Module], run: Run) -> Read:
        parent, name = find(stack, self.path)
        weight = getattr(parent, name).weight
        distance: Any = parent.relative_attention_max_distance
        scheme = _t5(weight, max_distance=distance, bidirectional=not parent.is_decoder)
        return Read(self.kind, None, [scheme] * len(attentions))

    def width(self, stack: nn.Module) -> int:
        return embedding_width(stack)


@dataclass(frozen=True)
class TableAndBias(TableAfterPadding):
    """MPNet: RoBERTa's table, and one T5 bias shared by all layers."""

    bias: str = "encoder.relative_attention_bias"
    kind: str = "absolute and bias"

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        encoder = stack.get_submodule("encoder")
        # MPNet computes its bias once for all layers, [1, H, L, L]. The schemes hold it now, so it is not computed.
        replace_method(encoder, "compute_position_bias", _no_bias)
        bias = Replaced(encoder, "compute_position_bias", None)
        return [*super().silence(stack, embed, keep), _unbias(stack, self.bias), bias]

    def read(self, stack: nn.Module, attentions: list[nn.Module], run: Run) -> Read:
        weight: Any = stack.get_submodule(self.bias).weight
        if weight.shape[0] != 32:  # the model uses 32, whatever its config says
            raise NotImplementedError(
                f"{type(stack).__name__} has {weight.shape[0]} buckets of offsets, but the model uses 32"
            )
        scheme = _t5(weight, max_distance=128, bidirectional=True)
        return Read(self.kind, learned(self.table(stack)[self.first(stack) :]), [scheme] * len(attentions))


@dataclass(frozen=True)
class Biases:
    """UMT5: a table of biases in every layer."""

    paths: tuple[str, ...]  # of the deepest stack; a stack of fewer layers has the first of them
    kind: str = "bias"

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        return [*(_unbias(stack, path) for path in self._in(stack)), *add_embedding(stack, embed)]

    def _in(self, stack: nn.Module) -> list[str]:
        names = {name for name, _ in stack.named_modules()}
        return [path for path in self.paths if path in names]

    def read(self, stack: nn.Module, attentions: list[nn.Module], run: Run) -> Read:
        found = {}
        for path in self._in(stack):
            parent: Any = find(stack, path)[0]
            weight, distance = getattr(parent, path.rpartition(".")[2]).weight, parent.relative_attention_max_distance
            found[parent] = _t5(weight, max_distance=distance, bidirectional=not parent.is_decoder)
        missing = [type(module).__name__ for module in attentions if module not in found]
        if missing:
            raise NotImplementedError(f"{type(stack).__name__} has no table of biases for {missing[0]}")
        return Read(self.kind, None, [found[module] for module in attentions])

    def width(self, stack: nn.Module) -> int:
        return embedding_width(stack)


def _no_bias(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    return None


def _unbias(stack: nn.Module, path: str) -> Replaced:
    parent, name = find(stack, path)
    original = getattr(parent, name)
    setattr(parent, name, Unbiased(original.weight.shape[1]))
    return Replaced(parent, name, original)


def _t5(weight: Tensor, *, max_distance: int, bidirectional: bool) -> T5:
    """The scheme of a table [buckets, heads]."""
    buckets, n_heads = weight.shape
    if bidirectional:  # T5 never reads the last of an odd number of rows
        buckets -= buckets % 2
    scheme = T5(buckets=buckets, max_distance=max_distance, bidirectional=bidirectional, n_heads=n_heads).to(weight)
    with torch.no_grad():
        scheme.table.copy_(weight.mT[:, :buckets])
    return scheme
