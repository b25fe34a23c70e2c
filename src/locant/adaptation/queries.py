"""Queries that are turned: what a scheme cannot do, the content product may do in its place.

    q ← A_h q + a_h         one matrix [D, D] and, where queries have one, one bias [D] for each head

A rotation R(j − i) inside the product, or a table whose rows are part of queries and keys, leaves a content product
behind that was never meant to stand alone. The cross-entropy of attention is as convex in A and a as it is in a bias,
so that `fit` finds both at once. They go into the layer that makes the queries: the model costs what it cost before.

No family is listed: that layer is found by comparing numbers, since it may make keys and values as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

if TYPE_CHECKING:
    from locant.adaptation.below import Below
    from locant.attention.request import Request

COMPARED = 64
"""Tokens by which the columns of a layer are told apart."""
UNIT = 0.3
"""How far an entry of A has to go to make a difference."""


class Turn(nn.Module):
    """The matrices A [H, D, D] and vectors a [H, D] of one attention; as it starts it changes nothing."""

    def __init__(self, heads: int, dim: int, *, shift: bool, like: Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(dim, device=like.device, dtype=like.dtype).repeat(heads, 1, 1))
        self.shift = nn.Parameter(like.new_zeros(heads, dim)) if shift else None

    def forward(self, q: Tensor) -> Tensor:
        """[B, H, L, D] to the same."""
        turned = q @ self.matrix.mT
        return turned if self.shift is None else turned + self.shift[:, None]


@dataclass(frozen=True)
class Maker:
    """The layer that makes queries, and which column of what it gives is which coordinate of which head, [H, D].

    Some models scale queries themselves: by `factor`, after this layer. `reach` runs the model as far as the attention.
    """

    layer: nn.Module
    columns: Tensor
    reach: Callable[[], Request]
    factor: float = 1.0

    def turn(self) -> Turn:
        weight: Any = self.layer.weight
        return Turn(*self.columns.shape, shift=self.layer.bias is not None, like=weight.detach())

    @torch.no_grad()
    def put(self, turn: Turn) -> bool:
        """The layer makes turned queries from now on. If that is not so, or not all, it stays as it was: False."""
        before, weights = self.reach(), [parameter.clone() for parameter in self.layer.parameters()]
        self._write(turn)
        after = self.reach()
        right = torch.allclose(after.q, turn(before.q), rtol=1e-3, atol=1e-3 * float(before.q.abs().max()))
        right = right and torch.equal(after.k, before.k) and torch.equal(after.v, before.v)
        if not right:
            for parameter, was in zip(self.layer.parameters(), weights, strict=True):
                parameter.copy_(was)
        return right

    def _write(self, turn: Turn) -> None:
        weight: Any = self.layer.weight
        rows = weight.mT if isinstance(self.layer, Conv1D) else weight  # [columns, inputs], a view
        rows[self.columns] = turn.matrix @ rows[self.columns]
        bias: Any = self.layer.bias
        if turn.shift is not None:
            bias[self.columns] = (turn.matrix @ bias[self.columns][..., None])[..., 0] + turn.shift / self.factor


def find(runs: Below, attention: nn.Module) -> Maker | None:
    """Who makes the queries of an attention of a swapped model; None if no linear layer alone does."""
    given: list[tuple[nn.Module, Tensor]] = []
    names = Counter(id(weight) for _, weight in runs.model.named_parameters(remove_duplicate=False))
    with ExitStack() as stack:
        for layer in attention.modules():
            # Weights that are used elsewhere too, or made from others, are not this layer's to turn.
            own = isinstance(layer, (nn.Linear, Conv1D)) and "weight" in layer._parameters
            if own and all(names[id(weight)] == 1 for weight in layer.parameters()):
                heard = layer.register_forward_hook(lambda layer, args, output: given.append((layer, output)))
                stack.enter_context(heard)
        with torch.no_grad():
            q = runs.reach(0, attention)[0].q
    for layer, output in given:
        for factor in (1.0, q.shape[-1] ** -0.5):
            columns = _columns(q, output.flatten(0, -2) * factor)
            if columns is not None:
                return Maker(layer, columns, lambda: runs.reach(0, attention)[0], factor)
    return None


def _columns(q: Tensor, output: Tensor) -> Tensor | None:
    """[H, D]: which columns of an output [N, O] are the queries [B, H, L, D]; None if not all of them are there."""
    heads = q.transpose(0, 1).flatten(1, 2)  # [H, N, D]
    if heads.shape[1] != output.shape[0]:
        return None
    heads, output = heads[:, :COMPARED], output[:COMPARED]
    found = torch.stack([torch.cdist(head.mT[None], output.mT[None], p=torch.inf)[0].argmin(-1) for head in heads])
    same = torch.equal(output[:, found].permute(1, 0, 2), heads)
    return found if same and len(found.unique()) == found.numel() else None
