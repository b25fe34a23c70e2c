"""Queries and keys of every attention module with rotary positions and without them, on the same inputs.

The model runs twice. In the second run its rotary modules rotate nothing, and every attention module gets the input it
had in the first run, so the rotation is the only difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from locant.hf.call import AttentionCall
from locant.hf.listening import observing
from locant.hf.rotary_calls import RotaryCall, is_rotary_form, recording, sources, tensors_of

Run = Callable[[], object]


@dataclass
class Seen:
    """What one attention module received in a run. Modules that run several times have several entries."""

    inputs: list[Tensor] = field(default_factory=list)
    calls: list[AttentionCall] = field(default_factory=list)
    rotary: list[RotaryCall] = field(default_factory=list)  # calls whose output reached the module


@dataclass(frozen=True)
class Received:
    """The arguments of a module, and the calls of rotary modules whose outputs are among them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rotary: list[RotaryCall]


@dataclass(frozen=True)
class TwoRuns:
    """Both runs, by attention module."""

    turned: dict[nn.Module, Seen]
    plain: dict[nn.Module, Seen]
    rotary: list[RotaryCall]  # of the first run


def first_run(run: Run, attentions: list[nn.Module], rotary: dict[str, nn.Module], stack: nn.Module) -> TwoRuns:
    """Runs a model as it is. `plain` stays empty; `second_run` fills it.

    Raises NotImplementedError if rotations are made by other modules than `rotary`, or used by other modules than the
    attention: nothing would silence the former, and no scheme would replace the latter.
    """
    every: list[RotaryCall] = []
    seen: dict[nn.Module, Seen] = {module: Seen() for module in attentions}
    users: dict[nn.Module, Received] = {}
    above = {module for module in stack.modules() if any(each in seen for each in module.modules())}

    def receive(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module in seen:
            seen[module].inputs.append(_input(module, args, kwargs))
        given = {id(each) for value in (*args, *kwargs.values()) for each in _tensors(value)}
        found = [call for call in every if call.path in rotary and not given.isdisjoint(_ids(call))]
        if module in seen:
            seen[module].rotary += found
        elif found and module not in above and not any(module in each.modules() for each in users):
            users[module] = Received(args, kwargs, found)

    def keep(call: RotaryCall) -> None:
        if call.path in rotary or is_rotary_form(call.output):
            every.append(call)

    inside = {each for module in rotary.values() for each in module.modules()} - set(rotary.values())
    modules = {path: module for path, module in stack.named_modules() if path and module not in inside}
    with recording(modules, keep), _pre_hooks(list(modules.values()), receive), observing(before=_into(seen)):
        run()
    length = max((call.query.shape[2] for each in seen.values() for call in each.calls), default=0)
    makers = [call.module for call in sources(every, length) if call.path not in rotary]
    real = [module for module, received in users.items() if _uses(module, received)]
    for module, what in (*((each, "makes") for each in makers), *((each, "uses") for each in real)):
        raise NotImplementedError(
            f"the rotary positions of {type(stack).__name__} cannot be read: {type(module).__name__} {what} rotary "
            f"positions too, beside {', '.join(rotary)} and the attention"
        )
    return TwoRuns(seen, {}, [call for call in every if call.path in rotary])


def second_run(run: Run, first: TwoRuns) -> None:
    """Runs the model again, its rotary modules silenced by the caller, on the inputs of the first run."""
    seen = {module: Seen() for module in first.turned}

    def replay(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = first.turned[module].inputs[len(seen[module].inputs)]
        seen[module].inputs.append(before)
        if args and isinstance(args[0], Tensor):
            return (before, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": before}

    with _pre_hooks(list(seen), replay), observing(before=_into(seen)):
        run()
    first.plain.update(seen)


def _uses(module: nn.Module, received: Received) -> bool:
    """Whether the output of a module depends on the rotations it receives. Layers of hybrids get them for nothing."""
    unturned: dict[int, Tensor] = {}
    for call in received.rotary:
        one, *rest = tensors_of(call.output)
        unturned |= {id(one): torch.ones_like(one), **{id(each): torch.zeros_like(each) for each in rest}}
    kwargs = {**received.kwargs, **({"past_key_values": None} if "past_key_values" in received.kwargs else {})}
    try:
        with torch.no_grad():
            before = module(*received.args, **kwargs)
            after = module(*_replaced(received.args, unturned), **_replaced(kwargs, unturned))
    except Exception:  # it cannot be called by itself, so it is not known
        return True
    pairs = zip(_tensors(before), _tensors(after), strict=True)
    return not all(torch.equal(one, other) for one, other in pairs)


def _replaced(value: Any, by: dict[int, Tensor]) -> Any:
    """A structure with other tensors in place of some."""
    if isinstance(value, Tensor):
        return by.get(id(value), value)
    if isinstance(value, (tuple, list)):
        return type(value)(_replaced(each, by) for each in value)
    if isinstance(value, dict):
        return {name: _replaced(each, by) for name, each in value.items()}
    return value


def _into(seen: dict[nn.Module, Seen]) -> Callable[[AttentionCall], None]:
    def record(call: AttentionCall) -> None:
        if call.module in seen:
            seen[call.module].calls.append(call)

    return record


def _input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("hidden_states")
    if not isinstance(found, Tensor):
        raise NotImplementedError(
            f"the rotary positions of {type(module).__name__} cannot be read: it is called without hidden_states"
        )
    return found.detach()


def _ids(call: RotaryCall) -> set[int]:
    return set(map(id, tensors_of(call.output)))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


@contextmanager
def _pre_hooks(modules: list[nn.Module], function: Any) -> Iterator[None]:
    hooks = [module.register_forward_pre_hook(function, with_kwargs=True) for module in modules]
    try:
        with torch.no_grad():
            yield
    finally:
        for hook in hooks:
            hook.remove()
