"""What `locant inspect` measures of position tables alone, without a model: translation invariance and components."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from locant.analysis.inspection import Inspection
from locant.analysis.invariance.models import rows_of_heads, rows_of_table
from locant.analysis.invariance.stack import projections
from locant.hf.bare_tables import BareTable

LONGEST = 2048
"""Positions that R² covers. It takes time and memory with the square of their number."""
SAMPLES = 10
"""Random tables of a control."""
STAGE = "translation invariance"
HEADS = "heads of layer 1"


def inspect_tables(tables: Sequence[BareTable], name: str, *, heads: int | None = None) -> Inspection:
    """Returns the inspection of the position tables of one model.

    heads    attention heads of the model, for R² of E W_Q W_Kᵀ Eᵀ per head. Without it, or without the query and key
             weights of layer 0, this part is left out, and a notice states why.

    The heat map and the components are those of the first table. ValueError if the heads do not divide the weights.
    """
    found = Inspection(name, _facts(tables, heads), question="How does this table tell positions apart?")
    weights = [_head_weights(each, heads) for each in tables]  # first, because wrong heads raise
    found.note(
        "Only position tables were read, no model. Attention by distance, variance, behaviour and probes need the "
        "model, so they are left out."
    )
    start = time.perf_counter()
    for each, its in zip(tables, weights, strict=True):
        stack = _stack(each.name, tables)
        last = min(each.positions.shape[0] - 1, LONGEST)
        _note_rows(each, last, found)
        found.invariances += rows_of_table(each.positions, stack=stack, last=last, samples=SAMPLES)
        if heads is not None and its is not None:
            found.invariances += rows_of_heads(
                each.positions, *its, heads, stack=stack, last=last, samples=SAMPLES
            )  # fmt: skip
        _note_heads(each, heads, its, found)
    first = tables[0].positions
    try:
        found.add_table(first, last=min(first.shape[0] - 1, LONGEST))
    except ValueError as problem:  # all rows are the same
        found.note(problem, "components")
    if len(tables) > 1:
        found.note(f"The heat map and the components are those of {tables[0].name}, the first of {len(tables)} tables.")
    found.seconds[STAGE] = time.perf_counter() - start
    return found


def _facts(tables: Sequence[BareTable], heads: int | None) -> dict[str, str]:
    facts = {
        "table": ", ".join(each.name for each in tables),
        "shape": ", ".join(" × ".join(map(str, each.table.shape)) for each in tables),
        "dtype": ", ".join(dict.fromkeys(str(each.table.dtype).removeprefix("torch.") for each in tables)),
    }
    return facts if heads is None else {**facts, "heads": str(heads)}


def _stack(name: str, tables: Sequence[BareTable]) -> str:
    """What tells a table from the others of its model: "encoder" or "decoder" if that does, or its name."""
    if len(tables) == 1:
        return ""
    parts = [[part for part in each.name.split(".") if part in ("encoder", "decoder")] for each in tables]
    words = [" ".join(each) for each in parts]
    alone = all(words) and len(set(words)) == len(words)
    return words[[each.name for each in tables].index(name)] if alone else name


def _head_weights(table: BareTable, heads: int | None) -> tuple[Tensor, Tensor] | None:
    """W_Q and W_K of layer 0, [heads · head_dim, width of the table]; None if there are none that fit the table."""
    found = projections(table.attention.get, heads or 1)
    if found is None:
        return None
    w_q, w_k = (weight.double() for weight in found)
    if heads is not None and w_q.shape[0] % heads:
        raise ValueError(
            f"the query weight of layer 0 beside {table.name} has {w_q.shape[0]} rows, which {heads} heads do not "
            f"divide; give the number of attention heads of the model"
        )
    width = table.table.shape[1]
    if table.into is not None and w_q.shape[1] != width and table.into.shape == (w_q.shape[1], width):
        w_q, w_k = (weight @ table.into.double() for weight in (w_q, w_k))
    return (w_q, w_k) if w_q.shape[1] == width == w_k.shape[1] else None


def _note_rows(table: BareTable, last: int, found: Inspection) -> None:
    """Notes which rows of a table are not measured."""
    if table.start:
        found.note(
            f"Row {table.start - 1} is zero, so it is taken for the row of the padding token, and row {table.start} "
            f"for position 0.",
            table.name,
        )
    if last < table.positions.shape[0] - 1:
        found.note(f"R² and components cover positions 1–{last} of {table.positions.shape[0]:,}.", table.name)


def _note_heads(
    table: BareTable, heads: int | None, weights: tuple[Tensor, Tensor] | None, found: Inspection
) -> None:  # fmt: skip
    """Notes why there is no R² per head, if there is none."""
    if weights is None:
        found.note(f"left out. No query and key weights of layer 0 that fit {table.name} are stored beside it.", HEADS)
    elif heads is None:
        found.note(
            f"left out. The query and key weights for {table.name} are there, but not the number of heads. Pass it "
            f"(--heads N) to see R² of E W_Q W_Kᵀ Eᵀ per head.",
            HEADS,
        )
