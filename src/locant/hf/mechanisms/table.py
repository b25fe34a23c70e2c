"""A table of absolute positions, added to the token embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locant.hf.mechanisms.base import Read, Replaced, Run, find
from locant.schemes import Learned, Scheme


class Embedded(nn.Module):
    """Replaces a table of absolute positions: adds the embedding of a scheme, or nothing."""

    def __init__(self, scheme: Scheme | None, native: nn.Module | None, shift: int) -> None:
        super().__init__()
        self.scheme, self.native, self.shift = scheme, native, shift

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        ids = kwargs.get("position_ids")
        ids = args[0] if ids is None else ids
        # Adding a zero without dimensions changes neither shape nor dtype.
        total = torch.zeros((), device=ids.device)
        if self.native is not None:
            total = total + self.native(*args, **kwargs)
        if self.scheme is not None:
            shift = 0 if "position_ids" in kwargs else self.shift  # OPT adds its shift inside the table
            places = ids - shift
            embedded = self.scheme.embed(places.clamp(min=0))
            if embedded is not None:  # padding has no position
                total = total + embedded * (places >= 0).unsqueeze(-1)
        return total


@dataclass(frozen=True)
class Table:
    """A table of absolute positions, added to the token embeddings (BERT, GPT-2, OPT, …)."""

    path: str
    kind: str = "absolute"

    def first(self, stack: nn.Module) -> int:
        """Returns the row of the first token."""
        return 0

    def table(self, stack: nn.Module) -> Tensor:
        """Returns the whole table, unused rows included."""
        weight = stack.get_submodule(self.path).weight
        assert isinstance(weight, Tensor)
        return weight

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        if keep and embed is None:
            return []
        parent, name = find(stack, self.path)
        original = getattr(parent, name)
        setattr(parent, name, Embedded(embed, original if keep else None, self.first(stack)))
        return [Replaced(parent, name, original)]

    def read(self, stack: nn.Module, attentions: list[nn.Module], run: Run) -> Read:
        return Read(self.kind, learned(self.table(stack)[self.first(stack) :]), None)

    def width(self, stack: nn.Module) -> int:
        return self.table(stack).shape[1]


@dataclass(frozen=True)
class TableAfterPadding(Table):
    """RoBERTa: rows up to the padding token's id are unused."""

    def first(self, stack: nn.Module) -> int:
        return int(stack.config.pad_token_id) + 1  # type: ignore[union-attr, arg-type]


@dataclass(frozen=True)
class TableAfterTwo(Table):
    """OPT: the first two rows are unused."""

    def first(self, stack: nn.Module) -> int:
        return 2


@dataclass(frozen=True)
class CountingTable(TableAfterTwo):
    """BART: a table like OPT's that numbers tokens itself, so it can be read and kept, but not replaced."""

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        if keep and embed is None:
            return []
        raise NotImplementedError(
            f"{type(stack).__name__} counts positions inside its table, which can be read and kept but not replaced; "
            f"add a scheme that acts in attention to it: swap(model, spec, keep_native=True)"
        )


def learned(table: Tensor) -> Learned:
    """Returns the scheme of a table [length, width]."""
    scheme = Learned(length=table.shape[0], d_model=table.shape[1]).to(table)
    with torch.no_grad():
        scheme.table.copy_(table)
    return scheme
