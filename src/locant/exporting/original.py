"""The architecture that the model had before: a table of absolute positions of another length, or RoPE.

A scheme that adds vectors to the token embeddings is a table of any number of rows,

    table[p] = E_p                       p = 0 … length − 1

so `learned`, `sinusoidal` and `first` are written into the table of BERT, GPT-2 and their kin exactly. Schemes that act
in attention are not tables; `fitted_table.py` finds a table that comes near.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from locant.exporting.refusal import CannotExport
from locant.exporting.rotary_settings import rope_parameters
from locant.exporting.source import Source
from locant.exporting.stock import Stock, build
from locant.hf.counting import by_index
from locant.hf.family import Family
from locant.hf.finding import family_of
from locant.hf.mechanisms import CarriedTable, IndexedTable, Rotary, Table

LENGTH = 4096
"""Rows of a table if nothing else limits it."""


def original(source: Source, length: int | None) -> Stock:
    """Returns a model in its own architecture; CannotExport if that cannot hold its schemes exactly.

    length   rows of the position table; by default those that the scheme has, or LENGTH.
    """
    if source.plan is None:
        return Stock(source.model, source.tokenizer, source.readable())
    stack, layers = source.only_stack(), source.layers()
    family = family_of(source.model)
    if isinstance(family.mechanism, Table) and all(scheme.silent for scheme in layers):
        if stack.embed is None:
            raise CannotExport("it has no positions at all, and the architecture has a table")
        known = (length, stack.embed.max_length, LENGTH if length is None else None)
        longest = min(each for each in known if each is not None)
        with torch.no_grad():
            rows = stack.embed.embed(torch.arange(longest, device=source.model.device))
        assert rows is not None
        return with_table(source, rows)
    if isinstance(family.mechanism, Rotary) and stack.embed is None:
        return _rotary(source, [str(scheme) for scheme in layers], length)
    acting = next((scheme for scheme in layers if not scheme.silent), stack.embed)
    raise CannotExport(
        f"{source.kind} has no place for {acting}. A table of absolute positions that comes near, for models that had "
        f"one, needs a text to fit it to: text=…, length=…"
        if isinstance(family.mechanism, Table)
        else f"{source.kind} has no place for {acting}"
    )


def table_of(source: Source) -> tuple[Table, Family]:
    """Returns how the architecture holds its table of absolute positions; CannotExport if it has none."""
    family = family_of(source.model)
    mechanism = family.mechanism
    if not isinstance(mechanism, Table) or isinstance(mechanism, (CarriedTable, IndexedTable)):
        raise CannotExport(f"{source.kind} has no table of absolute positions that can be written")
    return mechanism, family


def with_table(source: Source, rows: Tensor) -> Stock:
    """Returns the model in its own architecture, with a table whose rows [length, width] are given."""
    mechanism, family = table_of(source)
    stack = source.model.base_model.get_submodule(source.only_stack().path)
    first, length = mechanism.first(stack), len(rows)
    config = source.config()
    before = config.max_position_embeddings
    config.max_position_embeddings = length + _unused(source.kind, first)
    model = build(type(source.model), config, source.weights(), (f"{mechanism.path}.weight",))
    table = mechanism.table(model.base_model.get_submodule(source.only_stack().path))
    if len(table) != first + length:
        raise CannotExport(
            f"{source.kind} made a table of {len(table)} rows for {config.max_position_embeddings} positions (before: "
            f"{before}), and {first + length} were expected"
        )
    with torch.no_grad():
        table[:first] = 0
        table[first:] = rows
    notices = [f"the position table has {length:,} rows"]
    by_place = family.count is by_index
    if by_place:
        notices.append("it counts padding on the left: pad on the right, or pass position_ids")
    otherwise = by_place and not source.only_stack().native_count
    return Stock(model, source.tokenizer, length, counts_left_padding=otherwise, notices=notices)


def _unused(kind: str, first: int) -> int:
    """Rows that max_position_embeddings includes although no token uses them. OPT adds its two itself."""
    return 0 if kind == "opt" else first


def _rotary(source: Source, specs: list[str], length: int | None) -> Stock:
    if len(set(specs)) > 1 or not specs[0].startswith("rope"):
        raise CannotExport(f"{source.kind} has one RoPE for all layers, and this model has {', '.join(set(specs))}")
    config: Any = source.config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    config.rope_parameters = rope_parameters(specs[0], source, head_dim)
    if length is not None:
        config.max_position_embeddings = length
    model = build(type(source.model), config, source.weights())
    return Stock(model, source.tokenizer, length, rounded_angles=True)
