"""Hidden states for schemes that read them: from the input of an attention module to its attention.

`hold` wraps the forward of an attention module and stores its input during the call. `interface.attention`, which the
module calls, finds the input with `held` and passes it on as the x of `locant.attend`.

A scheme that reads keys needs its `read` outputs of cached keys, too. `remembered` stores them on the cache object, one
tensor for each attention module, as `cached` does with positions. Operations that rearrange the rows of a cache, or
crop it, do the same to them. Keys that were dropped in another way are noticed by their number.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from locant.attention.sides import Remembered, States
from locant.hf.cached import READ, dropped, is_static, keep_in_step
from locant.hf.methods import replace_method
from locant.schemes import Scheme

HOLD = "locant_hold"
"""Attribute of an attention module that holds its input."""
CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Names of the argument of an attention module that is the cache."""


@dataclass
class Input:
    """The input of an attention module that is running."""

    states: Any
    cache: Any


@dataclass
class Hold:
    """What `hold` knows about a module."""

    names: tuple[str, ...]  # of the arguments of its forward
    before: Any  # a forward that the module had in place of that of its class
    traced: Input | None = None  # the input while the compiler traces: it cannot follow a ContextVar


_NOW: ContextVar[dict[int, Input] | None] = ContextVar("inputs of attention modules", default=None)


def hold(module: nn.Module) -> None:
    """Makes an attention module hold its input while it runs."""
    if HOLD in module.__dict__:
        return
    names = tuple(inspect.signature(type(module).forward).parameters)[1:]  # without self
    module.__dict__[HOLD] = Hold(names, module.__dict__.get("forward"))
    replace_method(module, "forward", _forward)


def release(module: nn.Module) -> None:
    """Undoes `hold`."""
    found = module.__dict__.pop(HOLD, None)
    if found is not None:
        del module.__dict__["forward"]
        if found.before is not None:
            module.__dict__["forward"] = found.before


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    known: Hold = module.__dict__[HOLD]
    given = {**dict(zip(known.names, args, strict=False)), **kwargs}
    states = given.get("hidden_states", given.get(known.names[0]))
    current = Input(states, next((given[name] for name in CACHES if given.get(name) is not None), None))
    run = known.before or type(module).forward.__get__(module)
    if torch.compiler.is_compiling():
        known.traced = current
        try:
            return run(*args, **kwargs)
        finally:
            known.traced = None
    token = _NOW.set({**(_NOW.get() or {}), id(module): current})
    try:
        return run(*args, **kwargs)
    finally:
        _NOW.reset(token)


def held(module: nn.Module, scheme: Scheme, lq: int, lk: int) -> States:
    """Returns the hidden states of a call, as `locant.attend` takes them.

    lq, lk   the numbers of queries and keys of the call.
    """
    known: Hold | None = module.__dict__.get(HOLD)
    if known is None:
        raise RuntimeError(f"{type(module).__name__} holds no hidden states for {scheme}; swap the model again")
    current = known.traced if torch.compiler.is_compiling() else (_NOW.get() or {}).get(id(module))
    if current is None:
        raise RuntimeError(
            f"{scheme} reads hidden states, and {type(module).__name__} received none; call the module itself or the "
            f"model, not a part of the module"
        )
    x = current.states
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[1] != lq:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise NotImplementedError(
            f"{scheme} reads the input of an attention module, which must be [batch, {lq}, width]; that of "
            f"{type(module).__name__} is {got}. Use a scheme that does not read hidden states"
        )
    if not scheme.reads_keys:
        return x, None
    return remembered(module, scheme, x, current.cache, lk)


def remembered(module: nn.Module, scheme: Scheme, x: Tensor, cache: Any, lk: int) -> Remembered:
    """Returns what a scheme read from the queries and from all keys, and stores it for the next pass."""
    read, lq = scheme.read(x), x.shape[1]
    if lk == lq and _stored(cache, module) is None:
        _store(cache, module, read)
        return Remembered(read, read)
    if not isinstance(cache, Cache) or is_static(cache):
        raise NotImplementedError(
            f"{scheme} reads the hidden states of cached keys, which needs a dynamic cache; got "
            f"{type(cache).__name__} with {lk - lq} keys. Use cache_implementation='dynamic', or use_cache=False"
        )
    return Remembered(read, _with_past(module, scheme, read, cache, lk))


def _with_past(module: nn.Module, scheme: Scheme, read: Tensor, cache: Cache, lk: int) -> Tensor:
    """What was read from the keys of the cache and from the new tokens, [B, H, lk, W]."""
    stored = _stored(cache, module)
    # The new tokens are in the cache already. A sliding cache has dropped keys, and counts them.
    past = cache.get_seq_length(getattr(module, "layer_idx", 0) or 0) - read.shape[2]
    known = 0 if stored is None else stored.shape[2]
    if stored is None or stored.shape[0] != read.shape[0]:
        rows = 0 if stored is None else stored.shape[0]
        raise RuntimeError(
            f"the cache holds {past} keys of {read.shape[0]} sequences, and {scheme} has read {known} keys of {rows} "
            f"sequences; start with a new cache, filled by this swapped model"
        )
    if past == 0 and read.shape[2] == lk:  # the cache was reset
        _store(cache, module, read)
        return read
    if known != past or known + read.shape[2] < lk:
        raise RuntimeError(dropped(past, known))
    every = torch.cat([stored, read], dim=2)
    _store(cache, module, every)
    return every[:, :, every.shape[2] - lk :]


def _stored(cache: Any, module: nn.Module) -> Tensor | None:
    found: Tensor | None = getattr(cache, READ, {}).get(id(module)) if isinstance(cache, Cache) else None
    return found


def _store(cache: Any, module: nn.Module, read: Tensor) -> None:
    if not isinstance(cache, Cache):
        return
    if not hasattr(cache, READ):
        setattr(cache, READ, {})
        keep_in_step(cache)
    getattr(cache, READ)[id(module)] = read
