"""Our own CPU kernel: every table, forward and backward, at nearly the cost of plain attention, memory linear in L.

The kernel is `fused.c`, which `build.py` compiles at first use. This file makes it two operators of `torch.library`,
with shapes for `torch.compile` and a gradient for every tensor of floating-point numbers. `fused_call.py` makes
their arguments.

Dropout is a hash of a seed and the pair: the backward pass drops the same weights again, and none are stored.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from locant.attention.build import build
from locant.attention.fused_call import (
    CONTENT,
    IF_WANTED,
    NO_GRADIENTS,
    SCHEMA,
    TABLES,
    TENSORS,
    WITH_GRADIENT,
    Call,
    make_call,
)
from locant.attention.request import Request
from locant.attention.second_order import output_of_call, second_gradients

DTYPES = (torch.float32, torch.bfloat16)


def attend(request: Request) -> tuple[Tensor, None]:
    """The output [B, H, Lq, Dv] in the dtype of q, and None: the kernel keeps no weights."""
    out, _ = forward(*make_call(request))
    return out.to(request.q.dtype), None


# ------------------------------------------------------------------------------------------------- operators


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The output [B, H, Lq, Dv] in float32, and `lse` [B, H, Lq, 2].

    `lse` holds for each query the largest logit, and the logarithm of Σ_j exp(logit − largest).
    """
    call = Call(*arguments)
    out, lse = _empty_outputs(call)
    _Kernel(call, out, lse).run("locant_forward")
    return out, lse


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _empty_outputs(Call(*arguments))


def _empty_outputs(call: Call) -> tuple[Tensor, Tensor]:
    b, h, lq, _ = call.q.shape
    dv, dtype = call.v.shape[3], torch.float32
    # The memory is laid out as [B, Lq, H, Dv], as PyTorch's kernel does it: a model joins the heads next.
    out = call.q.new_empty_strided((b, h, lq, dv), (lq * h * dv, dv, h * dv, 1), dtype=dtype)
    return out, call.q.new_empty(b, h, lq, 2, dtype=dtype)


def _backward(grad: Tensor, out: Tensor, lse: Tensor, wanted: list[bool], *arguments: Any) -> list[Tensor]:
    """The gradients of `WITH_GRADIENT`, in that order.

    `wanted` has a flag for each of `IF_WANTED`. A field that is None or not wanted gets an empty tensor.
    """
    call = Call(*arguments)
    grads = _empty_gradients(call, wanted)
    kernel = _Kernel(call, out, lse)
    # One number per sequence and head, so that no two threads write to the same place.
    by_sequence = lse.new_empty(call.q.shape[:2]) if grads["sinks"].numel() else None
    kernel.set_gradients(grad, grads, by_sequence)
    kernel.run("locant_backward")
    if by_sequence is not None:
        grads["sinks"] = by_sequence.sum(0)
    return list(grads.values())


def _backward_fake(grad: Tensor, out: Tensor, lse: Tensor, wanted: list[bool], *arguments: Any) -> list[Tensor]:
    return list(_empty_gradients(Call(*arguments), wanted).values())


def _empty_gradients(call: Call, wanted: list[bool]) -> dict[str, Tensor]:
    """Memory for each of `WITH_GRADIENT`. The kernel overwrites the content and adds to the tables."""
    grads = {}
    for name in CONTENT:
        x = getattr(call, name)
        grads[name] = call.q.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    for name, want in zip(IF_WANTED, wanted, strict=True):
        x = getattr(call, name)
        grads[name] = x.new_zeros(x.shape) if x is not None and want else call.q.new_empty(0)
    return grads


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Saves what the backward pass needs.

    Tensors go through save_for_backward, which detects in-place changes; other values are stored on ctx.
    """
    call = Call(*inputs)
    out, lse = output
    ctx.save_for_backward(out, lse, *(getattr(call, name) for name in TENSORS))
    without_tensors: dict[str, Any] = dict.fromkeys(TENSORS)
    ctx.call = call._replace(**without_tensors)
    ctx.mark_non_differentiable(lse)


def _gradient(ctx: Any, grad: Tensor, _: Any) -> Call:
    """A gradient, or None, for each field of the call."""
    out, lse, *tensors = ctx.saved_tensors
    call = ctx.call._replace(**dict(zip(TENSORS, tensors, strict=True)))
    needed = Call(*ctx.needs_input_grad)
    grads = backward(grad, out, lse, [getattr(needed, name) for name in IF_WANTED], *call)
    found: dict[str, Any] = {name: x for name, x in zip(WITH_GRADIENT, grads, strict=True) if getattr(needed, name)}
    return NO_GRADIENTS._replace(**found)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Saves the inputs of the backward pass, for a second one."""
    grad, _, _, wanted, *arguments = inputs
    call = Call(*arguments)
    ctx.save_for_backward(grad, *(getattr(call, name) for name in TENSORS))
    without_tensors: dict[str, Any] = dict.fromkeys(TENSORS)
    ctx.call, ctx.wanted = call._replace(**without_tensors), wanted


def _second_gradient(ctx: Any, pulls: list[Tensor | None]) -> tuple[Any, ...]:
    """The gradients of the inputs of `backward`, by `eager`: the kernel has no second derivative."""
    grad, *tensors = ctx.saved_tensors
    call = ctx.call._replace(**dict(zip(TENSORS, tensors, strict=True)))
    asked = {**dict.fromkeys(CONTENT, True), **dict(zip(IF_WANTED, ctx.wanted, strict=True))}
    given = {name: x for name in WITH_GRADIENT if (x := getattr(call, name)) is not None}
    pulled = {name: x for name, x in zip(WITH_GRADIENT, pulls, strict=True)
              if x is not None and name in given and asked[name]}  # fmt: skip
    kept = _kept(call) if call.dropout else None
    of_grad, found = second_gradients(grad, given, pulled, lambda now: output_of_call(call, now, kept))
    named: dict[str, Any] = {name: x.to(given[name].dtype) for name, x in found.items()}
    return of_grad.to(grad.dtype), None, None, None, *NO_GRADIENTS._replace(**named)


def _kept(call: Call) -> Tensor:
    """The factors of the weights under dropout, [B, H, Lq, Lk].

    With equal logits and unit vectors as values the output is the weights. Zeros are those that were dropped.
    """
    b, lk = call.q.shape[0], call.k.shape[2]
    with torch.no_grad():
        nothing: dict[str, Any] = dict.fromkeys((*CONTENT[3:], *IF_WANTED, "mask", "softcap", "lowest", "highest"))
        units = torch.eye(lk, dtype=call.q.dtype).expand(b, call.k.shape[1], lk, lk)
        plain = call._replace(q=torch.zeros_like(call.q), k=torch.zeros_like(call.k), v=units, **nothing)
        weights: Tensor = forward(*plain)[0]
        return (weights != 0).double() / (1 - call.dropout)


def _hidden_from_compiler(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel as a function that torch.compile does not trace.

    torch.library.custom_op does this too, but imports the compiler at the first call, which takes a second. As long as
    nobody has imported it, it cannot trace.
    """
    hidden = None

    def run(*arguments: Any) -> Any:
        nonlocal hidden
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
        if disable is None:
            return kernel(*arguments)
        hidden = hidden or disable(kernel)
        return hidden(*arguments)

    return run


def _define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Defines an operator for CPUs, with its shapes for torch.compile."""
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "cpu", _hidden_from_compiler(kernel))
    torch.library.register_fake(name, fake)


_define("locant::attend", f"({SCHEMA}) -> (Tensor, Tensor)", _forward, _forward_fake)
_define(
    "locant::attend_backward",
    f"(Tensor grad, Tensor out, Tensor lse, bool[] wanted, {SCHEMA}) -> Tensor[]",
    _backward,
    _backward_fake,
)
torch.library.register_autograd("locant::attend", _gradient, setup_context=_save)
torch.library.register_autograd("locant::attend_backward", _second_gradient, setup_context=_save_backward)
forward = torch.ops.locant.attend.default
backward = torch.ops.locant.attend_backward.default


# ------------------------------------------------------------------------------------------------- the C side


class _View(ctypes.Structure):
    """`View` in fused.c: a tensor of up to four dimensions."""

    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64 * 4)]

    @classmethod
    def of(cls, x: Tensor | None) -> _View:
        if x is None:
            return cls()
        # A stride of 0 where there is one element anyway: then no stride can lead outside the tensor.
        strides = [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
        return cls(x.data_ptr(), (ctypes.c_int64 * 4)(*strides))


_SIZES = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim", "query_dim", "key_dim", "columns",
          "first_offset", "lowest", "highest", "distance", "bf16", "raw_q_bf16", "raw_k_bf16", "threads", "vector_gain",
          "seed")  # fmt: skip


class CallStruct(ctypes.Structure):
    """`Call` in fused.c, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _SIZES),
        ("scale", ctypes.c_double),
        ("dropout", ctypes.c_double),
        ("softcap", ctypes.c_double),
        *((name, _View) for name in (*CONTENT, "out", "mask")),
        ("q_pos", ctypes.c_void_p),
        ("k_pos", ctypes.c_void_p),
        ("q_pos_stride", ctypes.c_int64),
        ("k_pos_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in TABLES),
        *((f"{name}_heads", ctypes.c_int64) for name in TABLES),
        ("sinks", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        *((name, _View) for name in ("grad", *(f"d{name}" for name in CONTENT))),
        *((f"d{name}", ctypes.c_void_p) for name in IF_WANTED),
    ]


def check_struct(library: ctypes.CDLL) -> None:
    """RuntimeError if the library was built from another fused.c, with other fields of a call."""
    library.locant_call_size.restype = ctypes.c_int64
    if library.locant_call_size() != ctypes.sizeof(CallStruct):
        raise RuntimeError("fused.c and fused.py disagree about the fields of a call; install locant again")


class _Kernel:
    """A call in the form that C reads, and the tensors it points into for as long as it runs."""

    def __init__(self, call: Call, out: Tensor, lse: Tensor) -> None:
        b, h, lq, d = call.q.shape
        lk = call.k.shape[2]
        lse = lse.contiguous()
        tables = {name: x.float().contiguous() for name in TABLES if (x := getattr(call, name)) is not None}
        q_pos, k_pos = ((x if x.stride(-1) == 1 else x.contiguous()) for x in (call.q_pos, call.k_pos))
        mask = None if call.mask is None else call.mask.expand(b, h, lq, lk).view(torch.uint8)
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        self.held: list[Any] = [call, out, lse, tables, q_pos, k_pos, mask, sinks]
        c = self.struct = CallStruct()
        c.batch, c.heads, c.queries, c.head_dim = b, h, lq, d
        c.kv_heads, c.keys, c.value_dim = call.k.shape[1], lk, call.v.shape[3]
        c.columns = next((x.shape[1] for x in tables.values()), 1)
        c.first_offset, c.distance, c.seed = call.first_offset, call.distance, int(call.seed)
        c.scale, c.dropout = call.scale, call.dropout
        c.lowest = -(2**63) if call.lowest is None else call.lowest
        c.highest = 2**63 - 1 if call.highest is None else call.highest
        raw_q, raw_k = (call.q if call.raw_q is None else call.raw_q), (call.k if call.raw_k is None else call.raw_k)
        c.query_dim, c.key_dim = raw_q.shape[3], raw_k.shape[3]
        c.bf16, c.raw_q_bf16, c.raw_k_bf16 = (x.dtype == torch.bfloat16 for x in (call.q, raw_q, raw_k))
        c.threads, c.vector_gain = torch.get_num_threads(), call.gain is not None and call.gain.ndim == 3
        for name in CONTENT:
            setattr(c, name, _View.of(getattr(call, name)))
        c.out, c.mask = _View.of(out), _View.of(mask)
        c.q_pos, c.k_pos = q_pos.data_ptr(), k_pos.data_ptr()
        c.q_pos_stride, c.k_pos_stride = (0 if b == 1 else x.stride(0) for x in (q_pos, k_pos))
        for name, table in tables.items():
            setattr(c, name, table.data_ptr())
            setattr(c, f"{name}_heads", table.shape[0])
        c.sinks, c.softcap = None if sinks is None else sinks.data_ptr(), call.softcap or 0.0
        c.lse = lse.data_ptr()

    def set_gradients(self, grad: Tensor, grads: dict[str, Tensor], sinks: Tensor | None) -> None:
        """`grad` is that of the output; the kernel writes into `grads`, except empty ones.

        The gradient of the sinks goes to `sinks` [B, H], for each sequence by itself.
        """
        grad = grad.float()
        self.held += [grad, grads, sinks]
        self.struct.dsinks = None if sinks is None else sinks.data_ptr()
        self.struct.grad = _View.of(grad)
        for name in CONTENT:
            setattr(self.struct, f"d{name}", _View.of(grads[name] if grads[name].numel() else None))
        for name in TABLES:
            setattr(self.struct, f"d{name}", grads[name].data_ptr() if grads[name].numel() else None)

    def run(self, name: str) -> None:
        """Runs a function of the library on the call."""
        library = build().library
        if library is None:
            raise RuntimeError(f"the fused kernel is not available: {build().why}")
        check_struct(library)
        if getattr(library, name)(ctypes.byref(self.struct)) != 0:
            raise MemoryError(f"the fused kernel could not allocate the memory it needs for {self.struct.keys} keys")
