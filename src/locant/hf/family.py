"""`Family`: how one family of models handles positions. `families.py` lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from locant.hf.counting import Count, by_index
from locant.hf.mechanisms import Mechanism


def whole(base: nn.Module) -> list[str]:
    """The base model runs the layers itself."""
    return [""]


def two_stacks(base: nn.Module) -> list[str]:
    """Encoder and decoder; either of them alone is one stack."""
    return [name for name in ("encoder", "decoder") if isinstance(getattr(base, name, None), nn.Module)] or [""]


def these_stacks(paths: list[str], base: nn.Module) -> list[str]:
    """Stacks that were found by running the model."""
    return paths


def from_zero(stack: nn.Module) -> int:
    """The caller's position_ids start at 0."""
    return 0


def after_padding(stack: nn.Module) -> int:
    """RoBERTa: the caller's position_ids start after the id of the padding token."""
    return int(stack.config.pad_token_id) + 1  # type: ignore[union-attr, arg-type]


@dataclass(frozen=True)
class StartsAt:
    """The caller's position_ids start at this number."""

    number: int

    def __call__(self, stack: nn.Module) -> int:
        return self.number


@dataclass(frozen=True)
class Seam:
    """Makes the attention of a base model go through the interface, and undoes it."""

    open: Callable[[nn.Module], None]
    close: Callable[[nn.Module], None]


@dataclass(frozen=True)
class Family:
    """How one family of models handles positions. Its functions are at the top of a module, for pickle."""

    mechanism: Mechanism
    stacks: Callable[[nn.Module], list[str]] = whole
    count: Count = by_index
    shift: Callable[[nn.Module], int] = from_zero
    """The number that the caller's position_ids start at."""
    causal: Mapping[str, bool] = field(default_factory=dict)
    """Whether the attention of a stack is causal, where it was found by running. Not every attention module says so,
    and some say the opposite, because the model gives them a mask."""
    attention_by_index: bool = False
    """MPNet: its own positions in attention count padding tokens, its table does not."""
    convolved: Callable[[nn.Module], int] = from_zero
    """Inkling: how many tokens before its own the key of a token depends on, by a short convolution."""
    ignores_ids: bool = False
    """Inkling: takes position_ids, and counts by index whatever they are."""
    seam: Seam | None = None
    """For models whose attention does not go through transformers' attention interface."""
