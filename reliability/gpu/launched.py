"""What calls of `attend` would launch on a GPU that is not there, compiled and not run.

`compiled.py` compiles kernels from types that it writes down. Here the arguments are those of real calls, and Triton
itself finds their types: it compiles sizes and strides of 1 as constants, None as another, and numbers beyond 2³¹ as
64-bit integers. The interpreter does none of this. A kernel that needs more shared memory than the GPU has raises
Triton's own error, so that a call takes smaller tiles as it would there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import locant
from locant.attention import triton as ours

SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that a program may take, by compute capability."""


@dataclass(frozen=True)
class Launched:
    """A kernel that a call would have launched."""

    kernel: str
    queries: int  # the sizes of its tiles
    keys: int
    registers: int
    spills: int
    shared: int


class _Driver:
    """The driver of a GPU of a compute capability, as far as compiling asks for it."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


@contextmanager
def launching(capability: int) -> Iterator[list[Launched]]:
    """Calls with impl="triton" on CPU tensors compile their kernels, and do not run them. Their results are no numbers.

    One capability in a process: Triton keeps the target with its compiled kernels. Triton is imported here, because a
    process in which it is imported before TRITON_INTERPRET is set cannot interpret.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.errors import OutOfResources
    from triton.runtime.jit import JITFunction

    from locant.attention.triton.resources import measure

    found: list[Launched] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = run(kernel, *arguments, grid=grid, warmup=True, **options)
        if compiled.metadata.shared > SHARED[capability]:
            raise OutOfResources(compiled.metadata.shared, SHARED[capability], "shared memory")
        registers, spills = measure(compiled.asm["cubin"])
        form = options.get("C")
        sizes = (0, 0) if form is None else (form.block_m, form.block_n)
        found.append(Launched(kernel.__name__, *sizes, registers, spills, compiled.metadata.shared))

    triton.runtime.driver.set_active(_Driver(GPUTarget("cuda", capability, 32)))
    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(capability, 10)),
        mock.patch.object(ours, "missing_interpreter", return_value=None),
    ):
        yield found


@dataclass(frozen=True)
class Case:
    """A call of `attend`. Numbers do not matter, only shapes."""

    scheme: str
    dtype: torch.dtype = torch.bfloat16
    sizes: tuple[int, int, int, int, int] = (2, 4, 2, 100, 120)  # sequences, heads, key/value heads, queries, keys
    width: int = 64
    value_width: int | None = None
    how: tuple[str, ...] = ("causal",)
    twice: bool = False  # second derivatives too


ONES = (1, 1, 1, 1, 1)
CASES = {
    "one of everything": Case("tisa", sizes=ONES),
    "one of everything, positions and a mask": Case("shaw:clip=3", sizes=ONES, how=("positions", "mask", "sinks")),
    "one query, dropout": Case("tisa", sizes=(1, 1, 1, 1, 50), how=("dropout",)),
    "bias and gain": Case("tisa+huang1:clip=64", width=128),
    "bias, gain and levels": Case("tisa+huang1:clip=64+fox", width=128),
    "vectors in float16": Case("shaw:clip=64", torch.float16, width=128),
    "vectors in float32": Case("shaw:clip=64", torch.float32, width=128),
    "vectors of 256 numbers": Case("shaw:clip=64+huang4:clip=64", width=256),
    "side vectors beside vectors": Case("huang4:clip=64+inkling:extent=9,width=16", width=128),
    "plain, 256 numbers in float32": Case("nope", torch.float32, width=256),
    "vector gain, 256 numbers in float32": Case("huang3:clip=8", torch.float32, width=256),
    "scattered positions in float32": Case("huang4:clip=9", torch.float32, how=("positions", "mask")),
    "odd widths": Case("huang4:clip=9", width=20, value_width=5),
    "second derivatives under dropout": Case("nope", how=("dropout",), twice=True),
}
"""Calls whose arguments or needs differ from those of `resources.CONFIGURATIONS`."""


def launch(case: Case, capability: int) -> list[Launched]:
    """The kernels of a call and of its gradients."""
    b, h, kv, lq, lk = case.sizes
    by = locant.scheme(case.scheme, n_heads=h, head_dim=case.width, d_model=h * case.width)
    how: dict[str, Any] = {
        **({"causal": True} if "causal" in case.how else {}),
        **({"dropout": 0.3} if "dropout" in case.how else {}),
        **({"sinks": torch.zeros(h), "softcap": 3.0} if "sinks" in case.how else {}),
        **({"mask": torch.ones(b, h, lq, lk, dtype=torch.bool)} if "mask" in case.how else {}),
        **({"q_pos": torch.randperm(lq), "k_pos": torch.randperm(lk)} if "positions" in case.how else {}),
        **({"x": torch.zeros(b, lk, h * case.width)} if by.reads else {}),
    }
    widths = (case.width, case.width, case.value_width or case.width)
    q, k, v = (
        torch.zeros(b, heads, length, width, dtype=case.dtype, requires_grad=True)
        for heads, length, width in zip((h, kv, kv), (lq, lk, lk), widths, strict=True)
    )
    with launching(capability) as found:
        out = locant.attend(q, k, v, by, impl="triton", **how)
        grads = torch.autograd.grad(out.sum(), [q, k, v, *by.parameters()], create_graph=case.twice)
        if case.twice:
            torch.autograd.grad(grads[0].sum(), [q, k, v])
    return found
