"""The steps of a transformer's layer, and which module of a model computes each of them.

No family is listed. A short first run records the input and output of every module of a layer, with attention going
through locant's seam, and compares numbers. For a layer with input x and output y:

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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from locant.hf.call import AttentionCall
    from locant.hf.listening import After

INPUT, NORM, QUERY, KEY, VALUE = "input", "layer norm", "query", "key", "value"
LOGITS, WEIGHTS, ATTENTION = "logits", "weights", "attention output"
RESIDUAL, FEED_FORWARD, OUTPUT = "residual", "feed-forward output", "layer output"
STEPS = [INPUT, NORM, QUERY, KEY, VALUE, LOGITS, WEIGHTS, ATTENTION, RESIDUAL, FEED_FORWARD, OUTPUT]
"""In the order of a layer. Logits are scaled; `weights` is no variance but Σ_n w_mn²; attention output is after W_o."""

OnStep = Callable[[int, str, Tensor], None]
"""(layer from 0, step, [batch, length, width])"""
Place = tuple[nn.Module, str]
"""A module and its side, "in" or "out"."""


@dataclass(frozen=True)
class Layout:
    """The modules of a model whose input or output is a step."""

    layers: frozenset[nn.Module]
    attentions: frozenset[nn.Module]
    roles: tuple[dict[Place, str], ...]  # one dict per layer, in the order they run


class LayerTracker:
    """Hooks on a running model that know which layer is running. `layer` is −1 before the first."""

    def __init__(self, layers: frozenset[nn.Module]) -> None:
        self.layers = layers
        self.layer = -1
        self.rows: torch.Size | None = None  # batch and length of the layer's input

    @contextmanager
    def hooked(self, modules: set[nn.Module], after_module: Any, after_layer: Any) -> Iterator[None]:
        """Calls `after_module(module, input, output)` for each of `modules`, `after_layer(input, output)` per layer."""

        def begin(layer: nn.Module, args: Any, kwargs: Any) -> None:
            self.layer += 1
            x = _tensor(args, kwargs)
            self.rows = None if x is None else x.shape[:2]

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            after_module(module, _tensor(args, kwargs, self.rows), _tensor((output,), {}, self.rows))

        def end(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            after_layer(_tensor(args, kwargs), _tensor((output,), {}))

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

        def after_module(module: nn.Module, taken: Tensor | None, given: Tensor | None) -> None:
            for side, x in (("in", taken), ("out", given)):
                step = layout.roles[self.layer].get((module, side))
                if step is not None and x is not None:
                    on_step(self.layer, step, x)

        def after_layer(taken: Tensor | None, given: Tensor | None) -> None:
            for step, x in ((INPUT, taken), (OUTPUT, given)):
                if x is not None:
                    on_step(self.layer, step, x)

        with self.hooked({module for roles in layout.roles for module, _ in roles}, after_module, after_layer):
            yield


@torch.no_grad()
def find_layout(model: PreTrainedModel) -> Layout:
    """Returns the layout of a model, found by running it on a few tokens."""
    from locant.hf.probing import run_probe

    base = model.base_model
    names = _attention_names(model)
    attentions = frozenset(base.get_submodule(name) for name in names)
    layers = frozenset(base.get_submodule(name) for name in layer_names(base, names)) or _longest_list(base)
    tracker = LayerTracker(layers)
    roles: list[dict[Place, str]] = []
    seen: list[tuple[nn.Module, Tensor | None, Tensor | None]] = []
    mixed: list[Tensor] = []  # Σ w v, heads side by side: the input of W_o

    def after_module(module: nn.Module, taken: Tensor | None, given: Tensor | None) -> None:
        copies = [None if x is None else x.clone() for x in (taken, given)]  # a later module may work in place
        seen.append((module, copies[0], copies[1]))

    def after_layer(taken: Tensor | None, given: Tensor | None) -> None:
        known = taken is not None and given is not None and mixed
        roles.append(_roles(taken, given, mixed[-1], seen, attentions) if known else {})  # type: ignore[arg-type]
        seen.clear()
        mixed.clear()

    def after_attention(call: AttentionCall, out: Tensor) -> None:
        if call.module in attentions and tracker.layer >= 0:
            mixed.append(out.flatten(2).clone())

    inner = {module for layer in layers for module in layer.modules()} - layers
    with observed(model, attentions, after_attention), tracker.hooked(inner, after_module, after_layer):
        run_probe(base)
    return Layout(layers, attentions, tuple(roles))


@contextmanager
def observed(model: PreTrainedModel, attentions: frozenset[nn.Module], after: After) -> Iterator[None]:
    """Calls `after(call, output)` after every attention; never, where the attention of a model was not found."""
    from locant.hf.listening import observing
    from locant.hf.seam import through_seam

    if not attentions:
        yield
        return
    with through_seam(model), observing(after=after):
        yield


def _roles(
    x: Tensor,
    y: Tensor,
    mixed: Tensor,
    seen: list[tuple[nn.Module, Tensor | None, Tensor | None]],
    attentions: frozenset[nn.Module],
) -> dict[Place, str]:
    """The step that each module takes or gives, by comparing numbers. `seen` is in the order modules finished."""
    roles: dict[Place, str] = {}
    attention = next(((m, taken) for m, taken, _ in seen if m in attentions), None)
    if attention is not None and attention[1] is not None and not _same(attention[1], x):
        roles[attention[0], "in"] = NORM
    projection = next(((m, given) for m, taken, given in seen if _same(taken, mixed)), None)
    if projection is None or projection[1] is None or projection[1].shape != x.shape:
        return roles
    roles[projection[0], "out"] = ATTENTION
    residual = x + projection[1]
    after = next((m for m, taken, _ in seen if _same(taken, residual)), None)
    if after is not None:
        roles[after, "in"] = RESIDUAL
    last = next((m for m, _, given in seen if given is not None and _adds_up(residual, given, y)), None)
    if last is None:
        last = _before_last_norm(y, seen)
    if last is not None:
        roles[last, "out"] = FEED_FORWARD
    return roles


def _before_last_norm(y: Tensor, seen: list[tuple[nn.Module, Tensor | None, Tensor | None]]) -> nn.Module | None:
    """The feed-forward of a layer that ends in a norm: the later of the two modules whose outputs are added for it."""
    total = next((taken for _, taken, given in seen if taken is not None and _same(given, y)), None)
    if total is None or total.shape != y.shape:
        return None
    given = [(module, tensor) for module, _, tensor in seen if tensor is not None]
    return next(
        (
            module
            for place, (module, tensor) in enumerate(given)
            if any(_adds_up(earlier, tensor, total) for _, earlier in given[:place])
        ),
        None,
    )


def _attention_names(model: PreTrainedModel) -> list[str]:
    """The names of the attention modules; none if locant cannot find them."""
    from locant.hf.families import family_of
    from locant.hf.plan import plan_of
    from locant.hf.probing import find_attentions

    plan = plan_of(model)
    if plan is not None:
        return [attention.name for stack in plan.stacks for attention in stack.attentions]
    try:
        return [one.name for stack in find_attentions(model, family_of(model)).values() for one in stack]
    except NotImplementedError:
        return []


def layer_names(base: nn.Module, attentions: list[str]) -> list[str]:
    """encoder.layer.0.attention.self -> encoder.layer.0, the nearest list in which every entry has an attention.

    T5 has lists in lists: block.0.layer.0.SelfAttention -> block.0, since block.0.layer.1 is a feed-forward.
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
    lists = [frozenset(module) for module in base.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=frozenset())


def _tensor(args: tuple[Any, ...], kwargs: dict[str, Any], rows: torch.Size | None = None) -> Tensor | None:
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
