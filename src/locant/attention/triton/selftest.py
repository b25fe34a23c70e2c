"""What a person with a GPU runs once: are the kernels right on this device, and how fast are they?

Equality first: outputs and gradients against `eager` in float64. Then the ratio of times to plain attention of PyTorch
on the same tensors, for our kernels, FlexAttention and, if it is installed, flash-attn with ALiBi.

Without a GPU the equality part runs in Triton's interpreter (TRITON_INTERPRET=1), with short sequences: every scheme in
float32, and two of them in half precision. Nothing is timed there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.attention import triton
from locant.attention.attend import attend
from locant.attention.choice import BACKENDS
from locant.attention.request import prepare
from locant.attention.verification import TOLERANCE
from locant.schemes.base import Scheme
from locant.spec import scheme

SCHEMES = ("nope", "rope", "tisa", "alibi", "huang1:clip=64", "huang3:clip=8", "huang4:clip=64", "shaw:clip=64", "xl")
TIMED = ("nope", "alibi", "tisa", "huang1:clip=64", "huang4:clip=64", "shaw:clip=64")
HALF_INTERPRETED = ("tisa", "shaw:clip=64")
"""The schemes that the interpreter also computes in half precision: it takes seconds for each."""
SIZES, SIZES_INTERPRETED = (2, 4, 2, 300, 333, 64), (1, 2, 1, 17, 18, 8)
"""Sequences, heads, key/value heads, queries, keys, head size: several tiles in both cases."""
REPETITIONS = 20


@dataclass(frozen=True)
class Comparison:
    """A scheme in a dtype, and the largest error of its output and gradients."""

    name: str
    dtype: torch.dtype
    error: float  # relative to the largest number of each result

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; not for NaN."""
        return self.error <= TOLERANCE[self.dtype]


def selftest(length: int) -> int:
    """Prints the comparisons and times. Returns 0 if all comparisons passed."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    if not gpu:
        why = triton.missing_interpreter()
        if why is not None:
            print(f"No GPU that torch can use. Set TRITON_INTERPRET=1 to compare tiny calls in the interpreter. {why}")
            return 1
        print("No GPU that torch can use: tiny calls in Triton's interpreter. No time is measured.")
    found = []
    for dtype in TOLERANCE:
        for name in SCHEMES if gpu or dtype == torch.float32 else HALF_INTERPRETED:
            each = compare(name, dtype, SIZES if gpu else SIZES_INTERPRETED, device)
            found.append(each)
            verdict = "ok" if each.passed else "WRONG"
            print(f"{each.name:20} {_short(each.dtype):9} error {each.error:.1e}  {verdict}", flush=True)
    wrong = [each for each in found if not each.passed]
    print(f"{len(found) - len(wrong)} of {len(found)} comparisons with eager in float64 passed.")
    line = f"locant {metadata.version('locant')}, torch {torch.__version__}, {len(wrong)} of {len(found)} wrong"
    if gpu:
        table = times(length, device)
        print(
            f"Time of forward and backward over that of plain causal attention of PyTorch, {length} tokens, bfloat16:"
        )
        for name, row in table.items():
            print(f"{name:20} " + "  ".join(f"{impl} {ratio:.2f}" for impl, ratio in row.items()))
        worst = max(row["triton"] for row in table.values())
        line += f", {torch.cuda.get_device_name()}, {length} tokens, at most {worst:.2f} × sdpa"
    else:
        line += ", in Triton's interpreter, nothing timed"
    print(f"For an issue: {line}")
    return 1 if wrong else 0


def compare(
    name: str, dtype: torch.dtype, sizes: tuple[int, int, int, int, int, int], device: torch.device
) -> Comparison:
    """Compares a causal call of our kernels with `eager` in float64: the output and every gradient."""
    b, h, kv, lq, lk, d = sizes
    torch.manual_seed(0)
    ours = scheme(name, n_heads=h, head_dim=d, d_model=h * d)
    with torch.no_grad():
        for x in ours.parameters():  # gains start at 1, where a kernel without gains would be right
            x.normal_(std=0.5)
    ours = ours.to(device)
    leaves = [torch.randn(b, heads, n, d, device=device).to(dtype) for heads, n in ((h, lq), (kv, lk), (kv, lk))]
    grad = torch.randn(b, h, lq, d, device=device).to(dtype)
    found = _results("triton", ours, leaves, grad)
    truth = _results("eager", copy.deepcopy(ours).double(), [x.double() for x in leaves], grad.double())
    errors = [
        float((x.double() - y).abs().max() / y.abs().max().clamp(min=1e-3)) for x, y in zip(found, truth, strict=True)
    ]
    return Comparison(name, dtype, float(torch.tensor(errors).max()))


def _results(impl: str, by: Scheme, tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
    q, k, v = (x.detach().clone().requires_grad_() for x in tensors)
    out = attend(q, k, v, by, causal=True, impl=impl)
    return [out.detach(), *torch.autograd.grad(out, [q, k, v, *by.parameters()], grad)]


def times(length: int, device: torch.device) -> dict[str, dict[str, float]]:
    """By scheme and implementation: the time of a forward and backward pass over that of plain causal attention."""
    b, h, d = 4, 16, 64
    q, k, v = (torch.randn(b, h, length, d, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    plain = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    table: dict[str, dict[str, float]] = {}
    for name in TIMED:
        by = scheme(name, n_heads=h, head_dim=d).to(device)
        row = table[name] = {}
        for impl in ("triton", "flex"):
            if BACKENDS[impl].unsupported(prepare(q, k, v, by, causal=True)) is None:
                row[impl] = seconds(partial(attend, q, k, v, by, causal=True, impl=impl)) / plain
        if name == "alibi" and find_spec("flash_attn") is not None:
            row["flash-attn"] = seconds(_flash_alibi(q, k, v)) / plain
    return table


def _flash_alibi(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    import flash_attn

    heads = q.shape[1]
    slopes = torch.tensor([2 ** (-8 * (i + 1) / heads) for i in range(heads)], device=q.device)
    function: Any = flash_attn.flash_attn_func

    def run() -> Tensor:
        out: Tensor = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, alibi_slopes=slopes)
        return out

    return run


def seconds(forward: Callable[[], Tensor]) -> float:
    """The median time of a forward and backward pass on the GPU."""
    found: list[float] = []
    grad = torch.ones_like(forward())
    for _ in range(REPETITIONS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        forward().backward(grad)
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1000)
    return sorted(found[3:])[REPETITIONS // 2]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
