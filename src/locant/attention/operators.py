"""The operators of our own kernels: one to attend, one for its gradient, with everything that PyTorch asks of them.

`fused` and `triton` compute the same function of the same `Call`, so one class serves both. It registers two operators
of `torch.library` with their shapes for `torch.compile`, and a gradient for every tensor of floating-point numbers. The
gradient of the second operator, a second derivative, is that of `eager`.

Operators take flat arguments: a call is passed as `*call`, and read back as `Call(*arguments)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from locant.attention.fused_call import CONTENT, IF_WANTED, NO_GRADIENTS, SCHEMA, TENSORS, WITH_GRADIENT, Call
from locant.attention.second_order import output_of_call, second_gradients


class Operators:
    """The operators `locant::NAME` and `locant::NAME_backward` of a kernel.

    devices   the types of devices that it runs on.
    compute   compute(call, out, lse) writes the output [B, H, Lq, Dv] and `lse` [B, H, Lq, 2], both in float32: for
              each query the largest logit, and the logarithm of Σ_j exp(logit − largest).
    pull      pull(call, grad, out, lse, grads) writes the gradients of `WITH_GRADIENT` into `grads`, by name. Those
              that are not wanted are empty tensors.
    kept      kept(call) returns the factors of the weights under dropout, [B, H, Lq, Lk], in float64.
    """

    def __init__(
        self,
        name: str,
        devices: tuple[str, ...],
        compute: Callable[[Call, Tensor, Tensor], None],
        pull: Callable[[Call, Tensor, Tensor, Tensor, dict[str, Tensor]], None],
        kept: Callable[[Call], Tensor],
    ) -> None:
        self.compute, self.pull, self.kept = compute, pull, kept
        forward, backward = f"locant::{name}", f"locant::{name}_backward"
        of_gradient = "Tensor grad, Tensor out, Tensor lse, bool[] wanted"
        _define(forward, f"({SCHEMA}) -> (Tensor, Tensor)", devices, self._forward, _forward_fake)
        _define(backward, f"({of_gradient}, {SCHEMA}) -> Tensor[]", devices, self._backward, _backward_fake)
        torch.library.register_autograd(forward, self._gradient, setup_context=_save)
        torch.library.register_autograd(backward, self._second_gradient, setup_context=_save_backward)
        self.forward = getattr(torch.ops.locant, name).default
        """forward(*call) returns the output and `lse`."""
        self.backward = getattr(torch.ops.locant, f"{name}_backward").default
        """backward(grad, out, lse, wanted, *call) returns the gradients of `WITH_GRADIENT`, in that order.

        `wanted` has a flag for each of `IF_WANTED`. A field that is None or not wanted gets an empty tensor.
        """

    def _forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        call = Call(*arguments)
        out, lse = _empty_outputs(call)
        self.compute(call, out, lse)
        return out, lse

    def _backward(self, grad: Tensor, out: Tensor, lse: Tensor, wanted: list[bool], *arguments: Any) -> list[Tensor]:
        call = Call(*arguments)
        grads = _empty_gradients(call, wanted)
        self.pull(call, grad, out, lse, grads)
        return list(grads.values())

    def _gradient(self, ctx: Any, grad: Tensor, _: Any) -> Call:
        """A gradient, or None, for each field of the call."""
        out, lse, *tensors = ctx.saved_tensors
        call = ctx.call._replace(**dict(zip(TENSORS, tensors, strict=True)))
        needed = Call(*ctx.needs_input_grad)
        grads = self.backward(grad, out, lse, [getattr(needed, name) for name in IF_WANTED], *call)
        found: dict[str, Any] = {name: x for name, x in zip(WITH_GRADIENT, grads, strict=True) if getattr(needed, name)}
        return NO_GRADIENTS._replace(**found)

    def _second_gradient(self, ctx: Any, pulls: list[Tensor | None]) -> tuple[Any, ...]:
        """The gradients of the inputs of `backward`, by `eager`: the kernels have no second derivative."""
        grad, *tensors = ctx.saved_tensors
        call = ctx.call._replace(**dict(zip(TENSORS, tensors, strict=True)))
        asked = {**dict.fromkeys(CONTENT, True), **dict(zip(IF_WANTED, ctx.wanted, strict=True))}
        given = {name: x for name in WITH_GRADIENT if (x := getattr(call, name)) is not None}
        pulled = {name: x for name, x in zip(WITH_GRADIENT, pulls, strict=True)
                  if x is not None and name in given and asked[name]}  # fmt: skip
        kept = self.kept(call) if call.dropout else None
        of_grad, found = second_gradients(grad, given, pulled, lambda now: output_of_call(call, now, kept))
        named: dict[str, Any] = {name: x.to(given[name].dtype) for name, x in found.items()}
        return of_grad.to(grad.dtype), None, None, None, *NO_GRADIENTS._replace(**named)


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _empty_outputs(Call(*arguments))


def _empty_outputs(call: Call) -> tuple[Tensor, Tensor]:
    b, h, lq, _ = call.q.shape
    dv, dtype = call.v.shape[3], torch.float32
    # The memory is laid out as [B, Lq, H, Dv], as PyTorch's kernel does it: a model joins the heads next.
    out = call.q.new_empty_strided((b, h, lq, dv), (lq * h * dv, dv, h * dv, 1), dtype=dtype)
    return out, call.q.new_empty(b, h, lq, 2, dtype=dtype)


def _backward_fake(grad: Tensor, out: Tensor, lse: Tensor, wanted: list[bool], *arguments: Any) -> list[Tensor]:
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
    """Saves what the backward pass needs.

    Tensors go through save_for_backward, which detects in-place changes; other values are stored on ctx.
    """
    call = Call(*inputs)
    out, lse = output
    ctx.save_for_backward(out, lse, *(getattr(call, name) for name in TENSORS))
    without_tensors: dict[str, Any] = dict.fromkeys(TENSORS)
    ctx.call = call._replace(**without_tensors)
    ctx.mark_non_differentiable(lse)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Saves the inputs of the backward pass, for a second one."""
    grad, _, _, wanted, *arguments = inputs
    call = Call(*arguments)
    ctx.save_for_backward(grad, *(getattr(call, name) for name in TENSORS))
    without_tensors: dict[str, Any] = dict.fromkeys(TENSORS)
    ctx.call, ctx.wanted = call._replace(**without_tensors), wanted


def _define(
    name: str, schema: str, devices: tuple[str, ...], kernel: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Defines an operator, with its shapes for torch.compile."""
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, devices, _hidden_from_compiler(kernel))
    torch.library.register_fake(name, fake)


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
