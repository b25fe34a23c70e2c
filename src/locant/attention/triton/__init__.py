"""Our GPU kernel, in Triton: every table, forward and backward, with memory linear in L.

`kernels.py` has the kernels, `launch.py` runs them, `blocks.py` chooses the sizes of tiles. This file makes two
operators of `torch.library`, with shapes for `torch.compile` and a gradient for every tensor of floating-point numbers.
Their arguments are those of `fused`, and whether the keys are 0 … Lk−1 and the queries the last of them.

Triton is imported at the first call. In its interpreter (TRITON_INTERPRET=1, set before triton is imported) the kernels
also run on CPUs: slowly, to prove that they are right.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from locant.attention.fused_call import (
    CONTENT,
    IF_WANTED,
    NO_GRADIENTS,
    SCHEMA,
    TENSORS,
    WITH_GRADIENT,
    Call,
    make_call,
)
from locant.attention.request import Request
from locant.attention.second_order import output_of_call, second_gradients

if TYPE_CHECKING:
    from locant.attention.triton.launch import Launch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256
"""The largest width of queries, values and side vectors: one row of a tile must fit into shared memory."""


def missing() -> str | None:
    """Why the kernels cannot be used here, on any device; None if they can."""
    if find_spec("triton") is None:
        return "triton is not installed; pip install 'locant[gpu]'"
    return None


def missing_interpreter() -> str | None:
    """Why the kernels cannot be used on a CPU; None if they can."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "it runs on CUDA devices; on CPUs only in Triton's interpreter (TRITON_INTERPRET=1), to test it"
    loaded = sys.modules.get("triton.language")
    if loaded is not None and hasattr(loaded.sum, "cache_key"):
        return "TRITON_INTERPRET=1 was set after triton had been imported; set it before Python starts"
    return None


_autotuning = False


def autotune(on: bool) -> None:
    """Whether block sizes are measured at the first call of each kind, instead of taken from a table.

    Off by default: other sizes sum in another order, so results then differ from machine to machine in their last bits.
    """
    global _autotuning
    _autotuning = on


def attend(request: Request) -> tuple[Tensor, None]:
    """The output [B, H, Lq, Dv] in the dtype of q, and None: the kernel keeps no weights."""
    out, _ = forward(request.consecutive, *make_call(request))
    return out.to(request.q.dtype), None


# ------------------------------------------------------------------------------------------------- operators


def _on_device_of(call: Call) -> AbstractContextManager[Any]:
    """Makes the device of a call the current one, which Triton launches on."""
    return torch.cuda.device(call.q.device) if call.q.is_cuda else nullcontext()


def _launch(call: Call, backward: bool, consecutive: bool, run: Callable[[Launch], object]) -> Launch:
    """The call, ready to `run`, with block sizes of the table or measured ones."""
    from locant.attention.triton.launch import Launch, tuned_launch

    return tuned_launch(call, consecutive, run, backward) if _autotuning else Launch(call, backward, consecutive)


def _forward(consecutive: bool, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The output [B, H, Lq, Dv] in float32, and `lse` [B, H, Lq, 2], see `kernels.forward`."""
    call = Call(*arguments)
    out, lse = _empty_outputs(call)
    with _on_device_of(call):
        _launch(call, False, consecutive, lambda launch: launch.forward(out, lse)).forward(out, lse)
    return out, lse


def _forward_fake(consecutive: bool, *arguments: Any) -> tuple[Tensor, Tensor]:
    return _empty_outputs(Call(*arguments))


def _empty_outputs(call: Call) -> tuple[Tensor, Tensor]:
    b, h, lq, _ = call.q.shape
    dv, dtype = call.v.shape[3], torch.float32
    # The memory is laid out as [B, Lq, H, Dv], as PyTorch's kernel does it: a model joins the heads next.
    out = call.q.new_empty_strided((b, h, lq, dv), (lq * h * dv, dv, h * dv, 1), dtype=dtype)
    return out, call.q.new_empty(b, h, lq, 2, dtype=dtype)


def _backward(
    grad: Tensor, out: Tensor, lse: Tensor, wanted: list[bool], consecutive: bool, *arguments: Any
) -> list[Tensor]:
    """The gradients of `WITH_GRADIENT`, in that order.

    `wanted` has a flag for each of `IF_WANTED`. A field that is None or not wanted gets an empty tensor.
    """
    call = Call(*arguments)
    grads = _empty_gradients(call, wanted)
    with _on_device_of(call):
        launch = _launch(call, True, consecutive, lambda launch: launch.backward(grad, out, lse, grads))
        launch.backward(grad, out, lse, grads)
    return list(grads.values())


def _backward_fake(
    grad: Tensor, out: Tensor, lse: Tensor, wanted: list[bool], consecutive: bool, *arguments: Any
) -> list[Tensor]:
    return list(_empty_gradients(Call(*arguments), wanted).values())


def _empty_gradients(call: Call, wanted: list[bool]) -> dict[str, Tensor]:
    """Memory for each of `WITH_GRADIENT`."""
    grads = {}
    asked = {**dict.fromkeys(CONTENT, True), **dict(zip(IF_WANTED, wanted, strict=True))}
    for name, want in asked.items():
        x = getattr(call, name)
        used = x is not None and want
        grads[name] = torch.empty_like(x, memory_format=torch.contiguous_format) if used else call.q.new_empty(0)
    return grads


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Saves what the backward pass needs. Tensors go through save_for_backward, which detects in-place changes."""
    ctx.consecutive, *arguments = inputs
    call = Call(*arguments)
    out, lse = output
    ctx.save_for_backward(out, lse, *(getattr(call, name) for name in TENSORS))
    without_tensors: dict[str, Any] = dict.fromkeys(TENSORS)
    ctx.call = call._replace(**without_tensors)
    ctx.mark_non_differentiable(lse)


def _gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    """A gradient, or None, for each argument."""
    out, lse, *tensors = ctx.saved_tensors
    call = ctx.call._replace(**dict(zip(TENSORS, tensors, strict=True)))
    needed = Call(*ctx.needs_input_grad[1:])
    grads = backward(grad, out, lse, [getattr(needed, name) for name in IF_WANTED], ctx.consecutive, *call)
    found: dict[str, Any] = {name: x for name, x in zip(WITH_GRADIENT, grads, strict=True) if getattr(needed, name)}
    return None, *NO_GRADIENTS._replace(**found)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Saves the inputs of the backward pass, for a second one."""
    grad, _, _, wanted, consecutive, *arguments = inputs
    call = Call(*arguments)
    ctx.save_for_backward(grad, *(getattr(call, name) for name in TENSORS))
    without_tensors: dict[str, Any] = dict.fromkeys(TENSORS)
    ctx.call, ctx.wanted, ctx.consecutive = call._replace(**without_tensors), wanted, consecutive


def _second_gradient(ctx: Any, pulls: list[Tensor | None]) -> tuple[Any, ...]:
    """The gradients of the inputs of `backward`, by `eager`: the kernel has no second derivative."""
    grad, *tensors = ctx.saved_tensors
    call = ctx.call._replace(**dict(zip(TENSORS, tensors, strict=True)))
    asked = {**dict.fromkeys(CONTENT, True), **dict(zip(IF_WANTED, ctx.wanted, strict=True))}
    given = {name: x for name in WITH_GRADIENT if (x := getattr(call, name)) is not None}
    pulled = {name: x for name, x in zip(WITH_GRADIENT, pulls, strict=True)
              if x is not None and name in given and asked[name]}  # fmt: skip
    kept = None
    if call.dropout:
        kept = _launch(call, True, ctx.consecutive, lambda launch: launch.kept()).kept().double() / (1 - call.dropout)
    of_grad, found = second_gradients(grad, given, pulled, lambda now: output_of_call(call, now, kept))
    named: dict[str, Any] = {name: x.to(given[name].dtype) for name, x in found.items()}
    return of_grad.to(grad.dtype), None, None, None, None, *NO_GRADIENTS._replace(**named)


def _hidden_from_compiler(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel as a function that torch.compile does not trace; see `fused`."""
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
    """Defines an operator for CUDA, and CPUs in the interpreter, with its shapes for torch.compile."""
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, ("cuda", "cpu"), _hidden_from_compiler(kernel))
    torch.library.register_fake(name, fake)


_define("locant::triton_attend", f"(bool consecutive, {SCHEMA}) -> (Tensor, Tensor)", _forward, _forward_fake)
_define(
    "locant::triton_attend_backward",
    f"(Tensor grad, Tensor out, Tensor lse, bool[] wanted, bool consecutive, {SCHEMA}) -> Tensor[]",
    _backward,
    _backward_fake,
)
torch.library.register_autograd("locant::triton_attend", _gradient, setup_context=_save)
torch.library.register_autograd("locant::triton_attend_backward", _second_gradient, setup_context=_save_backward)
forward = torch.ops.locant.triton_attend.default
backward = torch.ops.locant.triton_attend_backward.default
