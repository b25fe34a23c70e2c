"""The gradient of the gradient of the fused kernel, which has none itself: computed by `eager`, in float64.

The kernel returns g = ∂(G · out)/∂x for its inputs x, given the gradient G of the output. For a gradient γ of g,

    ∂(γ · g)/∂x  and  ∂(γ · g)/∂G

come from differentiating the equations of `eager` twice. The memory is that of all logits, [B, H, Lq, Lk], and more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from locant.attention import eager
from locant.attention.fused_call import NUMBERS, TABLES, Call
from locant.attention.offsets import Offsets
from locant.attention.request import Request
from locant.schemes.nope import Nope
from locant.terms import Far, Sides, Terms

WIDE = torch.float64


def second_gradients(
    grad: Tensor,
    given: Mapping[str, Tensor],
    pulls: Mapping[str, Tensor],
    output: Callable[[dict[str, Tensor]], Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradients of `grad` and of every input, from those of the first gradients.

    grad    the gradient of the output that the first gradients were computed with.
    given   the differentiable inputs, by name.
    pulls   the gradients of the first gradients, by the name of the input; inputs without one are not in it.
    output  computes the output from the inputs.
    """
    again = torch.is_grad_enabled()  # a third derivative may follow

    def leaf(x: Tensor) -> Tensor:
        # A new tensor: `pulls` may depend on x too, and that part of the derivative is not ours.
        return x.view_as(x) if again and x.requires_grad else x.detach().requires_grad_()

    with torch.enable_grad():
        leaves, above = {name: leaf(x) for name, x in given.items()}, leaf(grad)
        out = output({name: x.to(WIDE) for name, x in leaves.items()})
        first = torch.autograd.grad(
            out, [leaves[name] for name in pulls], above.to(out.dtype), create_graph=True, allow_unused=True
        )
        total = out.new_zeros(())
        for x, pull in zip(first, pulls.values(), strict=True):
            total = total if x is None else total + (x.to(WIDE) * pull.to(WIDE)).sum()
        found = torch.autograd.grad(
            total, [above, *leaves.values()], create_graph=again, allow_unused=True, materialize_grads=True
        )
    return found[0], dict(zip(leaves, found[1:], strict=True))


def output_of_call(call: Call, tensors: Mapping[str, Tensor], kept: Tensor | None) -> Tensor:
    """The output [B, H, Lq, Dv] of a call of the kernel, by the equations of `eager`.

    call     the arguments of the kernel.
    tensors  its differentiable fields, by name.
    kept     [B, H, Lq, Lk], the factors of the weights under dropout; None without dropout.
    """
    tables: dict[str, Any] = {name: tensors.get(name) for name in TABLES}
    numbers: dict[str, Any] = {name: tensors.get(name) for name in NUMBERS}
    terms = Terms(**tables)
    columns = next((x.shape[1] for x in terms.tables().values()), 1)
    request = Request(
        q=tensors["q"], k=tensors["k"], v=tensors["v"], scheme=Nope(), terms=terms,
        offsets=Offsets(call.first_offset, columns, call.q.device), rotated=(tensors["q"], tensors["k"]),
        sides=Sides(**numbers), far=None, positions=(call.q_pos, call.k_pos), mask=call.mask, additive=None,
        causal=False, window=(None, None), limits=(call.lowest, call.highest), scale=call.scale, softcap=call.softcap,
        sinks=tensors.get("sinks"), dropout=0.0, need_weights=False,
    )  # fmt: skip
    groups = call.q.shape[1] // call.k.shape[1]
    keys = {
        name: tensors[name].repeat_interleave(groups, dim=1)
        for name in ("k", "v", "raw_k", "distant")
        if name in tensors
    }
    raw_q, raw_k = tensors.get("raw_q", tensors["q"]), keys.get("raw_k", keys["k"])
    far = Far(call.distance, tensors["left"], tensors["right"], keys["distant"]) if "distant" in tensors else None
    content = eager.Content(tensors["q"], keys["k"], far)
    out, _ = eager.attend_rows(request, slice(None), raw_q, raw_k, keys["v"], content, kept=kept)
    return out
