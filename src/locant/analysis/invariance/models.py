"""Every R² of a model of transformers, swapped or not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.analysis.invariance.schemes import LENGTH, scheme_logits
from locant.analysis.invariance.scores import NONE, Control, of_heads, of_logits, of_table
from locant.analysis.invariance.stack import Stack, stacks
from locant.analysis.invariance.toeplitz import r2_of
from locant.hf.plan import Attention
from locant.schemes import Scheme

OF_HEADS = "E W_Q W_Kᵀ Eᵀ"


@dataclass(frozen=True)
class InvarianceRow:
    """One R² of a model. `exact` is 1 if the scheme is Toeplitz for all values of its parameters."""

    stack: str  # "encoder" or "decoder"; "" for a model with one stack
    layer: int | None  # None: added to the tokens, before the first layer
    head: int | None
    scheme: str
    quantity: str  # "E Eᵀ", "E Eᵀ, i ≠ j", "cosine", "E W_Q W_Kᵀ Eᵀ" (F̂), "logits"
    first: int
    last: int
    r2: float
    exact: float | None = None
    interval: tuple[float, float] | None = None
    control: Control | None = None
    note: str = ""


@torch.no_grad()
def of_model(
    model: PreTrainedModel,
    *,
    first: int = 1,
    last: int | None = None,
    length: int = LENGTH,
    samples: int = 20,
    seed: int = 0,
) -> list[InvarianceRow]:
    """Returns every R² of a model of transformers, swapped or not.

    For a table: E Eᵀ, cosines, and F̂ of each head of the first layer where locant finds its weights, over positions
    first … last. For a scheme inside attention: its logits when all tokens are the same, over positions 0 … length − 1,
    as a mean over random tokens if the scheme acts on tokens. Layers with equal schemes have one set of rows. `exact`
    is 1 if moving all positions changes nothing and a pair depends on no other token: the logits are then Toeplitz.
    """
    rows: list[InvarianceRow] = []
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
            note = "no positions: except for a causal mask, the model treats its tokens as a set"
            zeros = InvarianceRow(stack.name, None, None, "nope", "logits", 0, length - 1, r2=1.0, exact=1.0, note=note)
            rows.append(zeros)  # a constant matrix is Toeplitz
    return rows


def _table_rows(stack: Stack, first: int, last: int | None, samples: int, seed: int) -> list[InvarianceRow]:
    assert stack.table is not None
    table = stack.table().detach()
    same: dict[str, Any] = {"stack": stack.name, "scheme": stack.spec, "first": first, "last": last,
                            "samples": samples, "seed": seed}  # fmt: skip
    rows = rows_of_table(table, **same)
    weights = stack.head_weights()
    if weights is None:
        note = f"found no query and key weights in {type(stack.modules[0]).__name__}"
        missing = replace(rows[0], layer=1, quantity=OF_HEADS, r2=NONE, interval=None, control=None, note=note)
        return [*rows, missing]
    return rows + rows_of_heads(table, weights[0], weights[1], stack.attentions[0].n_heads, **same)


def rows_of_table(
    table: Tensor, *, stack: str = "", scheme: str = "", first: int = 1, last: int | None = None, samples: int = 20,
    seed: int = 0,
) -> list[InvarianceRow]:  # fmt: skip
    """Returns R² of a table: of E Eᵀ with and without its main diagonal, and of cosines. See `of_table`."""
    x = of_table(table, first=first, last=last, samples=samples, seed=seed)
    row = partial(InvarianceRow, stack=stack, layer=None, head=None, scheme=scheme, first=x.first, last=x.last)
    note = f"norm of position 0: {x.norm_of_0:.3g} × the median"
    without = (x.off_diagonal_interval, x.off_diagonal_control)
    return [
        row(quantity="E Eᵀ", r2=x.gram, interval=x.gram_interval, control=x.gram_control, note=note),
        row(quantity="E Eᵀ, i ≠ j", r2=x.off_diagonal, interval=without[0], control=without[1]),
        row(quantity="cosine", r2=x.cosine, interval=x.cosine_interval, control=x.cosine_control),
    ]


def rows_of_heads(
    table: Tensor, w_q: Tensor, w_k: Tensor, n_heads: int, *, stack: str = "", scheme: str = "", first: int = 1,
    last: int | None = None, samples: int = 20, seed: int = 0,
) -> list[InvarianceRow]:  # fmt: skip
    """Returns R² of F̂ for each head of the first layer. See `of_heads`."""
    last = table.shape[0] - 1 if last is None else last
    heads = of_heads(table, w_q, w_k, n_heads, first=first, last=last, samples=samples, seed=seed)
    row = partial(InvarianceRow, stack=stack, layer=1, scheme=scheme, quantity=OF_HEADS, first=first, last=last)
    return [row(head=x.head, r2=x.r2, control=x.control, note="without the layer norm") for x in heads]


def _scheme_rows(
    stack: Stack, layer: int, module: nn.Module, attention: Attention, scheme: Scheme, length: int, samples: int,
    seed: int,
) -> list[InvarianceRow]:  # fmt: skip
    logits = scheme_logits(
        scheme, length=length, n_heads=attention.n_heads, head_dim=attention.head_dim,
        causal=bool(getattr(module, "is_causal", False)), seed=seed,
    )  # fmt: skip
    r2 = r2_of(logits).mean(0)
    controls = of_logits(logits[0], samples=samples, seed=seed)
    row = partial(
        InvarianceRow, stack=stack.name, layer=layer, scheme=str(scheme), quantity="logits", first=0,
        last=logits.shape[-1] - 1, exact=1.0 if scheme.shift_invariant and scheme.pairwise else None,
        note="the bias itself" if logits.shape[0] == 1 else f"mean over {logits.shape[0]} random q and k",
    )  # fmt: skip
    return [row(head=x.head, r2=float(r2[x.head - 1]), control=x.control) for x in controls]
