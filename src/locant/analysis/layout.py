"""Which module of a model computes which step of a layer (`steps`), and a tracker that records the steps of a run.

No family is listed. `find_layout` runs a few tokens, records the input and output of every module of a layer, with
attention going through locant's seam, and compares numbers. For a layer with input x and output y:

    projection     the module whose input is Σ w v; its output is the attention output a
    residual       a module whose input is x + a
    feed-forward   a module whose output f satisfies (x + a) + f = y. Where a layer ends in a norm (BERT), the norm maps
                   s to y, and s = h + f with h computed before f

Layers are numbered in the order they run, because ALBERT runs one module many times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.analysis.steps import ATTENTION, FEED_FORWARD, INPUT, NORM, OUTPUT, RESIDUAL
from locant.hf.call import AttentionCall
from locant.hf.finding import family_of
from locant.hf.listening import After, observing
from locant.hf.plan import plan_of
from locant.hf.probing import find_attentions
from locant.hf.running import run_probe
from locant.hf.seam import through_seam

OnStep = Callable[[int, str, Tensor], None]
"""(layer from 0, step, [batch, length, width])"""
Place = tuple[nn.Module, str]
"""A module and its side, "in" or "out"."""


class ModuleRun(NamedTuple):
    """One run of a module: its input and output as [batch, length, width], None where there are no hidden states."""

    module: nn.Module
    taken: Tensor | None
    given: Tensor | None


@dataclass(frozen=True)
class Layout:
    """The modules of a model whose input or output is a step."""

    layers: frozenset[nn.Module]
    attentions: frozenset[nn.Module]  # empty where locant cannot find them
    roles: tuple[dict[Place, str], ...]  # one dict per layer, in the order they run


class LayerTracker:
    """Hooks on a running model that count its layers. `layer` is −1 before the first; set it to −1 before each run."""

    def __init__(self, layers: frozenset[nn.Module]) -> None:
        self.layers = layers
        self.layer = -1
        self.rows: torch.Size | None = None  # batch and length of the layer's input

    @contextmanager
    def hooked(
        self,
        modules: set[nn.Module],
        after_module: Callable[[ModuleRun], None],
        after_layer: Callable[[ModuleRun], None],
    ) -> Iterator[None]:
        """Calls `after_module` after each run of `modules` and `after_layer` after each layer."""

        def begin(layer: nn.Module, args: Any, kwargs: Any) -> None:
            self.layer += 1
            x = _hidden_states(args, kwargs)
            self.rows = None if x is None else x.shape[:2]

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            taken, given = _hidden_states(args, kwargs, self.rows), _hidden_states((output,), {}, self.rows)
            after_module(ModuleRun(module, taken, given))

        def end(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            after_layer(ModuleRun(layer, _hidden_states(args, kwargs), _hidden_states((output,), {})))

        with ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(layer.register_forward_pre_hook(begin, with_kwargs=True))
            for module in modules:
                stack.enter_context(module.register_forward_hook(after, with_kwargs=True))
            for layer in self.layers:
                stack.enter_context(layer.register_forward_hook(end, with_kwargs=True))
            yield

    @contextmanager
    def recording(self, layout: Layout, on_step: OnStep) -> Iterator[None]:
        """Calls `on_step` for every step that is the input or output of a module."""

        def after_module(run: ModuleRun) -> None:
            for side, x in (("in", run.taken), ("out", run.given)):
                step = layout.roles[self.layer].get((run.module, side))
                if step is not None and x is not None:
                    on_step(self.layer, step, x)

        def after_layer(run: ModuleRun) -> None:
            for step, x in ((INPUT, run.taken), (OUTPUT, run.given)):
                if x is not None:
                    on_step(self.layer, step, x)

        with self.hooked({module for roles in layout.roles for module, _ in roles}, after_module, after_layer):
            yield


@torch.no_grad()
def find_layout(model: PreTrainedModel) -> Layout:
    """Returns the layout of a model, found by running it on a few tokens."""
    base = model.base_model
    names = _attention_names(model)
    attentions = frozenset(base.get_submodule(name) for name in names)
    layers = frozenset(base.get_submodule(name) for name in layer_names(base, names)) or _longest_list(base)
    tracker = LayerTracker(layers)
    roles: list[dict[Place, str]] = []
    runs: list[ModuleRun] = []  # of one layer, in the order they finished
    mixed: list[Tensor] = []  # Σ w v, heads side by side: the input of W_o

    def after_module(run: ModuleRun) -> None:
        taken, given = (None if x is None else x.clone() for x in run[1:])  # a later module may work in place
        runs.append(ModuleRun(run.module, taken, given))

    def after_layer(run: ModuleRun) -> None:
        _check_batch_first(model, run.taken)
        known = run.taken is not None and run.given is not None and mixed
        roles.append(_roles(run.taken, run.given, mixed[-1], runs, attentions) if known else {})  # type: ignore[arg-type]
        runs.clear()
        mixed.clear()

    def after_attention(call: AttentionCall, out: Tensor) -> None:
        if call.module in attentions and tracker.layer >= 0:
            mixed.append(out.flatten(2).clone())

    inner = {module for layer in layers for module in layer.modules()} - layers
    with observed(model, attentions, after_attention), tracker.hooked(inner, after_module, after_layer):
        run_probe(base)
    return Layout(layers, attentions, tuple(roles))


def _check_batch_first(model: PreTrainedModel, taken: Tensor | None) -> None:
    """The probe is one sequence. Steps of XLNet, [length, batch, width], would be read as those of many."""
    if taken is not None and taken.shape[0] != 1:
        raise NotImplementedError(
            f"the layers of {type(model).__name__} do not take hidden states as [batch, length, width]: for one "
            f"sequence they got {list(taken.shape)}, so the steps inside them cannot be measured"
        )


@contextmanager
def observed(model: PreTrainedModel, attentions: frozenset[nn.Module], after: After) -> Iterator[None]:
    """Calls `after(call, output)` after every attention; never, where the attention of a model was not found."""
    if not attentions:
        yield
        return
    with through_seam(model), observing(after=after):
        yield


def _roles(
    x: Tensor, y: Tensor, mixed: Tensor, runs: list[ModuleRun], attentions: frozenset[nn.Module]
) -> dict[Place, str]:
    """The step that is the input or output of each module of a layer that maps x to y."""
    roles: dict[Place, str] = {}
    attention = next((run for run in runs if run.module in attentions), None)
    if attention is not None and attention.taken is not None and not _same(attention.taken, x):
        roles[attention.module, "in"] = NORM
    projection = next((run for run in runs if _same(run.taken, mixed)), None)
    if projection is None or projection.given is None or projection.given.shape != x.shape:
        return roles
    roles[projection.module, "out"] = ATTENTION
    residual = x + projection.given
    after = next((run.module for run in runs if _same(run.taken, residual)), None)
    if after is not None:
        roles[after, "in"] = RESIDUAL
    last = next((run.module for run in runs if run.given is not None and _adds_up(residual, run.given, y)), None)
    if last is None:
        last = _before_last_norm(y, runs)
    if last is not None:
        roles[last, "out"] = FEED_FORWARD
    return roles


def _before_last_norm(y: Tensor, runs: list[ModuleRun]) -> nn.Module | None:
    """The feed-forward of a layer that ends in a norm: the later of the two modules whose outputs the norm adds up."""
    total = next((run.taken for run in runs if run.taken is not None and _same(run.given, y)), None)
    if total is None or total.shape != y.shape:
        return None
    earlier: list[Tensor] = []
    for run in runs:
        if run.given is None:
            continue
        if any(_adds_up(other, run.given, total) for other in earlier):
            return run.module
        earlier.append(run.given)
    return None


def _attention_names(model: PreTrainedModel) -> list[str]:
    """The names of the attention modules; none if locant cannot find them."""
    plan = plan_of(model)
    if plan is not None:
        return [attention.name for stack in plan.stacks for attention in stack.attentions]
    try:
        return [one.name for stack in find_attentions(model, family_of(model)).values() for one in stack]
    except NotImplementedError:
        return []


def layer_names(base: nn.Module, attentions: list[str]) -> list[str]:
    """Returns the name of the layer of each attention module.

    encoder.layer.0.attention.self -> encoder.layer.0, the nearest list in which every entry has an attention. T5 has
    lists in lists: block.0.layer.0.SelfAttention -> block.0, since block.0.layer.1 is a feed-forward.
    """
    names = []
    for name in attentions:
        parts = name.split(".")
        for at in range(len(parts) - 1, 0, -1):
            above = ".".join(parts[:at])
            count = len(list(base.get_submodule(above).children())) if parts[at].isdigit() else 0
            if count and all(any(x.startswith(f"{above}.{i}.") for x in attentions) for i in range(count)):
                names.append(".".join(parts[: at + 1]))
                break
    return names


def _longest_list(base: nn.Module) -> frozenset[nn.Module]:
    """The entries of the longest list of modules: the layers of a model whose attention was not found."""
    lists = [frozenset(module) for module in base.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=frozenset())


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any], rows: torch.Size | None = None) -> Tensor | None:
    """The hidden states among arguments or outputs, [batch, length, width]. OPT flattens batch and length."""
    found: Any = args[0] if args else kwargs.get("hidden_states")
    if isinstance(found, tuple):
        found = found[0]
    if not isinstance(found, Tensor):
        return None
    if rows is not None and found.ndim == 2 and found.shape[0] == rows.numel():
        found = found.unflatten(0, rows)
    return found if found.ndim == 3 else None


def _same(a: Tensor | None, b: Tensor) -> bool:
    """Equal up to rounding. Not looser: attention may add little to the hidden states of a trained model."""
    if a is None or a.shape != b.shape:
        return False
    return bool((a - b).norm() <= 1e-6 * b.norm() if b.dtype in (torch.float32, torch.float64) else torch.equal(a, b))


def _adds_up(a: Tensor, b: Tensor, total: Tensor) -> bool:
    return a.shape == b.shape and _same(a + b, total)
