"""Removes the positions of a model. It can keep the first row and the mean of the other rows of a position table.

The first row of a trained table is an outlier that heads use as an attention sink, and the first layer norm expects the
mean (docs/adapt.md). The scheme `first` holds both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from transformers import PreTrainedModel

from locant.hf.mapped_native import is_mapped_native
from locant.hf.plan import plan_of
from locant.hf.readout import native
from locant.hf.swapping import exchange


def with_first(spec: str) -> str:
    """Returns a spec with `+first` added, to every layer of one such as `rope/nope`, unless it is there already.

    A spec with the model's own table, such as `native@recurrent:length=256+local`, needs no `first`.
    """
    if is_mapped_native(spec):
        return spec
    parts = [part.strip() for part in spec.split("/")]
    names = ({each.partition(":")[0].strip().lower() for each in part.split("+")} for part in parts)
    return "/".join(part if "first" in found else f"{part}+first" for part, found in zip(parts, names, strict=True))


@contextmanager
def silenced(model: PreTrainedModel, length: int) -> Iterator[None]:
    """Removes the positions of a model until the block ends.

    Every row of a position table is replaced by the mean row (see `mean_row`).
    """
    table = native(model).table
    try:
        exchange(model, "nope" if table is None else "first")
        if table is not None:
            start_from_table(model, mean_row(table, length), mean_row(table, length))
        yield
    finally:
        exchange(model, "native")


def mean_row(table: Tensor, length: int) -> Tensor:
    """Returns the mean of the rows 1 … length − 1: without the outlier, and without rows that no text has used."""
    return table[1:length].mean(0) if length > 1 else table[0]


def start_from_table(model: PreTrainedModel, first: Tensor, rest: Tensor) -> None:
    """Sets the vectors [width] of the scheme `first` in a swapped model: at position 0, and at all others."""
    plan = plan_of(model)
    assert plan is not None
    for stack in plan.stacks:
        if stack.embed is not None:
            stack.embed.start_from_table(first, rest)
