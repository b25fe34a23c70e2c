"""Our own CPU kernel: every table, forward and backward, near the price of plain attention, memory linear in L.

The kernel is `fused.c`, built at first use by `build.py`; here it becomes two operators of `torch.library`, with shapes
for `torch.compile` and a gradient for q, k, v and each table. Dropout is drawn from a seed and the pair, so that the
backward pass drops the same weights again without having kept them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.attention.build import build
from locant.attention.request import Request
from locant.attention.tables import transforming

TABLES = ("bias", "gain", "query", "key", "value")
DTYPES = (torch.float32, torch.bfloat16)


def unsupported(request: Request) -> str | None:
    if request.q.device.type != "cpu":
        return f"it runs on CPUs, and these tensors are on {request.q.device.type}"
    if request.q.dtype not in DTYPES:
        return f"it computes in float32, from float32 or bfloat16 tensors; these are {request.q.dtype}"
    if request.terms.pair is not None:
        return f"{request.scheme} has a logit that is not a function of the offset alone (pair)"
    if request.need_weights:
        return "it does not return weights (need_weights=True)"
    if not torch.compiler.is_compiling() and transforming():
        return "it has no rule for torch.func and forward-mode derivatives"
    if request.offsets.inverse is not None:
        return "positions with large gaps, or unknown while compiling, have no table over consecutive offsets"
    if 0 in (request.k.shape[2], request.q.shape[3], request.v.shape[3], request.k.shape[1]):
        return "there is nothing to attend to"
    missing: str | None = _missing()
    return missing


def _missing() -> str | None:
    built = build()
    return None if built.library is not None else f"its kernel is not there: {built.why}"


# What torch.compiler.assume_constant_result does; it would import the whole compiler for it, two seconds.
_missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def attend(request: Request) -> tuple[Tensor, None]:
    q, k = request.turned()
    v, raw_q, raw_k = request.v, None, None
    tables = {name: getattr(request.terms, name) for name in TABLES}
    if q is not request.q or k is not request.k:
        # rotate may widen, in dtype and in size
        dtype = torch.bfloat16 if q.dtype == k.dtype == torch.bfloat16 else torch.float32
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if request.terms.query is not None or request.terms.key is not None:
            wider = (0, q.shape[3] - request.q.shape[3])
            raw_q, raw_k = F.pad(request.q.to(dtype), wider), F.pad(request.k.to(dtype), wider)
            tables |= {name: F.pad(tables[name], wider) for name in ("query", "key") if tables[name] is not None}
    seed = torch.zeros(1, dtype=torch.int64)
    if request.dropout:
        seed = torch.randint(2**62, (1,))
    b = request.q.shape[0]
    out, _ = forward(
        q, k, v, raw_q, raw_k, *tables.values(), request.q_pos.expand(b, -1), request.k_pos.expand(b, -1),
        request.mask, seed, request.offsets.lo, request.scale, request.causal, request.dropout,
    )  # fmt: skip
    return out.to(request.q.dtype), None


# ------------------------------------------------------------------------------------------------- operators


@torch.library.custom_op("locant::attend", mutates_args=(), device_types="cpu")
def forward(
    q: Tensor, k: Tensor, v: Tensor, raw_q: Tensor | None, raw_k: Tensor | None,
    bias: Tensor | None, gain: Tensor | None, query: Tensor | None, key: Tensor | None, value: Tensor | None,
    q_pos: Tensor, k_pos: Tensor, mask: Tensor | None, seed: Tensor,
    lo: int, scale: float, causal: bool, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output [B, H, Lq, Dv] in float32; of each query the largest logit and the logarithm of the sum beside it."""
    out, lse = _forward_like(q, v)
    tables = dict(zip(TABLES, (bias, gain, query, key, value), strict=True))
    call = _Prepared(q, k, v, raw_q, raw_k, tables, q_pos, k_pos, mask, seed, lo, scale, causal, dropout, out, lse)
    call.run("locant_forward")
    return out, lse


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _forward_like(q, v)


def _forward_like(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    b, h, lq, _ = q.shape
    # Laid out as [B, Lq, H, Dv], as PyTorch's kernel does: a model joins the heads next.
    d, wide = v.shape[3], torch.float32
    return q.new_empty_strided((b, h, lq, d), (lq * h * d, d, h * d, 1), dtype=wide), q.new_empty(
        b, h, lq, 2, dtype=wide
    )


@torch.library.custom_op("locant::attend_backward", mutates_args=(), device_types="cpu")
def backward(
    grad: Tensor, out: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, raw_q: Tensor | None, raw_k: Tensor | None,
    bias: Tensor | None, gain: Tensor | None, query: Tensor | None, key: Tensor | None, value: Tensor | None,
    q_pos: Tensor, k_pos: Tensor, mask: Tensor | None, seed: Tensor,
    lo: int, scale: float, causal: bool, dropout: float, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, raw_q, raw_k and the tables; an empty tensor for what is not there or not wanted."""
    tables = dict(zip(TABLES, (bias, gain, query, key, value), strict=True))
    grads = _backward_like(q, k, v, raw_q, raw_k, tables, wanted)
    call = _Prepared(q, k, v, raw_q, raw_k, tables, q_pos, k_pos, mask, seed, lo, scale, causal, dropout, out, lse)
    call.backward(grad, grads)
    call.run("locant_backward")
    return grads


@backward.register_fake
def _(grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, raw_q: Tensor | None,
      raw_k: Tensor | None, *rest: Any) -> list[Tensor]:  # fmt: skip
    return _backward_like(q, k, v, raw_q, raw_k, dict(zip(TABLES, rest[:5], strict=True)), rest[-1])


def _backward_like(
    q: Tensor, k: Tensor, v: Tensor, raw_q: Tensor | None, raw_k: Tensor | None,
    tables: dict[str, Tensor | None], wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    content = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    raw = [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (raw_q, raw_k)]
    kept = zip(tables.values(), wanted, strict=True)
    return [*content, *raw, *(q.new_empty(0) if x is None or not want else x.new_zeros(x.shape) for x, want in kept)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, lse = output
    ctx.save_for_backward(out, lse, *inputs[:14])
    ctx.rest = inputs[14:]
    ctx.mark_non_differentiable(lse)


def _gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    out, lse, *tensors = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[5:10])
    grads = backward(grad, out, lse, *tensors, *ctx.rest, wanted)
    found = [x if need else None for x, need in zip(grads, ctx.needs_input_grad, strict=False)]
    return (*found, *[None] * 8)


forward.register_autograd(_gradient, setup_context=_setup)


# ------------------------------------------------------------------------------------------------- the C side


class _View(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64 * 4)]

    @classmethod
    def of(cls, x: Tensor | None) -> _View:
        if x is None:
            return cls()
        # A stride of 0 where there is one element anyway: then no stride can lead outside the tensor.
        strides = [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
        return cls(x.data_ptr(), (ctypes.c_int64 * 4)(*strides))


_INTS = ("batch", "heads", "kv_heads", "lq", "lk", "d", "dv", "columns", "lo", "causal", "bf16", "threads", "raw",
         "gain_vector", "seed")  # fmt: skip
_GRADS = ("dq", "dk", "dv_", "draw_q", "draw_k")


class _Call(ctypes.Structure):
    """`Call` in fused.c, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _INTS),
        ("scale", ctypes.c_double),
        ("dropout", ctypes.c_double),
        *((name, _View) for name in ("q", "k", "v", "raw_q", "raw_k", "out", "mask")),
        ("q_pos", ctypes.c_void_p),
        ("k_pos", ctypes.c_void_p),
        ("q_pos_stride", ctypes.c_int64),
        ("k_pos_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in TABLES),
        *((f"{name}_heads", ctypes.c_int64) for name in TABLES),
        ("lse", ctypes.c_void_p),
        *((name, _View) for name in ("grad", *_GRADS)),
        *((f"d{name}", ctypes.c_void_p) for name in TABLES),
    ]


class _Prepared:
    """A `_Call`, and the tensors it points into for as long as it runs."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, raw_q: Tensor | None, raw_k: Tensor | None,
        tables: dict[str, Tensor | None], q_pos: Tensor, k_pos: Tensor, mask: Tensor | None, seed: Tensor,
        lo: int, scale: float, causal: bool, dropout: float, out: Tensor, lse: Tensor,
    ) -> None:  # fmt: skip
        b, h, lq, d = q.shape
        self.lse = lse.contiguous()
        self.tables = {name: None if x is None else x.float().contiguous() for name, x in tables.items()}
        self.q_pos, self.k_pos = ((x if x.stride(-1) == 1 else x.contiguous()) for x in (q_pos, k_pos))
        self.mask = None if mask is None else mask.expand(b, h, lq, k.shape[2]).view(torch.uint8)
        self.held = [q, k, v, raw_q, raw_k, out]
        gain, there = self.tables["gain"], [x for x in self.tables.values() if x is not None]
        call = self.call = _Call()
        call.batch, call.heads, call.lq, call.d = b, h, lq, d
        call.kv_heads, call.lk, call.dv = k.shape[1], k.shape[2], v.shape[3]
        call.columns, call.lo = there[0].shape[1] if there else 1, lo
        call.causal, call.bf16, call.threads = causal, q.dtype == torch.bfloat16, torch.get_num_threads()
        call.raw, call.gain_vector = raw_q is not None, gain is not None and gain.ndim == 3
        call.seed, call.scale, call.dropout = int(seed), scale, dropout
        call.q, call.k, call.v, call.out = _View.of(q), _View.of(k), _View.of(v), _View.of(out)
        call.raw_q, call.raw_k, call.mask = _View.of(raw_q), _View.of(raw_k), _View.of(self.mask)
        call.q_pos, call.k_pos = self.q_pos.data_ptr(), self.k_pos.data_ptr()
        call.q_pos_stride, call.k_pos_stride = (0 if b == 1 else x.stride(0) for x in (self.q_pos, self.k_pos))
        for name, table in self.tables.items():
            if table is not None:
                setattr(call, name, table.data_ptr())
                setattr(call, f"{name}_heads", table.shape[0])
        call.lse = self.lse.data_ptr()

    def backward(self, grad: Tensor, grads: list[Tensor]) -> None:
        grad = grad.float()
        self.held += [grad, *grads]
        self.call.grad = _View.of(grad)
        for name, x in zip(_GRADS, grads[:5], strict=True):
            setattr(self.call, name, _View.of(x if x.numel() else None))
        for name, x in zip(TABLES, grads[5:], strict=True):
            setattr(self.call, f"d{name}", x.data_ptr() if x.numel() else None)

    def run(self, name: str) -> None:
        library = build().library
        if library is None:
            raise RuntimeError(f"the fused kernel is not there: {build().why}")
        library.locant_call_size.restype = ctypes.c_int64
        if library.locant_call_size() != ctypes.sizeof(_Call):
            raise RuntimeError("fused.c and fused.py do not agree on what a call is; the installation is broken")
        if getattr(library, name)(ctypes.byref(self.call)) != 0:
            raise MemoryError(f"the fused kernel could not get the memory it needs for {self.call.lk} keys")
