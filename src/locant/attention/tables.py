"""The tables of a scheme for the offsets of a call; kept from call to call while nothing is being trained.

A model in use asks for the same tables again and again, and for one short sequence they would be a tenth of its time.
While decoding, a step needs those of the step before and one column more, so they are made over twice the range. They
are used again only if everything the scheme holds is what it was: parameters and buffers are compared by value (a
change through `.data` leaves no other trace), plain attributes too. That is all the schemes of this library depend on;
of a scheme from elsewhere we cannot know, and it is asked anew each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from locant.attention.offsets import Offsets
from locant.schemes import SCHEMES, Sum
from locant.schemes.base import Scheme
from locant.terms import Terms

FEW = 32
"""Queries, up to which a call counts as decoding."""
SMALL = 2**16
"""Numbers in a scheme, up to which comparing them is cheaper than making its tables."""
LARGE = 2**22
"""Numbers in its tables, beyond which they are not kept."""


OURS = {*SCHEMES.values(), Sum}
_PLAIN = (bool, int, float, str, type(None))
_MODULE = {*vars(nn.Module()), "given", "training"}  # what every module has, and what only spells the scheme


@dataclass(frozen=True)
class Kept:
    lo: int  # its first offset
    end: int  # one after its last
    terms: Terms
    plain: tuple[Any, ...]
    numbers: list[Tensor]  # copies


_kept: WeakKeyDictionary[Scheme, Kept] = WeakKeyDictionary()


def tables(scheme: Scheme, offsets: Offsets, dtype: torch.dtype, decoding: bool) -> Terms:
    """`scheme.terms(offsets.r)`; for consecutive offsets kept, in `dtype`, with room for more if `decoding`."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or transforming() or _faking():
        return scheme.terms(offsets.r)
    # To compare numbers is to wait for a GPU: there it pays only where tables are long and the rest is short.
    worth = offsets.listed is None and (decoding or offsets.device.type == "cpu")
    held = _holds(scheme) if worth else None
    if held is None:
        return scheme.terms(offsets.r)
    plain, numbers = (dtype, offsets.device, *held[0]), held[1]
    lo, end, kept = offsets.lo, offsets.lo + offsets.count, _kept.get(scheme)
    if kept is None or lo < kept.lo or end > kept.end or not _same(kept, plain, numbers):
        room = decoding and scheme.reach is None  # to grow into, on the side of the past
        first = min(2 * lo, lo) if room else lo
        wider = torch.arange(first, end, device=offsets.device)
        terms = scheme.terms(wider)
        if not isinstance(terms, Terms) or terms.pair is not None or not _well_formed(terms, wider):
            return scheme.terms(offsets.r) if room else terms
        terms = terms.to(dtype)
        if sum(table.numel() for table in terms.tables().values()) > LARGE:
            return terms.narrow(lo - first, offsets.count)
        kept = _kept[scheme] = Kept(first, end, terms, plain, [x.detach().clone() for x in numbers])
    return kept.terms.narrow(lo - kept.lo, offsets.count)


def _faking() -> bool:
    """Tensors may be made in a mode (fake tensors) that they must not outlive."""
    return _get_current_dispatch_mode() is not None


def _well_formed(terms: Terms, r: Tensor) -> bool:
    """A table that is not what it must be is shown to the caller as it is, who says what is wrong with it."""
    wide = (torch.float32, torch.float64)
    return all(x.ndim > 1 and x.shape[1] == r.shape[0] and x.dtype in wide for x in terms.tables().values())


def _holds(scheme: Scheme) -> tuple[tuple[Any, ...], list[Tensor]] | None:
    """Everything the tables depend on: plain attributes, and tensors. None if there may be more to it."""
    plain: list[Any] = []
    numbers: list[Tensor] = []
    for module in scheme.modules():
        if isinstance(module, nn.ModuleList):
            continue
        if not isinstance(module, Scheme) or type(module) not in OURS:
            return None
        plain += (type(module), type(module).terms)
        numbers += [x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]
        for name, value in vars(module).items():
            if name in _MODULE:
                continue
            if not isinstance(value, _PLAIN):
                return None
            plain += (name, value)
    if sum(x.numel() for x in numbers) > SMALL or any(type(x) not in (Tensor, nn.Parameter) for x in numbers):
        return None
    return tuple(plain), numbers


def transforming() -> bool:
    """Whether a function transform (torch.func) or forward-mode differentiation is at work."""
    functorch: Any = torch._C._functorch
    return functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def _same(kept: Kept, plain: tuple[Any, ...], numbers: list[Tensor]) -> bool:
    return (
        kept.plain == plain
        and len(kept.numbers) == len(numbers)
        and all(
            a.dtype == b.dtype and a.device == b.device and a.shape == b.shape and torch.equal(a, b)
            for a, b in zip(kept.numbers, numbers, strict=True)
        )
    )
