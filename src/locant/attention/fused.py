"""Our own CPU kernel: every table, forward and backward, at nearly the cost of plain attention, memory linear in L.

The kernel is `fused.c`, which `build.py` compiles at first use. This file passes a `Call` to it; `operators.py`
makes it two operators of PyTorch, and `fused_call.py` their arguments.

Dropout is a hash of a seed and the pair: the backward pass drops the same weights again, and none are stored.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from locant.attention.build import build
from locant.attention.fused_call import CONTENT, IF_WANTED, TABLES, Call, make_call
from locant.attention.operators import Operators
from locant.attention.request import Request

DTYPES = (torch.float32, torch.bfloat16)


def attend(request: Request) -> tuple[Tensor, None]:
    """The output [B, H, Lq, Dv] in the dtype of q, and None: the kernel keeps no weights."""
    out, _ = forward(*make_call(request))
    return out.to(request.q.dtype), None


def _compute(call: Call, out: Tensor, lse: Tensor) -> None:
    _Kernel(call, out, lse).run("locant_forward")


def _pull(call: Call, grad: Tensor, out: Tensor, lse: Tensor, grads: dict[str, Tensor]) -> None:
    """The kernel overwrites the gradients of the content, and adds to those of the tables."""
    for name in TABLES:
        grads[name].zero_()
    kernel = _Kernel(call, out, lse)
    # One number per sequence and head, so that no two threads write to the same place.
    by_sequence = lse.new_empty(call.q.shape[:2]) if grads["sinks"].numel() else None
    kernel.set_gradients(grad, grads, by_sequence)
    kernel.run("locant_backward")
    if by_sequence is not None:
        grads["sinks"].copy_(by_sequence.sum(0))


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


OPERATORS = Operators("attend", ("cpu",), _compute, _pull, _kept)
forward, backward = OPERATORS.forward, OPERATORS.backward


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
