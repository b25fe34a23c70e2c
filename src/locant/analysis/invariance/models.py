"""Every R² of a model of transformers, swapped or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from locant.analysis.invariance.schemes import LENGTH, scheme_logits
from locant.analysis.invariance.scores import NONE, Control, of_heads, of_logits, of_table
from locant.analysis.invariance.stack import Stack, stacks
from locant.analysis.invariance.toeplitz import r2_of
from locant.schemes import Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from locant.hf.plan import Attention


@dataclass(frozen=True)
class Row:
    """One number about a model. `exact` is 1 where the mathematics of the scheme says so, whatever its parameters."""

    stack: str  # "" or, of an encoder-decoder, which
    layer: int | None  # None: added to the tokens, before the first layer
    head: int | None
    scheme: str
    quantity: str  # "E Eᵀ", "E Eᵀ, i ≠ j", "cosine", "E W_Q W_Kᵀ Eᵀ" (F̂), "logits"
    first: int
    last: int
    r2: float
    exact: float | None
    interval: tuple[float, float] | None
    control: Control | None
    note: str


@torch.no_grad()
def of_model(
    model: PreTrainedModel,
    *,
    first: int = 1,
    last: int | None = None,
    length: int = LENGTH,
    samples: int = 20,
    seed: int = 0,
) -> list[Row]:
    """Every R² of a model of transformers, swapped or not.

    A table: E Eᵀ, cosines, and F̂ of each head of the first layer where its weights are found, over first … last. A
    scheme inside attention: its logits with all tokens alike, over positions 0 … length − 1, mean over random tokens
    where it acts on tokens; one set of rows for each scheme that differs. `exact` is 1 where moving all positions
    changes nothing and a pair depends on nothing but itself, so that the logits are Toeplitz by their mathematics.
    """
    rows: list[Row] = []
    for stack in stacks(model):
        before = len(rows)
        if stack.table is not None:
            rows += _table_rows(stack, first, last, samples, seed)
        done: set[object] = set()
        for layer, (module, attention, scheme) in enumerate(
            zip(stack.modules, stack.attentions, stack.schemes, strict=False), start=1
        ):
            same = id(scheme) if list(scheme.parameters()) else str(scheme)
            if not scheme.silent and same not in done:
                rows += _scheme_rows(stack, layer, module, attention, scheme, length, samples, seed)
            done.add(same)
        if len(rows) == before:
            note = "no positions: the tokens are a set, and but for a causal mask their order cannot be seen"
            rows.append(
                Row(stack.name, None, None, "nope", "logits", 0, length - 1, 1.0, 1.0, None, None, note)
            )  # all zeros, which is constant
    return rows


def _table_rows(stack: Stack, first: int, last: int | None, samples: int, seed: int) -> list[Row]:
    assert stack.table is not None
    table = stack.table().detach()
    x = of_table(table, first=first, last=last, samples=samples, seed=seed)
    where = (stack.spec, x.first, x.last)
    note = f"norm of position 0: {x.norm_of_0:.3g} × the median"
    rows = [
        _row(stack, None, None, "E Eᵀ", *where, x.gram, None, x.gram_interval, x.gram_control, note),
        _row(
            stack,
            None,
            None,
            "E Eᵀ, i ≠ j",
            *where,
            x.off_diagonal,
            None,
            x.off_diagonal_interval,
            x.off_diagonal_control,
            "",
        ),
        _row(stack, None, None, "cosine", *where, x.cosine, None, x.cosine_interval, x.cosine_control, ""),
    ]
    weights = stack.head_weights()
    if weights is None:
        note = f"no query and key weights known in {type(stack.modules[0]).__name__}"
        return [*rows, _row(stack, 1, None, "E W_Q W_Kᵀ Eᵀ", *where, NONE, None, None, None, note)]
    heads = of_heads(table, *weights, stack.attentions[0].n_heads, first=first, last=last, samples=samples, seed=seed)
    note = "layer norm left out"
    return rows + [_row(stack, 1, x.head, "E W_Q W_Kᵀ Eᵀ", *where, x.r2, None, None, x.control, note) for x in heads]


def _row(
    stack: Stack, layer: int | None, head: int | None, quantity: str, scheme: str, first: int, last: int, r2: float,
    exact: float | None, interval: tuple[float, float] | None, control: Control | None, note: str,
) -> Row:  # fmt: skip
    return Row(stack.name, layer, head, scheme, quantity, first, last, r2, exact, interval, control, note)


def _scheme_rows(
    stack: Stack, layer: int, module: nn.Module, attention: Attention, scheme: Scheme, length: int, samples: int,
    seed: int,
) -> list[Row]:  # fmt: skip
    logits = scheme_logits(
        scheme, length=length, n_heads=attention.n_heads, head_dim=attention.head_dim,
        causal=bool(getattr(module, "is_causal", False)), seed=seed,
    )  # fmt: skip
    r2 = r2_of(logits).mean(0)
    controls = of_logits(logits[0], samples=samples, seed=seed)
    exact = 1.0 if scheme.shift_invariant and scheme.pairwise else None
    note = "the bias itself" if logits.shape[0] == 1 else f"mean over {logits.shape[0]} random q and k"
    last = logits.shape[-1] - 1
    return [
        _row(stack, layer, x.head, "logits", str(scheme), 0, last, float(r2[x.head - 1]), exact, None, x.control, note)
        for x in controls
    ]
