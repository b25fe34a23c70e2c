"""The fused kernel without torch's dispatcher, for a decoding step.

After one query has passed a cache of keys through the processor's caches, an operator with thirty arguments takes as
long as a tenth of the kernel. A step without gradients needs no operator: `attend` gives the kernel pointers alone.
Calls that need an operator (gradients, compiled code, modes, tensors of other classes) and rare ones (vectors of keys,
a rotation that widens the dtype) go to `fused.attend`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from itertools import chain
from struct import Struct, calcsize

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from locant.attention import fused
from locant.attention.build import build
from locant.attention.request import Request

FEW_QUERIES, FEW_ROWS = 4, 32
"""The most queries, and the most queries of all heads that share keys, with which the kernel reads keys in place. Both
are as in fused.c."""
NO_VIEW = (0, 0, 0, 0, 0)
LOWEST, HIGHEST = -(2**63), 2**63 - 1


def attend(request: Request) -> tuple[Tensor, None]:
    """The output [B, H, Lq, Dv] in the dtype of q, and None: the kernel keeps no weights."""
    return (_run(request), None) if _is_plain(request) else fused.attend(request)


def reads_in_place(request: Request) -> bool:
    """Whether the kernel reads the keys in place (`has_few_queries` in fused.c)."""
    (_, h, lq, _), gain = request.q.shape, request.terms.gain
    if lq > FEW_QUERIES or lq * (h // request.k.shape[1]) > FEW_ROWS:
        return False
    return (gain is None or gain.ndim == 2) and request.far is None and request.dropout == 0


def _is_plain(request: Request) -> bool:
    """Whether the kernel may read the memory of the tensors, and nobody needs an operator."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not request.decoding:
        return False
    if _get_current_dispatch_mode() is not None or torch._C._len_torch_function_stack() > 0:
        return False
    if torch._C._get_tracing_state() is not None or not reads_in_place(request) or request.sides.key is not None:
        return False
    q, k, v = *request.rotated, request.v
    if not (q.dtype == k.dtype == v.dtype):
        return False
    return all(type(x) in (Tensor, nn.Parameter) and not x.is_neg() for x in (request.q, request.k, q, k, v))


def _run(request: Request) -> Tensor:
    (q, k), v, terms, sides, mask = request.rotated, request.v, request.terms, request.sides, request.mask
    (b, h, lq, d), (_, kv, lk, _), dv, dtype = q.shape, k.shape, v.shape[3], request.q.dtype
    # The memory is laid out as [B, Lq, H, Dv]: a model joins the heads next.
    out = torch.empty((b, h, 1, dv) if lq == 1 else (b, lq, h, dv), dtype=torch.float32)
    out = out if lq == 1 else out.transpose(1, 2)
    rounded, bf16 = dtype != torch.float32, q.dtype == torch.bfloat16
    raw_q = request.q if sides.query is None else sides.query.float()
    numbers = [None if x is None else x.double() for x in (sides.query_level, sides.key_level, sides.temperature)]
    tables = [None if x is None else x.float().contiguous()
              for x in (terms.bias, terms.gain, terms.query, terms.key, terms.value, terms.level)]  # fmt: skip
    sinks = None if request.sinks is None else request.sinks.float().contiguous()
    if request.positions is None:
        first = _counted(1 << (lk - 1).bit_length()).data_ptr()
        positions = [first + 8 * (lk - lq), first, 0, 0]
    else:
        rows = [x if x.stride(1) == 1 else x.contiguous() for x in request.positions]
        positions = [*(x.data_ptr() for x in rows), *(0 if x.shape[0] == 1 else x.stride(0) for x in rows)]
    lowest, highest = request.limits
    call = FORMAT.pack(
        b, h, kv, lq, lk, d, dv, raw_q.shape[3], request.k.shape[3],
        next((x.shape[1] for x in tables if x is not None), 1), request.offsets.lo,
        LOWEST if lowest is None else lowest, HIGHEST if highest is None else highest, 0,
        bf16, raw_q.dtype == torch.bfloat16, dtype == torch.bfloat16, torch.get_num_threads(), 0, 0,
        request.scale, 0.0, request.softcap or 0.0,
        q.data_ptr(), *q.stride(), k.data_ptr(), *k.stride(), v.data_ptr(), *v.stride(),
        *(NO_VIEW if raw_q is q or terms.query is None else _view(raw_q)),
        *(NO_VIEW if request.k is k or terms.key is None else _view(request.k)),
        *NO_VIEW, *NO_VIEW, *NO_VIEW,
        *chain.from_iterable(NO_VIEW if x is None else _view(x) for x in numbers),
        out.data_ptr(), *out.stride(), *(NO_VIEW if mask is None else _view(mask)),
        *positions,
        *(0 if x is None else x.data_ptr() for x in tables), *(0 if x is None else x.shape[0] for x in tables),
        0 if sinks is None else sinks.data_ptr(), 0,
    )  # fmt: skip
    if _kernel()(call) != 0:
        raise MemoryError(f"the fused kernel could not allocate the memory it needs for {lk} keys")
    return out.to(dtype) if rounded else out


def _view(x: Tensor) -> tuple[int, ...]:
    """`View` in fused.c. The stride is 0 where there is one entry: for all heads, or sequences, or queries."""
    strides = [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return (x.data_ptr(), *strides, *(0,) * (4 - len(strides)))


def _format() -> Struct:
    """The layout of `Call` in fused.c up to `lse`, and zeros for the gradients."""
    letters = {ctypes.c_int64: "q", ctypes.c_double: "d", ctypes.c_void_p: "Q"}
    found = ""
    for field in fused.CallStruct._fields_:
        found += letters.get(field[1], "Q4q")
        if field[0] == "lse":
            return Struct(f"={found}{ctypes.sizeof(fused.CallStruct) - calcsize(f'={found}')}x")
    raise AssertionError("a call has a field `lse`")


FORMAT = _format()


@cache
def _counted(n: int) -> Tensor:
    """0 … n − 1: the positions of the keys of all steps up to that length."""
    return torch.arange(n)


@cache
def _kernel() -> ctypes._NamedFuncPointer:
    library = build().library
    if library is None:
        raise RuntimeError(f"the fused kernel is not available: {build().why}")
    fused.check_struct(library)
    found: ctypes._NamedFuncPointer = library.locant_forward
    return found
