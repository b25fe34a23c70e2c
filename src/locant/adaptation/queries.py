"""Changes the queries of a layer as part of its fit: one affine map per head, merged into the query weights.

    q ← A_h q + a_h         a matrix [D, D] per head and, if the query layer has a bias, a vector [D] per head

A model with a rotation R(j − i) inside the content product, or with a table added to its tokens, was never trained to
use the content product alone. The cross-entropy of attention is convex in A and a, as it is in a bias, so `fit` finds
all of them together. The layer that computes the queries absorbs the map, so the model costs the same as before.

That layer may compute keys and values as well, and every family names it differently. So it is found by comparing
numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from locant.adaptation.layer_cache import LayerCache
from locant.attention.request import Request

COMPARED = 64
"""Number of tokens on which queries are compared with the columns of a layer."""
SCALE = 0.3
"""Characteristic scale of the entries of A and a (see `Scheme.parameter_scale`)."""


class QueryMap(nn.Module):
    """The matrices A [H, D, D] and vectors a [H, D] of one attention; starts as the identity."""

    def __init__(self, heads: int, dim: int, *, shift: bool, like: Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(dim, device=like.device, dtype=like.dtype).repeat(heads, 1, 1))
        self.shift = nn.Parameter(like.new_zeros(heads, dim)) if shift else None

    def forward(self, q: Tensor) -> Tensor:
        """[B, H, L, D] to the same shape."""
        mapped = q @ self.matrix.mT
        return mapped if self.shift is None else mapped + self.shift[:, None]


@dataclass(frozen=True)
class QueryLayer:
    """The linear layer that computes the queries of an attention."""

    layer: nn.Module
    columns: Tensor  # [H, D], the output column of each coordinate of each head
    request: Callable[[], Request]  # runs the model as far as the attention
    factor: float = 1.0  # by which some models scale the output before it becomes the query

    def identity(self) -> QueryMap:
        """Returns a map for these queries that changes nothing yet."""
        weight: Any = self.layer.weight
        return QueryMap(*self.columns.shape, shift=self.layer.bias is not None, like=weight.detach())

    @torch.no_grad()
    def merge(self, query_map: QueryMap) -> bool:
        """Merges a map into the weights of the layer, and returns whether the model then computes it.

        If queries differ from the mapped ones, or keys or values change, the weights are restored.
        """
        before, weights = self.request(), [parameter.clone() for parameter in self.layer.parameters()]
        self._write(query_map)
        after = self.request()
        right = torch.allclose(after.q, query_map(before.q), rtol=1e-3, atol=1e-3 * float(before.q.abs().max()))
        right = right and torch.equal(after.k, before.k) and torch.equal(after.v, before.v)
        if not right:
            for parameter, value in zip(self.layer.parameters(), weights, strict=True):
                parameter.copy_(value)
        return right

    def _write(self, query_map: QueryMap) -> None:
        weight: Any = self.layer.weight
        rows = weight.mT if isinstance(self.layer, Conv1D) else weight  # [columns, inputs], a view
        rows[self.columns] = query_map.matrix @ rows[self.columns]
        bias: Any = self.layer.bias
        if query_map.shift is not None:
            mapped = (query_map.matrix @ bias[self.columns][..., None])[..., 0]
            bias[self.columns] = mapped + query_map.shift / self.factor


def find_query_layer(cache: LayerCache, attention: nn.Module) -> QueryLayer | None:
    """Returns the layer that computes the queries of an attention; None if no linear layer alone does."""
    outputs: list[tuple[nn.Module, Tensor]] = []
    uses = Counter(id(weight) for _, weight in cache.model.named_parameters(remove_duplicate=False))
    with ExitStack() as stack:
        for layer in attention.modules():
            # Weights that are shared, or computed from other parameters, must not be changed for this layer.
            own = isinstance(layer, (nn.Linear, Conv1D)) and "weight" in layer._parameters
            if own and all(uses[id(weight)] == 1 for weight in layer.parameters()):
                hook = layer.register_forward_hook(lambda layer, args, output: outputs.append((layer, output)))
                stack.enter_context(hook)
        with torch.no_grad():
            q = cache.requests(0, attention)[0].q
    for layer, output in outputs:
        for factor in (1.0, q.shape[-1] ** -0.5):
            columns = _columns(q, output.flatten(0, -2) * factor)
            if columns is not None:
                return QueryLayer(layer, columns, lambda: cache.requests(0, attention)[0], factor)
    return None


def _columns(q: Tensor, output: Tensor) -> Tensor | None:
    """[H, D]: the columns of an output [N, O] that equal the queries [B, H, L, D]; None unless each has its own."""
    heads = q.transpose(0, 1).flatten(1, 2)  # [H, N, D]
    if heads.shape[1] != output.shape[0]:
        return None
    heads, output = heads[:, :COMPARED], output[:COMPARED]
    found = torch.stack([torch.cdist(head.mT[None], output.mT[None], p=torch.inf)[0].argmin(-1) for head in heads])
    same = torch.equal(output[:, found].permute(1, 0, 2), heads)
    return found if same and len(found.unique()) == found.numel() else None
