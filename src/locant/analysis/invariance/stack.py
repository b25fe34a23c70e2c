"""The stacks of a model of transformers and their current positions, read from live parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.analysis.invariance.schemes import LENGTH
from locant.hf.finding import family_of
from locant.hf.mechanisms import Mechanism
from locant.hf.plan import Attention, plan_of
from locant.hf.probing import find_attentions
from locant.hf.readout import native
from locant.schemes import Scheme


@dataclass(frozen=True)
class Stack:
    """A stack of a model and its current positions. `table` reads live parameters."""

    name: str  # "encoder" or "decoder"; "" for a model with one stack
    spec: str  # of the table
    table: Callable[[], Tensor] | None
    project: nn.Module | None  # between the embeddings and the first layer
    attentions: list[Attention]
    modules: list[nn.Module]
    schemes: list[Scheme]  # one per attention; empty if there are none

    def head_weights(self) -> tuple[Tensor, Tensor] | None:
        """Returns W_Q and W_K of the first layer, [heads · head_dim, width of the table]; None if none are found."""
        found = _projections(self.modules[0], self.attentions[0])
        if found is None or self.table is None:
            return None
        w_q, w_k = (w.detach().double().cpu() for w in found)
        width = self.table().shape[1]
        if self.project is not None and w_q.shape[1] != width:
            into: Any = self.project.weight
            w_q, w_k = (w @ into.detach().double().cpu() for w in (w_q, w_k))
        return (w_q, w_k) if w_q.shape[1] == width else None


def _projections(module: nn.Module, attention: Attention) -> tuple[Tensor, Tensor] | None:
    """W_Q and W_K of an attention module, [heads · head_dim, width]."""

    def weight(name: str) -> Tensor | None:
        found = getattr(getattr(module, name, None), "weight", None)
        return found if isinstance(found, Tensor) else None

    return projections(weight, attention.n_heads, attention.n_heads * attention.head_dim)


def projections(
    weight: Callable[[str], Tensor | None], n_heads: int, inner: int | None = None
) -> tuple[Tensor, Tensor] | None:
    """Returns W_Q and W_K, [heads · head_dim, width], under the names that transformers uses; None if there are none.

    weight    the weight of the layer with this name, or None
    inner     heads · head_dim; if it is None, that of the weights is taken
    """

    def matrix(name: str) -> Tensor | None:
        found = weight(name)
        return found if found is not None and found.is_floating_point() and found.ndim == 2 else None

    def third(size: int) -> int | None:
        """The rows of q in a weight for q, k and v; None if the weight has another size."""
        return size // 3 if size % 3 == 0 and inner in (None, size // 3) else None

    for names in (("query", "key"), ("q_proj", "k_proj"), ("q_lin", "k_lin"), ("q", "k")):
        q, k = map(matrix, names)
        if q is not None and k is not None and inner in (None, q.shape[0]):
            return q, k
    conv = matrix("c_attn")  # GPT-2's Conv1D: [width, q then k then v]
    if conv is not None and (rows := third(conv.shape[1])):
        return conv[:, :rows].mT, conv[:, rows : 2 * rows].mT
    joined = matrix("Wqkv")  # q, then k, then v
    if joined is not None and (rows := third(joined.shape[0])):
        return joined[:rows], joined[rows : 2 * rows]
    by_head = matrix("query_key_value")  # GPT-NeoX: q, k, v of the first head, then of the second
    if by_head is not None and (rows := third(by_head.shape[0])) and rows % n_heads == 0:
        parts = by_head.unflatten(0, (n_heads, 3, rows // n_heads))
        return parts[:, 0].flatten(0, 1), parts[:, 1].flatten(0, 1)
    return None


def stacks(model: PreTrainedModel) -> list[Stack]:
    """Returns the stacks of a model: an encoder-decoder has two, other models one."""
    read, plan, base = native(model), plan_of(model), model.base_model
    mechanism = family_of(model).mechanism
    if plan is None:
        names = find_attentions(model, family_of(model))
    else:
        names = {stack.path: stack.attentions for stack in plan.stacks}
    found = []
    for (path, attentions), positions in zip(names.items(), read.stacks, strict=True):
        stack = base.get_submodule(path)
        tables: list[Callable[[], Tensor]] = []
        own = mechanism.own_table(stack) if plan is None or plan.keep_native else None
        if own is not None:
            tables.append(partial(_own_table, mechanism, stack))
        new = next((each.embed for each in plan.stacks if each.path == path), None) if plan is not None else None
        if new is not None:
            tables.append(_embedding(new))
        project = next(
            (
                module
                for name in ("encoder.embedding_hidden_mapping_in", "embeddings_project", "project_in")
                if isinstance(module := _submodule(stack, name), nn.Linear)
            ),
            None,
        )
        found.append(
            Stack(
                name=path if len(names) > 1 else "",
                spec="" if positions.embed is None else str(positions.embed),
                table=partial(_add, tables) if tables else None,
                project=project,
                attentions=attentions,
                modules=[base.get_submodule(attention.name) for attention in attentions],
                schemes=list(positions.layers or []),
            )
        )
    return found


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    for name in path.split("."):
        module = getattr(module, name, None)  # type: ignore[assignment]
    return module


def _own_table(mechanism: Mechanism, stack: nn.Module) -> Tensor:
    """The model's own table, read again at every call: `Stack.table` is about the parameters of that moment."""
    found = mechanism.own_table(stack)
    assert found is not None
    return found


def _embedding(scheme: Scheme) -> Callable[[], Tensor]:
    def read() -> Tensor:
        here = next(scheme.parameters(), next(scheme.buffers(), torch.empty(0))).device
        embedded = scheme.embed(torch.arange(scheme.max_length or LENGTH, device=here))
        assert embedded is not None
        return embedded

    return read


def _add(parts: list[Callable[[], Tensor]]) -> Tensor:
    tables = [part() for part in parts]
    length = min(table.shape[0] for table in tables)
    return torch.stack([table[:length] for table in tables]).sum(0)
