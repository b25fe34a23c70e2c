"""A table of absolute positions, added to the token embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locant.hf.carrying import carried
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
        return self.of_module(stack.get_submodule(self.path))

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        if keep and embed is None:
            return []
        parent, name = find(stack, self.path)
        original = getattr(parent, name)
        setattr(parent, name, Embedded(embed, original if keep else None, self.first(stack)))
        return [Replaced(parent, name, original)]

    def read(self, stack: nn.Module, attentions: list[nn.Module], run: Run) -> Read:
        return Read(self.kind, learned(self.table(stack)[self.first(stack) :]), None)

    def own_table(self, stack: nn.Module) -> Tensor | None:
        parent, name = find(stack, self.path)
        module = getattr(parent, name)
        if isinstance(module, (Embedded, Carried)):
            kept = module.table if isinstance(module, Indexed) else module.native
            table = kept if kept is None or isinstance(kept, Tensor) else self.of_module(kept)
        else:
            table = self.table(stack)
        return None if table is None else table[self.first(stack) :]

    def of_module(self, module: nn.Module) -> Tensor:
        """Returns the whole table of the module that holds it."""
        weight = module.weight
        assert isinstance(weight, Tensor)
        return weight

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


class Carried(nn.Module):
    """Replaces a table that counts tokens itself: the positions come from the stack (`carrying`)."""

    def __init__(self, scheme: Scheme | None, native: nn.Module | None, outputs: int = 1, width: int = 0) -> None:
        super().__init__()
        self.scheme, self.native, self.outputs = scheme, native, outputs
        # Some models (CLIP) ask the table how long inputs may be. No memory; not a parameter, and not saved.
        self.__dict__["weight"] = torch.zeros(()).expand(2**20, width)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first: Any = torch.zeros(())  # adding a zero without dimensions changes neither shape nor dtype
        others: tuple[Any, ...] = (None,) * (self.outputs - 1)
        if self.native is not None:
            first = self.native(*args, **kwargs)
            if isinstance(first, tuple):
                first, *rest = first
                others = tuple(rest)
        embedded = self.embedded()
        if embedded is not None:
            first = first.to(embedded.device) + embedded
        return (first, *others) if self.outputs > 1 else first

    def embedded(self) -> Tensor | None:
        """Returns the embedding of a scheme at the positions of the pass that runs, [B or 1, L, width]."""
        if self.scheme is None:
            return None
        current = carried(self)
        if current is None or current.places is None:
            raise RuntimeError("a position table was called outside the swapped model that it belongs to")
        found = self.scheme.embed(current.places.clamp(min=0))
        return None if found is None else found * (current.places >= 0).unsqueeze(-1)  # padding has no position


class Indexed(Carried):
    """The same for a tensor that the model indexes: table[ids, :]."""

    def __init__(self, scheme: Scheme | None, native: Tensor | None) -> None:
        super().__init__(scheme, None)
        self.table = native

    def __getitem__(self, index: Any) -> Any:
        return self(index)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        embedded = self.embedded()
        total: Any = torch.zeros(()) if self.table is None else self.table[args[0]]
        return total if embedded is None else total.to(embedded.device) + embedded


@dataclass(frozen=True)
class CarriedTable(Table):
    """A table that counts tokens itself, or whose indices are not known (BART, Marian, M2M-100, …).

    row          the row of the first token.
    attribute    where the module has its table.
    outputs      how many values the module returns; the first one is the embedding.
    """

    row: int = 0
    attribute: str = "weight"
    outputs: int = 1

    def first(self, stack: nn.Module) -> int:
        return self.row

    def of_module(self, module: nn.Module) -> Tensor:
        found: Tensor = getattr(module, self.attribute)
        return found

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        if keep and embed is None:
            return []
        parent, name = find(stack, self.path)
        original = getattr(parent, name)
        setattr(parent, name, Carried(embed, original if keep else None, self.outputs, self.width(stack)))
        return [Replaced(parent, name, original)]


@dataclass(frozen=True)
class CarriedTableAfterPadding(CarriedTable):
    """FSMT: the same, with rows up to the padding token's id that are unused."""

    def first(self, stack: nn.Module) -> int:
        module = stack.get_submodule(self.path)
        holds: Any = module.native if isinstance(module, Carried) else module
        return int(holds.padding_idx) + 1


@dataclass(frozen=True)
class IndexedTable(Table):
    """CTRL: a buffer [length, width] that the model indexes by position, without a module."""

    def table(self, stack: nn.Module) -> Tensor:
        parent, name = find(stack, self.path)
        found: Tensor = getattr(parent, name)
        return found

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        if keep and embed is None:
            return []
        parent, name = find(stack, self.path)
        original = self.table(stack)
        persistent = name not in parent._non_persistent_buffers_set
        delattr(parent, name)
        setattr(parent, name, Indexed(embed, original if keep else None))
        return [Replaced(parent, name, nn.Buffer(original, persistent=persistent))]


def learned(table: Tensor) -> Learned:
    """Returns the scheme of a table [length, width]."""
    scheme = Learned(length=table.shape[0], d_model=table.shape[1]).to(table)
    with torch.no_grad():
        scheme.table.copy_(table)
    return scheme
