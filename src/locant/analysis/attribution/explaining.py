"""One run of a model by the rules, and its backward passes: the relevance of every input and constant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.analysis.attribution.attending import Attentions, Flow
from locant.analysis.attribution.checks import unchanged_by_hooks
from locant.analysis.attribution.rules import Linearized, whole_activations
from locant.hf.finding import family_of
from locant.hf.interface import EMBED
from locant.hf.listening import observing
from locant.hf.mechanisms import Table
from locant.hf.mechanisms.base import find
from locant.hf.mechanisms.table import Carried, Embedded
from locant.hf.swapping import native_as_schemes
from locant.schemes import Scheme

TOLERANCE = 1e-4
"""Largest error of conservation, relative to the output."""
CANCELLED = 1e-2
"""An output smaller than this share of the relevance that sums to it is measured against that share instead."""


@dataclass
class Run:
    """A run by the rules: the explained output with its graph, and the leaves that it is a sum over."""

    value: Tensor  # the output: a scalar, or a vector whose product with another is explained
    tokens: list[tuple[int, Tensor]]  # (0 for the text, 1 for the decoder's, leaf [1, L, width])
    positions: list[Tensor]  # leaves of absolute positions
    constants: list[Tensor]  # leaves of biases and other constants
    attentions: Attentions


@dataclass(frozen=True)
class Explained:
    """The relevance of one run. `text` has the tokens of the text, then those of a decoder."""

    relevance: Tensor  # [L]: R, by token
    content: Tensor  # [L]: C, the part that passes through no positional term
    position: Tensor  # [L]: T, of the row of a position table at each token
    values: float  # of the vectors u_r beside the values, all layers
    biases: float
    flows: list[Flow]
    gross: float


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Parameters are constants: only what depends on the tokens requires a gradient."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)


@contextmanager
def _tables(model: PreTrainedModel, mode: Linearized, found: list[Tensor]) -> Iterator[None]:
    """Makes a leaf of whatever a table of absolute positions returns."""
    replaced: list[tuple[nn.Module, str, Any]] = []

    def leaf(x: Tensor) -> Tensor:
        if not x.is_floating_point() or x.ndim == 0:  # a table that a swap removed adds a zero
            return x
        found.append(x.detach().requires_grad_())
        return found[-1].clone()

    def wrapped(run: Callable[..., Any]) -> Callable[..., Any]:
        def table(*args: Any, **kwargs: Any) -> Any:
            with mode.off(), torch.no_grad():
                out = run(*args, **kwargs)
            return (leaf(out[0]), *out[1:]) if isinstance(out, tuple) else leaf(out)

        return table

    try:
        mode.tables = [(table, leaf) for table in _indexed_tables(model)]
        for module, name in _position_modules(model):
            replaced.append((module, name, module.__dict__.get(name)))
            module.__dict__[name] = wrapped(getattr(module, name))
        yield
    finally:
        for module, name, before in reversed(replaced):
            del module.__dict__[name]
            if before is not None:
                module.__dict__[name] = before


def _position_modules(model: PreTrainedModel) -> list[tuple[nn.Module, str]]:
    """Modules that return absolute positions, with the name of the method that does; outermost modules alone."""
    base, family = model.base_model, family_of(model)
    found: dict[nn.Module, str] = {}
    for path in family.stacks(base):
        stack = base.get_submodule(path)
        own = getattr(stack, EMBED, None)
        if isinstance(own, Scheme):
            found[own] = "embed"
        if isinstance(family.mechanism, Table):
            parent, _, name = family.mechanism.path.rpartition(".")
            table = getattr(stack.get_submodule(parent), name, None)
            if isinstance(table, nn.Module):
                found[table] = "forward"
    for module in base.modules():
        if isinstance(module, (Embedded, Carried)):
            found[module] = "forward"
    inner = {part for module in found for part in module.modules() if part is not module}
    return [(module, name) for module, name in found.items() if module not in inner]


def _indexed_tables(model: PreTrainedModel) -> list[Tensor]:
    """Tables that a model indexes without a module (CTRL)."""
    base, family = model.base_model, family_of(model)
    if not isinstance(family.mechanism, Table):
        return []
    parts = [find(base.get_submodule(path), family.mechanism.path) for path in family.stacks(base)]
    found = [getattr(parent, name, None) for parent, name in parts]
    return [table for table in found if isinstance(table, Tensor)]


@contextmanager
def by_rules(model: PreTrainedModel, texts: list[Tensor]) -> Iterator[tuple[Linearized, Run]]:
    """Runs a model by the rules of `rules` inside the block.

    `texts` are the token ids it will receive: these tensors themselves. Other ids, such as token types, may be equal.
    """
    mode = Linearized(f"{model.config.model_type} ({type(model).__name__})")
    names = {module: name for name, module in model.base_model.named_modules()}
    attentions = Attentions(mode, names)
    run = Run(torch.empty(0), [], [], mode.constants, attentions)

    def embedded(ids: Tensor, found: Tensor) -> Tensor | None:
        which = mode.origins.get(ids)
        # Ids of positions may be counted from those of the text.
        if which is None or ids.numel() != texts[which].numel() or not torch.equal(ids.flatten(), texts[which][0]):
            return None
        leaf = found.detach().requires_grad_()
        run.tokens.append((which, leaf))
        return leaf.clone()  # models write into it

    mode.embedding = embedded
    mode.leaves = lambda: [*(leaf for _, leaf in run.tokens), *run.positions, *attentions.values, *mode.constants]
    for which, text in enumerate(texts):
        mode.origins[text] = which
    with ExitStack() as stack:
        for each in (
            native_as_schemes(model), _frozen(model), unchanged_by_hooks(model), _tables(model, mode, run.positions),
            whole_activations(mode, model), observing(before=attentions.before), torch.enable_grad(), mode,
        ):  # fmt: skip
            stack.enter_context(each)
        yield mode, run


def explained(run: Run, value: Tensor, lengths: list[int]) -> Explained:
    """Returns the relevance of all parts of a scalar, by two backward passes."""
    tokens, calls = [leaf for _, leaf in run.tokens], run.attentions.calls
    leaves = [*tokens, *run.positions, *run.attentions.values, *run.constants]
    if not value.requires_grad:
        raise ValueError("the explained output does not depend on the tokens of the text; explain another output")
    outs = [call.out for call in calls]
    gradients = torch.autograd.grad(value, [*leaves, *outs], retain_graph=True, allow_unused=True)
    run.attentions.path.content_only = True
    try:
        by_content = torch.autograd.grad(value, tokens, retain_graph=True, allow_unused=True)
    finally:
        run.attentions.path.content_only = False
    relevances = [_product(leaf, gradient) for leaf, gradient in zip(leaves, gradients, strict=False)]
    a, b, c = len(tokens), len(tokens) + len(run.positions), len(leaves) - len(run.constants)
    offsets = [sum(lengths[:which]) for which in range(len(lengths))]
    total = torch.zeros(sum(lengths), dtype=torch.float64)
    relevance, content, position = total.clone(), total.clone(), total.clone()
    for (which, leaf), mine, pure in zip(run.tokens, relevances[:a], by_content, strict=True):
        where = slice(offsets[which], offsets[which] + lengths[which])
        relevance[where] += mine.reshape(lengths[which], -1).sum(1)
        content[where] += _product(leaf, pure).reshape(lengths[which], -1).sum(1)
    for at, mine in enumerate(relevances[a:b]):
        _add_rows(position, mine, lengths, offsets, at)
    biases = [float(each.sum()) for each in relevances[c:]]
    values = float(sum(each.sum() for each in relevances[b:c]))
    flows = [call.flow(gradient) for call, gradient in zip(calls, gradients[len(leaves) :], strict=True)]
    gross = float(relevance.abs().sum() + position.abs().sum()) + abs(values) + sum(map(abs, biases))
    return Explained(relevance, content, position, values, sum(biases), flows, gross)


def _add_rows(position: Tensor, mine: Tensor, lengths: list[int], offsets: list[int], at: int) -> None:
    """Adds the relevance of a position table, one row per token. `at` counts tables: encoder, then decoder."""
    rows = mine.sum(-1).reshape(-1)
    which = min(at, len(lengths) - 1)
    if rows.numel() != lengths[which]:
        which = next((index for index, length in enumerate(lengths) if length == rows.numel()), -1)
    if which < 0:
        raise NotImplementedError(
            f"a position table returned {rows.numel()} rows for texts of {lengths} tokens; relevance by position needs "
            f"one row per token"
        )
    position[offsets[which] : offsets[which] + lengths[which]] += rows


def _product(leaf: Tensor, gradient: Tensor | None) -> Tensor:
    """Gradient × input in float64; 0 for what the output does not depend on."""
    if gradient is None:
        return torch.zeros(leaf.shape, dtype=torch.float64)
    return (leaf.detach().double() * gradient.detach().double()).cpu()


def conservation(value: float, found: Explained) -> float:
    """Returns the error of conservation; NotImplementedError if it is too large to trust the relevances."""
    total = float(found.relevance.sum() + found.position.sum()) + found.values + found.biases
    error = abs(total - value) / max(abs(value), CANCELLED * found.gross, 1e-30)
    if not error <= TOLERANCE:
        raise NotImplementedError(
            f"relevance is not conserved in this model: it sums to {total:.6g}, and the output is {value:.6g}. A part "
            f"of the model computes something that the rules do not cover; explain another model"
        )
    return error
