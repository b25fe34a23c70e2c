"""What a model with relative vectors has learned about offsets: its table, and its attention near the diagonal.

contrast   Mean distance of the vectors at near offsets from the mean far vector, divided by that of the far vectors.
           It is about 1 in a random table, and large where near offsets got vectors of their own. A vector that all
           offsets share carries no position, so it is taken away.
nearness   Share of the attention weight of a query on keys at near offsets, minus the share of equal weights there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from locant.papers.place import Place
from locant.papers.steps import Input, open_model, shape_of_input
from locant.runs import text_source
from locant.schemes.huang import Huang1, Huang2, Huang3, Huang4

METHODS = (Huang1, Huang2, Huang3, Huang4)
NEAR = 8
"""Largest near offset, as that of a local head in `analysis.distance`."""
FAR = 50
"""Largest offset of the paper's figure."""
TOKENS, SEQUENCES = 64, 8
"""Tokens and number of the sequences on which attention is measured."""
MOST = 96
"""Most rows and columns of a table that are kept for its picture."""


def contrast(table: Tensor) -> float:
    """Returns the contrast of vectors [2·clip + 1, D], whose middle row is offset 0."""
    clip = len(table) // 2
    offsets = torch.arange(-clip, clip + 1).abs()
    near, far = offsets <= NEAR, (offsets > NEAR) & (offsets <= FAR)
    if not bool(far.any()):
        raise ValueError(f"a contrast needs offsets beyond {NEAR}, but the table ends at {clip}; use a larger clip")
    distance = (table - table[far].mean(0)).norm(dim=-1)
    return float(distance[near].mean() / distance[far].mean())


def nearness(weights: Tensor) -> float:
    """Returns the nearness of mean attention weights [L, L], whose rows sum to 1."""
    at = torch.arange(len(weights))
    near = (at[None] - at[:, None]).abs() <= NEAR
    share = (weights * near).sum(-1)
    return float((share - near.double().mean(-1)).mean())


@dataclass(frozen=True)
class Offsets:
    """Measures one adapted model of method 4; the function of a `Measuring` step."""

    model: Input
    original: Input
    text: Input
    spec: str  # of the adapted model, for a fresh table
    seed: int

    def __call__(self, at: Place) -> dict[str, Any]:
        """Returns both numbers before and after training, and the first layer's vectors and mean attention."""
        from locant.analysis.distance import by_distance
        from locant.analysis.text import sequences
        from locant.hf.swapping import exchange

        model, tokenizer = open_model(self.model.path(at))
        text = text_source.text(str(self.text.path(at))).test
        ids = sequences(tokenizer, text, count=SEQUENCES, length=TOKENS)
        weights = by_distance(model.eval(), ids)[0].weights.double().mean(0)
        fresh, _ = open_model(self.original.path(at))
        torch.manual_seed(self.seed)
        exchange(fresh, self.spec)
        table, before = first_table(model), first_table(fresh)
        head, first = table[0], before[0]
        return {
            "contrast": {"trained": contrast(head), "initial": contrast(first)},
            "nearness": nearness(weights),
            "clip": len(head) // 2,
            "vectors": head.tolist(),
            "initial": first.tolist(),
            "weights": weights.tolist(),
        }

    def cost(self, at: Place) -> float:
        """Returns the floating-point operations."""
        return 3 * shape_of_input(self.original, at).reading(TOKENS * SEQUENCES, TOKENS)


@dataclass(frozen=True)
class Tables:
    """Reads the position table of the original and the scalars of a model of method 2: pictures without a judgement."""

    original: Input
    scalars: Input

    def __call__(self, at: Place) -> dict[str, Any]:
        """Returns the table [rows, columns], thinned, with the numbers of rows and columns, and the scalars by head."""
        from locant.hf.readout import native

        model, _ = open_model(self.original.path(at))
        table = native(model).table
        if table is None:
            raise ValueError(f"{self.original.name} has no position table to draw")
        rows, columns = (_thinned(count) for count in table.shape)
        other, _ = open_model(self.scalars.path(at))
        return {
            "rows": rows,
            "columns": columns,
            "table": table.detach()[rows][:, columns].tolist(),
            "scalars": first_table(other).tolist(),
        }

    def cost(self, at: Place) -> float:
        """Returns the floating-point operations: reading two files."""
        return 1e9


def first_table(model: Any) -> Tensor:
    """Returns the table of method 1 to 4 in the first layer: [H, R(, D)], H = 1 if the heads share it."""
    from locant.hf.plan import plan_of

    plan = plan_of(model)
    tables = (
        []
        if plan is None
        else [part.table for part in plan.stacks[0].schemes[0].modules() if isinstance(part, METHODS)]
    )
    if len(tables) != 1:
        raise ValueError(f"the first layer must have one table by offset; it has {len(tables)}")
    found: Tensor = tables[0].detach().double().cpu()
    return found


def _thinned(count: int) -> list[int]:
    return list(range(0, count, -(-count // MOST)))
