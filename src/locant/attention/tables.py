"""The tables of a scheme for the offsets of a call; while decoding, kept from step to step.

One query against a long cache needs a column for every key, and the next step needs the same ones and one more. So when
nothing is being trained, the tables of the last call are kept, over twice the range, and a step takes a part of them.
They are used again only if every number the scheme holds is what it was: parameters and buffers are compared by value
(a change through `.data` leaves no other trace), plain attributes too, and a scheme that holds more is asked anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from locant.attention.offsets import Offsets
from locant.schemes.base import Scheme
from locant.terms import Terms

FEW = 32
"""Queries, up to which a call counts as decoding."""
SMALL = 2**16
"""Numbers in a scheme, up to which comparing them is cheaper than making its tables."""


_PLAIN = (bool, int, float, str, tuple, type(None))
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
    """`scheme.terms(offsets.r)`; kept, in `dtype`, if `decoding`: few queries and consecutive offsets."""
    if not decoding or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return scheme.terms(offsets.r)
    held = _holds(scheme)
    if held is None:
        return scheme.terms(offsets.r)
    plain, numbers = (dtype, offsets.device, *held[0]), held[1]
    lo, end, kept = offsets.lo, offsets.lo + offsets.count, _kept.get(scheme)
    if kept is None or lo < kept.lo or end > kept.end or not _same(kept, plain, numbers):
        first = min(2 * lo, lo) if scheme.reach is None else lo  # room to grow into on the side of the past
        wider = torch.arange(first, end, device=offsets.device)
        terms = scheme.terms(wider)
        if not isinstance(terms, Terms) or terms.pair is not None or not _well_formed(terms, wider):
            return scheme.terms(offsets.r)
        terms = terms.to(dtype)
        kept = _kept[scheme] = Kept(first, end, terms, plain, [x.detach().clone() for x in numbers])
    return kept.terms.narrow(lo - kept.lo, offsets.count)


def _well_formed(terms: Terms, r: Tensor) -> bool:
    """A table that is not what it must be is shown to the caller as it is, who says what is wrong with it."""
    wide = (torch.float32, torch.float64)
    return all(x.ndim > 1 and x.shape[1] == r.shape[0] and x.dtype in wide for x in terms.tables().values())


def _holds(scheme: Scheme) -> tuple[tuple[Any, ...], list[Tensor]] | None:
    """Everything the tables may depend on: plain attributes, and tensors. None if there is more to it."""
    plain: list[Any] = [type(scheme).terms, type(scheme)]
    numbers: list[Tensor] = []
    for module in scheme.modules():
        numbers += [x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]
        for name, value in vars(module).items():
            if name in _MODULE:
                continue
            if not isinstance(value, _PLAIN):
                return None
            plain += (name, value)
    if sum(x.numel() for x in numbers) > SMALL:
        return None
    return tuple(plain), numbers


def _same(kept: Kept, plain: tuple[Any, ...], numbers: list[Tensor]) -> bool:
    return (
        kept.plain == plain
        and len(kept.numbers) == len(numbers)
        and all(
            a.dtype == b.dtype and a.device == b.device and a.shape == b.shape and torch.equal(a, b)
            for a, b in zip(kept.numbers, numbers, strict=True)
        )
    )
