"""Whether the Triton kernels are right on a GPU: `auto` compares them with `eager` there before it takes them.

Nobody can test the kernels on every GPU, and a wrong result would be silent. So before `auto` gives the first call on a
device to `triton`, it computes the small calls in `CHECKS` there: output and every gradient, twice. They must agree
with `eager` in float64. Both times must give the same bits, because a race between threads shows in the bits. The
verdict is kept for the process. Triton keeps compiled kernels on disk, so later processes do not compile them again.

The kernels of these checks are not those of every call. `python -m locant.attention.triton --selftest` compares more.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from locant.attention import triton
from locant.attention.fused_call import IF_WANTED, WITH_GRADIENT, Call, make_call
from locant.attention.operators import Operators
from locant.attention.request import prepare
from locant.attention.second_order import output_of_call
from locant.schemes.alibi import Alibi
from locant.schemes.base import Scheme
from locant.schemes.huang import Huang1, Huang3, Huang4
from locant.schemes.shaw import Shaw
from locant.schemes.sum import Sum
from locant.schemes.tisa import Tisa

TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 4e-2, torch.float16: 8e-3}
"""Of the largest number of a result: products in half precision round their operands."""
HEADS, KV_HEADS, WIDTH = 4, 2, 64
QUERIES, KEYS = 140, 150
"""Several tiles of every size in `blocks.py`, and partial ones at the ends."""


class Check(NamedTuple):
    """A small call."""

    schemes: Callable[[], tuple[Scheme, ...]]  # their sum; parameters are replaced by random numbers
    dtype: torch.dtype
    how: dict[str, Any]  # arguments of `attend`; "packed" stands for the positions and the mask of packed sequences


def _numbers() -> tuple[Scheme, ...]:
    return Tisa(n_heads=HEADS), Huang1(clip=20, n_heads=HEADS)


def _vectors() -> tuple[Scheme, ...]:
    shaw = Shaw(clip=20, n_heads=HEADS, head_dim=WIDTH)
    return shaw, Huang4(clip=9, heads="own", n_heads=HEADS, head_dim=WIDTH)


def _vector_gain() -> tuple[Scheme, ...]:
    return Huang3(clip=3, n_heads=HEADS, head_dim=WIDTH), Alibi(n_heads=HEADS)


CHECKS = {
    "bias and gain": Check(_numbers, torch.bfloat16, {"causal": True}),
    "bias and gain, packed sequences": Check(_numbers, torch.float32, {"packed": True}),
    "query, key and value vectors": Check(_vectors, torch.float32, {"causal": True}),
    "the same in float16, window": Check(_vectors, torch.float16, {"window": (70, 9)}),
    "vector gain, softcap, dropout": Check(
        _vector_gain, torch.bfloat16, {"softcap": 5.0, "dropout": 0.3, "causal": True}
    ),
}


@dataclass(frozen=True)
class Verdict:
    """Whether `auto` may take `triton` on a device, and why."""

    agrees: bool
    detail: str


class Difference(NamedTuple):
    """The largest error of a check, relative to the largest number of the result it is in."""

    error: float  # infinite for a result that is not finite, or not the same every time
    allowed: float
    check: str


def agrees(kind: str, index: int | None) -> bool:
    """Whether `auto` may take `triton` on a device, such as ("cuda", 0). The first call warns if it may not."""
    device = torch.device(kind) if index is None else torch.device(kind, index)
    if device not in _verdicts and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False  # a graph that is being captured has no room for these calls; the next call verifies
    return verdict(device).agrees


# The effect of torch.compiler.assume_constant_result, which would import the whole compiler: two seconds.
agrees._dynamo_marked_constant = True  # type: ignore[attr-defined]

_verdicts: dict[torch.device, Verdict] = {}
_lock = threading.Lock()


def verdict(device: torch.device) -> Verdict:
    """The verdict about a device, from the first time on that somebody asks in this process."""
    with _lock:
        if device not in _verdicts:
            found = _verdicts[device] = _verify(device)
            if not found.agrees:
                warnings.warn(f"impl='auto' does not take 'triton' on {device}: {found.detail}", stacklevel=2)
        return _verdicts[device]


def _verify(device: torch.device) -> Verdict:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Verdict(False, "TRITON_INTERPRET=1 is set, and Triton's interpreter is slow")
    try:
        found = differences(triton.OPERATORS, device)
    except Exception as problem:  # of the compiler, the driver or the kernels: whatever it is, they cannot be used
        return Verdict(False, f"its kernels do not run: {type(problem).__name__}: {problem}")
    worst = max(found, key=lambda each: each.error / each.allowed)
    error = f"{worst.error:.1e} of the largest number ({worst.check})"
    if worst.error <= worst.allowed:
        return Verdict(True, f"compared with eager on {device}, the largest error is {error}")
    what = f"its results differ from those of eager, or from call to call: the largest error is {error}"
    return Verdict(False, f"{what}, {worst.allowed:.0e} is allowed. Please report it, with the GPU and its driver")


def differences(operators: Operators, device: torch.device) -> list[Difference]:
    """The largest error of each check.

    The checks run in a thread of their own: inference mode, autocast, default devices, transforms and tracing belong to
    the thread that called `attend`. Its random numbers stay as they are.
    """
    found: list[Difference] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                found.extend(_difference(operators, name, device) for name in CHECKS)
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if problems:
        raise problems[0]
    return found


def _difference(operators: Operators, name: str, device: torch.device) -> Difference:
    check = CHECKS[name]
    call = _call(check, device)
    given = {field: x.detach() for field in WITH_GRADIENT if (x := getattr(call, field)) is not None}
    grad = torch.randn(2, HEADS, QUERIES, WIDTH).to(device, check.dtype)
    first, second = (_results(operators, call, given, grad) for _ in range(2))
    kept = operators.kept(call) if call.dropout else None
    leaves = {field: x.double().requires_grad_() for field, x in given.items()}
    out = output_of_call(call, leaves, kept)
    truth = [out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad.double())]
    errors = []
    for x, again, exact in zip(first, second, truth, strict=True):
        error = float((x.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-3))
        errors.append(error if torch.equal(x, again) and error == error else float("inf"))
    if kept is not None:  # within five standard deviations of the share that should stay
        share = float((kept != 0).double().mean())
        spread = (call.dropout * (1 - call.dropout) / kept.numel()) ** 0.5
        errors.append(0.0 if abs(share - (1 - call.dropout)) < 5 * spread else float("inf"))
    return Difference(max(errors), TOLERANCE[check.dtype], name)


def _call(check: Check, device: torch.device) -> Call:
    scheme = Sum(*check.schemes())
    with torch.no_grad():
        for x in scheme.parameters():  # gains start at 1, where a kernel without gains would be right
            x.normal_(std=0.5)
    how = dict(check.how)
    if how.pop("packed", False):
        cut = KEYS // 2
        k_pos = torch.cat([torch.arange(cut), torch.arange(KEYS - cut)]).to(device)
        first = (torch.arange(KEYS) < cut).to(device)
        mask = (first[KEYS - QUERIES :, None] == first)[None, None]
        how |= {"q_pos": k_pos[KEYS - QUERIES :], "k_pos": k_pos, "mask": mask, "causal": True}
    sizes = ((HEADS, QUERIES), (KV_HEADS, KEYS), (KV_HEADS, KEYS))
    q, k, v = (torch.randn(2, heads, length, WIDTH).to(device, check.dtype) for heads, length in sizes)
    return make_call(prepare(q, k, v, scheme.to(device), **how, sinks=torch.randn(HEADS).to(device)))


def _results(operators: Operators, call: Call, given: dict[str, Tensor], grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of what is given."""
    replaced: dict[str, Any] = dict(given)
    call = call._replace(**replaced)
    out, lse = operators.forward(*call)
    grads = operators.backward(grad.to(out.dtype), out, lse, [name in given for name in IF_WANTED], *call)
    return [out, *(x for name, x in zip(WITH_GRADIENT, grads, strict=True) if name in given)]
