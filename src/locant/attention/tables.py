"""The tables of a scheme for the offsets of a call; cached from call to call while gradients are disabled.

A model in use needs the same tables in every call, and for one short sequence computing them takes a tenth of its
time. A decoding step needs the tables of the step before and one column more, so they are computed over twice the
range. Cached tables are used only if the scheme is unchanged: its parameters and buffers are compared by value (a
change through `.data` leaves no other trace), and so are its plain attributes. The schemes of this library depend on
nothing else. A scheme from elsewhere may, so its tables are cached only if it declares itself `cacheable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from locant.attention.offsets import Offsets
from locant.schemes.base import Scheme
from locant.terms import Terms

COMPARABLE = 2**16
"""A scheme with more numbers than this is not cached: computing its tables is cheaper than comparing them."""
CACHEABLE = 2**22
"""Tables with more numbers than this are not cached."""

_PLAIN = (bool, int, float, str, type(None))
_TENSORS = (Tensor, nn.Parameter)
_IGNORED = {*vars(nn.Module()), "given", "training"}  # attributes of every module, and the spelling of the scheme


@dataclass(frozen=True)
class Part:
    """A scheme, or one inside it, at the time when tables were computed: everything that they depend on."""

    kind: type[nn.Module]
    terms: Callable[..., Terms] | None
    attributes: int  # how many there were
    plain: dict[str, Any]
    numbers: list[Tensor]  # copies of parameters and buffers

    def is_still(self, module: nn.Module) -> bool:
        """Whether the module is as it was. A change through `.data` leaves no trace except the values."""
        attributes = module.__dict__
        if type(module) is not self.kind or getattr(self.kind, "terms", None) is not self.terms:
            return False
        if len(attributes) != self.attributes or not self.plain.items() <= attributes.items():
            return False
        numbers = _numbers(module)
        try:
            return len(numbers) == len(self.numbers) and all(map(_equal, numbers, self.numbers))
        except RuntimeError:  # they are on another device; asking for it would take longer than comparing
            return False


@dataclass(frozen=True)
class Cached:
    """Tables of a scheme, and the state of the scheme they were computed from."""

    offsets: Offsets
    dtype: torch.dtype
    terms: Terms
    bias_alone: bool
    parts: list[Part]

    def serves(self, scheme: Scheme, offsets: Offsets, dtype: torch.dtype, decoding: bool) -> bool:
        """Whether there is a column for each of the offsets, and the scheme is unchanged."""
        lo = offsets.lo - offsets.beyond if decoding and self.bias_alone else offsets.lo
        if lo < self.offsets.lo or offsets.end > self.offsets.end:
            return False
        if dtype != self.dtype or offsets.device != self.offsets.device:
            return False
        modules = list(_nested(scheme))
        return len(modules) == len(self.parts) and all(map(Part.is_still, self.parts, modules))


_innermost_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_cache: WeakKeyDictionary[Scheme, Cached] = WeakKeyDictionary()


def tables(scheme: Scheme, offsets: Offsets, dtype: torch.dtype, decoding: bool) -> tuple[Terms, Offsets]:
    """`scheme.terms` with a column for each of the offsets, and the offsets of its columns.

    Only tables over consecutive offsets are cached, in `dtype`. While decoding they get room for the next steps, and a
    bias is returned with columns for other offsets too: a back end takes the part it needs in the same operation that
    makes a mask of it.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or transforming() or _faking():
        return scheme.terms(offsets.r), offsets
    # Comparing numbers waits for a GPU: worth it there only while decoding, where tables are long and the rest short.
    worth = offsets.listed is None and (decoding or offsets.device.type == "cpu")
    if not worth:
        return scheme.terms(offsets.r), offsets
    cached = _cache.get(scheme)
    if cached is None or not cached.serves(scheme, offsets, dtype, decoding):
        parts = _parts(scheme)
        if parts is None:
            return scheme.terms(offsets.r), offsets
        first, terms = _computed(scheme, offsets, decoding)
        if not isinstance(terms, Terms) or terms.pair is not None or not _well_formed(terms, offsets.end - first):
            return scheme.terms(offsets.r), offsets
        terms = terms.to(dtype)._each(Tensor.contiguous)  # a kernel would copy it in every step
        if sum(table.numel() for table in terms.tables().values()) > CACHEABLE:
            return terms.narrow(offsets.lo - first, offsets.count), offsets
        computed = Offsets(first, offsets.end - first, offsets.device)
        cached = _cache[scheme] = Cached(computed, dtype, terms, terms.used() == ("bias",), parts)
    if decoding and cached.bias_alone:
        return cached.terms, cached.offsets
    return cached.terms.narrow(offsets.lo - cached.offsets.lo, offsets.count), offsets


def _computed(scheme: Scheme, offsets: Offsets, decoding: bool) -> tuple[int, Terms]:
    """Tables that cover the offsets, and the offset of their first column.

    While decoding they have room for the keys of the next steps, whose offsets are further back: twice the columns, and
    not twice the distance, because the query may be far from all keys. Beyond the reach of the scheme only a bias has
    columns: a mask needs a number for every key.
    """
    if not decoding:
        return offsets.lo, scheme.terms(offsets.r)
    furthest = offsets.lo - offsets.beyond - (offsets.count + offsets.beyond)
    first = furthest if scheme.reach is None else min(max(furthest, -scheme.reach), offsets.lo)
    terms = scheme.terms(torch.arange(first, offsets.end, device=offsets.device))
    if first == furthest or not isinstance(terms, Terms) or terms.used() != ("bias",):
        return first, terms
    return furthest, scheme.terms(torch.arange(furthest, offsets.end, device=offsets.device))


def _faking() -> bool:
    """Whether a mode such as that of fake tensors is active. Tensors made in it must not outlive it."""
    return _get_current_dispatch_mode() is not None


def _well_formed(terms: Terms, columns: int) -> bool:
    """Whether the tables can be sliced by column. If not, the caller gets them unchanged and raises the error."""
    wide = (torch.float32, torch.float64)
    return all(x.ndim > 1 and x.shape[1] == columns and x.dtype in wide for x in terms.tables().values())


def _parts(scheme: Scheme) -> list[Part] | None:
    """The state of a scheme and of those inside it. None if tables may depend on more, or it is too large."""
    parts = []
    for module in _nested(scheme):
        listing = isinstance(module, nn.ModuleList)
        if not listing and not (isinstance(module, Scheme) and module.cacheable):
            return None
        plain = {} if listing else {name: x for name, x in vars(module).items() if name not in _IGNORED}
        numbers = _numbers(module)
        if not all(isinstance(x, _PLAIN) for x in plain.values()) or any(type(x) not in _TENSORS for x in numbers):
            return None
        terms = getattr(type(module), "terms", None)
        parts.append(Part(type(module), terms, len(vars(module)), plain, [x.detach() for x in numbers]))
    if sum(x.numel() for part in parts for x in part.numbers) > COMPARABLE:
        return None
    return [replace(part, numbers=[x.clone() for x in part.numbers]) for part in parts]


def _nested(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those inside it: in less time than `Module.modules`, which names them."""
    yield module
    for inner in module._modules.values():
        if inner is not None:
            yield from _nested(inner)


def _equal(number: Tensor, copy: Tensor) -> bool:
    return type(number) in _TENSORS and number.dtype == copy.dtype and torch.equal(number, copy)


def _numbers(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a module itself, without those that only `Scheme.read` uses."""
    found = [*module._parameters.items(), *module._buffers.items()]
    unused = getattr(type(module), "read_parameters", ())
    return [x for name, x in found if x is not None and name not in unused]


def transforming() -> bool:
    """Whether a function transform (torch.func) or forward-mode differentiation is active."""
    return _innermost_transform() is not None or forward_ad._current_level >= 0
