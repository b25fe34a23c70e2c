"""The tables of a scheme for the offsets of a call; cached from call to call while gradients are disabled.

A model in use needs the same tables in every call, and for one short sequence computing them takes a tenth of its
time. A decoding step needs the tables of the step before and one column more, so they are computed over twice the
range. Cached tables are used only if the scheme is unchanged: its parameters and buffers are compared by value (a
change through `.data` leaves no other trace), and so are its plain attributes. The schemes of this library depend on
nothing else. A scheme from elsewhere may, so its tables are cached only if it declares itself `cacheable`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from locant.attention.offsets import Offsets
from locant.schemes.base import Scheme
from locant.terms import Terms

COMPARABLE = 2**16
"""A scheme with more numbers than this is not cached: computing its tables is cheaper than comparing them."""
CACHEABLE = 2**22
"""Tables with more numbers than this are not cached."""

_PLAIN = (bool, int, float, str, type(None))
_IGNORED = {*vars(nn.Module()), "given", "training"}  # attributes of every module, and the spelling of the scheme


@dataclass(frozen=True)
class Cached:
    """Tables of a scheme over the offsets lo … end − 1, and the state of the scheme they were computed from."""

    lo: int
    end: int
    terms: Terms
    plain: tuple[Any, ...]
    numbers: list[Tensor]  # copies


_cache: WeakKeyDictionary[Scheme, Cached] = WeakKeyDictionary()


def tables(scheme: Scheme, offsets: Offsets, dtype: torch.dtype, decoding: bool) -> Terms:
    """`scheme.terms(offsets.r)`, from the cache where that is allowed; cached tables are in `dtype`.

    Only tables over consecutive offsets are cached. While decoding they get room for the next steps.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or transforming() or _faking():
        return scheme.terms(offsets.r)
    # Comparing numbers waits for a GPU: worth it there only while decoding, where tables are long and the rest short.
    worth = offsets.listed is None and (decoding or offsets.device.type == "cpu")
    state = _state(scheme) if worth else None
    if state is None:
        return scheme.terms(offsets.r)
    plain, numbers = (dtype, offsets.device, *state[0]), state[1]
    lo, end, cached = offsets.lo, offsets.lo + offsets.count, _cache.get(scheme)
    if cached is None or lo < cached.lo or end > cached.end or not _same(cached, plain, numbers):
        room = decoding and scheme.reach is None  # for the keys of the next steps, whose offsets are further back
        first = min(2 * lo, lo) if room else lo
        wider = torch.arange(first, end, device=offsets.device)
        terms = scheme.terms(wider)
        if not isinstance(terms, Terms) or terms.pair is not None or not _well_formed(terms, wider):
            return scheme.terms(offsets.r) if room else terms
        terms = terms.to(dtype)
        if sum(table.numel() for table in terms.tables().values()) > CACHEABLE:
            return terms.narrow(lo - first, offsets.count)
        cached = _cache[scheme] = Cached(first, end, terms, plain, [x.detach().clone() for x in numbers])
    return cached.terms.narrow(lo - cached.lo, offsets.count)


def _faking() -> bool:
    """Whether a mode such as that of fake tensors is active. Tensors made in it must not outlive it."""
    return _get_current_dispatch_mode() is not None


def _well_formed(terms: Terms, r: Tensor) -> bool:
    """Whether the tables can be sliced by column. If not, the caller gets them unchanged and raises the error."""
    wide = (torch.float32, torch.float64)
    return all(x.ndim > 1 and x.shape[1] == r.shape[0] and x.dtype in wide for x in terms.tables().values())


def _state(scheme: Scheme) -> tuple[tuple[Any, ...], list[Tensor]] | None:
    """Everything the tables depend on: plain attributes, and tensors. None if they may depend on more."""
    plain: list[Any] = []
    numbers: list[Tensor] = []
    for module in scheme.modules():
        if isinstance(module, nn.ModuleList):
            continue
        if not isinstance(module, Scheme) or not module.cacheable:
            return None
        plain += (type(module), type(module).terms)
        numbers += [x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]
        for name, value in vars(module).items():
            if name in _IGNORED:
                continue
            if not isinstance(value, _PLAIN):
                return None
            plain += (name, value)
    if sum(x.numel() for x in numbers) > COMPARABLE or any(type(x) not in (Tensor, nn.Parameter) for x in numbers):
        return None
    return tuple(plain), numbers


def transforming() -> bool:
    """Whether a function transform (torch.func) or forward-mode differentiation is active."""
    functorch: Any = torch._C._functorch
    return functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def _same(cached: Cached, plain: tuple[Any, ...], numbers: list[Tensor]) -> bool:
    return (
        cached.plain == plain
        and len(cached.numbers) == len(numbers)
        and all(
            a.dtype == b.dtype and a.device == b.device and a.shape == b.shape and torch.equal(a, b)
            for a, b in zip(cached.numbers, numbers, strict=True)
        )
    )
