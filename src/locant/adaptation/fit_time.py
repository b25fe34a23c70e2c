"""Keeps a fit within its time limit.

The time of a fit is layers · iterations · evaluations per iteration · seconds of an evaluation, and the last factor is
proportional to the number of sequences. A model of 30 layers needs minutes on a laptop, and `adapt` has to train too.

`affordable` times one evaluation of the loss: if all sequences would take too long, fewer are taken. That is a forecast
from one layer, and line searches in others may take longer. So `FitClock` gives every layer an equal part of the time
that is left, and the search in a layer stops when its part is used up.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from locant.adaptation.cross_entropy import cross_entropy
from locant.adaptation.layer_cache import LayerCache
from locant.adaptation.queries import find_query_layer
from locant.schemes import Scheme

EVALUATIONS = 1.25
"""Evaluations of the loss in an iteration of L-BFGS with its line search, on average."""


class FitClock:
    """Divides the time that is left equally among the layers that are left."""

    def __init__(self, seconds: float | None, layers: int) -> None:
        self.end, self.layers = math.inf if seconds is None else time.perf_counter() + seconds, layers
        self.cut_short: list[int] = []  # layers whose search the limit ended

    def next_layers(self, number: int) -> float:
        """Returns the time limit of the next layers together, in seconds."""
        left, self.layers = self.layers, self.layers - number
        return max(0.0, self.end - time.perf_counter()) * number / max(left, number)


def affordable(
    seconds: float, cache: LayerCache, name: str, scheme: Scheme, goal: list[Tensor], *, queries: bool, iterations: int
) -> float:
    """Returns the share of the sequences on which one layer can be fitted in these seconds; more than 1 if all.

    name      the attention of the layer.
    goal      its attention weights in the original.
    queries   whether its queries are fitted too.
    """
    attention = cache.model.base_model.get_submodule(name)
    layer = find_query_layer(cache, attention) if queries else None
    query_map = None if layer is None else layer.identity()
    parameters = [*scheme.parameters(), *([] if query_map is None else query_map.parameters())]
    if not any(parameter.requires_grad for parameter in parameters):
        return 1.0
    count = len(cache.batches)
    requests = [request for at in range(count) for request in cache.requests(at, attention, len(goal) // count)]
    for _ in range(2):  # the first is slower
        start = time.perf_counter()
        with torch.enable_grad():
            cross_entropy(scheme, requests, goal, query_map)
        spent = time.perf_counter() - start
    for parameter in parameters:
        parameter.grad = None
    return seconds / (EVALUATIONS * iterations * max(spent, 1e-9))


def fewer(share: float, cache: LayerCache, goals: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    """Keeps a share of the sequences of every batch, at least one; returns the weights of the original for these."""
    if share >= 1:
        return goals
    kept = [max(1, int(share * len(rows))) for rows in cache.batches]
    cache.batches = [rows[:count] for rows, count in zip(cache.batches, kept, strict=True)]
    return {
        name: [weights[: kept[at * len(kept) // len(goal)]] for at, weights in enumerate(goal)]
        for name, goal in goals.items()
    }
