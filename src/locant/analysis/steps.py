"""The steps of a transformer's layer, and where in a model each of them can be heard.

No family is listed. A short first run records what every module of a layer takes and gives, with attention going
through locant's seam, and numbers are compared. With x what the layer takes and y what it gives:

    projection     the module that takes Σ w v; what it gives is the attention output a
    residual       a module that takes x + a
    feed-forward   a module that gives f with (x + a) + f = y. Where a layer ends in a norm (BERT): y is what the norm
                   makes of s, and s = h + f, with h given before f

Layers are told apart by the order they run in, since ALBERT runs one module many times.
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

INPUT, NORM, QUERY, KEY, VALUE = "input", "layer norm", "query", "key", "value"
LOGITS, WEIGHTS, ATTENTION = "logits", "weights", "attention output"
RESIDUAL, FEED_FORWARD, OUTPUT = "residual", "feed-forward output", "layer output"
STEPS = [INPUT, NORM, QUERY, KEY, VALUE, LOGITS, WEIGHTS, ATTENTION, RESIDUAL, FEED_FORWARD, OUTPUT]
"""In the order of a layer. Logits are scaled; `weights` is no variance but Σ_n w_mn²; attention output is after W_o."""

Hear = Callable[[int, str, Tensor], None]
"""(layer from 0, step, [batch, length, width])"""
Place = tuple[nn.Module, str]
"""A module and its side, "in" or "out"."""


@dataclass(frozen=True)
class Layout:
    """Where the steps of a model are."""

    layers: frozenset[nn.Module]
    attentions: frozenset[nn.Module]
    roles: tuple[dict[Place, str], ...]  # of each layer, in the order they run


class Ear:
    """Follows a running model: which layer is running, and what passes by. `layer` is −1 before the first."""

    def __init__(self, layers: frozenset[nn.Module]) -> None:
        self.layers = layers
        self.layer = -1
        self.rows: torch.Size | None = None  # batch and length of what the layer takes

    @contextmanager
    def on(self, modules: set[nn.Module], ran: Any, ended: Any) -> Iterator[None]:
        """`ran(module, taken, given)` after each of `modules`, `ended(taken, given)` after each layer."""

        def begin(layer: nn.Module, args: Any, kwargs: Any) -> None:
            self.layer += 1
            x = _tensor(args, kwargs)
            self.rows = None if x is None else x.shape[:2]

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            ran(module, _tensor(args, kwargs, self.rows), _tensor((output,), {}, self.rows))

        def end(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            ended(_tensor(args, kwargs), _tensor((output,), {}))

        with ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(layer.register_forward_pre_hook(begin, with_kwargs=True))
            for module in modules:
                stack.enter_context(module.register_forward_hook(after, with_kwargs=True))
            for layer in self.layers:
                stack.enter_context(layer.register_forward_hook(end, with_kwargs=True))
            yield

    @contextmanager
    def hearing(self, layout: Layout, hear: Hear) -> Iterator[None]:
        """Calls `hear` at every step of every layer that a module takes or gives."""

        def ran(module: nn.Module, taken: Tensor | None, given: Tensor | None) -> None:
            for side, x in (("in", taken), ("out", given)):
                step = layout.roles[self.layer].get((module, side))
                if step is not None and x is not None:
                    hear(self.layer, step, x)

        def ended(taken: Tensor | None, given: Tensor | None) -> None:
            for step, x in ((INPUT, taken), (OUTPUT, given)):
                if x is not None:
                    hear(self.layer, step, x)

        with self.on({module for roles in layout.roles for module, _ in roles}, ran, ended):
            yield


@torch.no_grad()
def find(model: PreTrainedModel) -> Layout:
    """The layout of a model, found by running it on a few tokens."""
    from locant.hf.plan import run_probe

    base = model.base_model
    names = _attention_names(model)
    attentions = frozenset(base.get_submodule(name) for name in names)
    layers = frozenset(base.get_submodule(name) for name in layer_names(base, names)) or _longest_list(base)
    ear = Ear(layers)
    roles: list[dict[Place, str]] = []
    seen: list[tuple[nn.Module, Tensor | None, Tensor | None]] = []
    mixed: list[Tensor] = []  # Σ w v, heads side by side, as attention hands it to W_o

    def ran(module: nn.Module, taken: Tensor | None, given: Tensor | None) -> None:
        copies = [None if x is None else x.clone() for x in (taken, given)]  # a later step may work in place
        seen.append((module, copies[0], copies[1]))

    def ended(taken: Tensor | None, given: Tensor | None) -> None:
        known = taken is not None and given is not None and mixed
        roles.append(_roles(taken, given, mixed[-1], seen, attentions) if known else {})  # type: ignore[arg-type]
        seen.clear()
        mixed.clear()

    def attended(module: nn.Module, out: Tensor) -> None:
        if module in attentions and ear.layer >= 0:
            mixed.append(out.flatten(2).clone())

    inner = {module for layer in layers for module in layer.modules()} - layers
    with at_the_seam(model, attentions, lambda module, out, *_: attended(module, out)), ear.on(inner, ran, ended):
        run_probe(base)
    return Layout(layers, attentions, tuple(roles))


@contextmanager
def at_the_seam(model: PreTrainedModel, attentions: frozenset[nn.Module], attended: Any) -> Iterator[None]:
    """Calls `attended(module, output, query, key, value, mask, arguments)` after every attention that was found.

    A model as transformers made it runs through our attention for a while.
    """
    from transformers import AttentionInterface

    from locant.hf import interface
    from locant.hf.plan import plan_of

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        out, weights = interface.attention(module, query, key, value, attention_mask, **kwargs)
        attended(module, out, query, key, value, attention_mask, kwargs)
        return out, weights

    with ExitStack() as stack:
        if attentions:
            implementation = model.config._attn_implementation
            AttentionInterface.register(interface.NAME, attend)
            stack.callback(interface.register)
            if plan_of(model) is None:
                model.set_attn_implementation(interface.NAME)
                stack.callback(model.set_attn_implementation, implementation)
        yield


def _roles(
    x: Tensor,
    y: Tensor,
    mixed: Tensor,
    seen: list[tuple[nn.Module, Tensor | None, Tensor | None]],
    attentions: frozenset[nn.Module],
) -> dict[Place, str]:
    """Which module takes and gives what, by comparing numbers. `seen` is in the order modules were done."""
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
    """The feed-forward of a layer that ends in a norm: of the two that are added up for it, the later."""
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
    """None where the attention of a model cannot be found."""
    from locant.hf.families import family_of
    from locant.hf.plan import find_attentions, plan_of

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
    """The hidden states among what a module takes or gives, [batch, length, width]; OPT lays the rows end to end."""
    found: Any = args[0] if args else kwargs.get("hidden_states")
    if isinstance(found, tuple):
        found = found[0]
    if not isinstance(found, Tensor):
        return None
    if rows is not None and found.ndim == 2 and found.shape[0] == rows.numel():
        found = found.unflatten(0, rows)
    return found if found.ndim == 3 else None


def _same(a: Tensor | None, b: Tensor) -> bool:
    """Up to rounding. Not looser: what attention adds to a trained model's hidden states may be small beside them."""
    if a is None or a.shape != b.shape:
        return False
    return bool((a - b).norm() <= 1e-6 * b.norm() if b.dtype in (torch.float32, torch.float64) else torch.equal(a, b))


def _adds_up(a: Tensor, b: Tensor, total: Tensor) -> bool:
    return a.shape == b.shape and _same(a + b, total)
