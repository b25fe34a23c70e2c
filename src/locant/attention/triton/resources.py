"""Compiles the kernels for a GPU that is not there, and reads off what they take: registers, spills, shared memory.

Triton compiles to the machine code of a GPU without a GPU or a driver. The tools that come with it read that code.
None of these numbers is a time.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from locant.attention.fused_call import TABLES
from locant.attention.triton import kernels
from locant.attention.triton.blocks import Blocks, choose_blocks
from locant.attention.triton.kernels.records import Factors, Form, Mask, Positions, Rows, Sizes, Table

CAPABILITIES = (90, 80, 100)
"""Of the H100, the A100 and the B200."""
KERNELS = ("forward", "backward_queries", "backward_keys")

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "gain": {"gain": 1, "far": True},
    "query and value (shaw)": {"query": True, "value": True, "far": True},
    "query and key (huang4)": {"query": True, "key": True, "far": True},
    "side vectors of 16 (inkling)": {"query": True, "raw_q": True, "query_width": 16, "temperature": True, "far": True},
    "levels (fox)": {"query_level": True, "key_level": True},
    "vector gain (huang3)": {"gain": 2, "far": True},
    "bias with positions and a mask": {"bias": True, "consecutive": False, "far": True, "mask": True, "guarded": True},
    "softcap and sinks": {"softcap": True, "sinks": True},
    "bias and dropout": {"bias": True, "dropout": True},
}
"""The main configurations, as fields of `Form` that differ from a plain causal call."""


@dataclass(frozen=True)
class Resources:
    """What one program of a compiled kernel takes."""

    registers: int  # per thread
    spills: int  # bytes per thread that do not fit into registers: local memory
    shared: int  # bytes per program
    tensor_core: int  # tensor-core instructions in the code
    seconds: float  # that the compiler took


def form_of(configuration: dict[str, Any], width: int, blocks: Blocks, kernel: str) -> Form:
    """The form of a causal call in bfloat16 with terms of a configuration, with gradients for all tables."""
    own = {name: configuration.get(name, width) for name in ("query_width", "key_width")}
    base = Form(
        block_m=blocks.queries, block_n=blocks.keys, band=triton.next_power_of_2(blocks.queries + blocks.keys - 1),
        width=width, width_block=width, value_width=width, value_block=width,
        query_width=own["query_width"], query_block=max(16, own["query_width"]),
        key_width=own["key_width"], key_block=max(16, own["key_width"]),
        dtype=tl.bfloat16, table_dtype=tl.bfloat16, table_precision="ieee", interpreted=False, consecutive=True,
        far=False, lowest=False, highest=True, mask=False, guarded=False, bias=False, gain=0,
        query=False, key=False, value=False,
        raw_q=False, raw_k=False, query_level=False, key_level=False, level=False, temperature=False, softcap=False,
        sinks=False, dropout=False, again=blocks.again, scratch=False,
    )  # fmt: skip
    form = base._replace(**configuration)
    vectors = form.query or form.key or form.value
    if kernel != "backward_queries":
        return form._replace(scratch=vectors)
    grads: dict[str, Any] = {f"grad_{name}": bool(getattr(form, name)) for name in TABLES}
    return form._replace(**grads, scratch=vectors or any(grads.values()))


def blocks_of(configuration: dict[str, Any], width: int, capability: int, kernel: str) -> Blocks:
    """The blocks that a call of this configuration would take."""
    kind = "numbers"
    if configuration.get("mask") or configuration.get("dropout"):
        kind = "pairs"
    if any(configuration.get(name) for name in ("query", "key", "value")) or configuration.get("gain") == 2:
        kind = "vectors"
    return choose_blocks(width, kind, 2, capability, kernel)


def _signature(kernel: Any, form: Form) -> tuple[dict[str, Any], dict[Any, Any]]:
    """The types of the arguments, and the constants among them."""
    rows, table = Rows("*bf16", "i32", "i32", "i32"), Table("*fp32", "i32")
    wide = Rows("*fp32", *rows[1:])
    used: dict[str, Any] = {
        "q": rows, "k": rows, "v": rows, "grad": rows, "dq": rows, "dk": rows, "dv": rows,
        "raw_q": wide if form.raw_q else None, "raw_k": wide if form.raw_k else None,
        "draw_q": wide if form.raw_q else None, "draw_k": wide if form.raw_k else None, "out": wide,
        "lse": "*fp32", "delta": "*fp32", "seed": "i64", "limit": "i64",
        "scratch": "*fp32" if form.scratch else None,
        "query_level": "*fp32" if form.query_level else None, "dquery_level": "*fp64" if form.query_level else None,
        "key_level": "*fp32" if form.key_level else None, "dkey_level": "*fp64" if form.key_level else None,
        "temperature": "*fp32" if form.temperature else None, "dtemperature": "*fp64" if form.temperature else None,
        "sinks": "*fp32" if form.sinks else None,
        "q_pos": None if form.consecutive else Positions("*i64", "i32"),
        "k_pos": None if form.consecutive else Positions("*i64", "i32"),
        "mask": Mask("*u8", "i32", "i32", "i32", "i32") if form.mask else None,
        "n": Sizes(*["i32"] * len(Sizes._fields)), "f": Factors("fp32", "fp32", "fp32"),
    }  # fmt: skip
    for name in TABLES:
        kind = Table("*bf16", "i32") if name in ("query", "key", "value") else table
        used[name] = kind if getattr(form, name) else None
        used[f"d{name}"] = "*fp32" if getattr(form, f"grad_{name}") else None
    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    for name in kernel.arg_names:
        given = form if name == "C" else used[name]
        if name == "C" or given is None:
            signature[name], constants[name] = "constexpr", given
        else:
            signature[name] = given
    return signature, constants


def compile_kernel(name: str, form: Form, blocks: Blocks, capability: int) -> Resources:
    """Compiles a kernel for a GPU of a compute capability, and reads off its resources."""
    kernel = getattr(kernels, name)
    signature, constants = _signature(kernel, form)
    attributes = {path: [["tt.divisibility", 16]] for path in _aligned(kernel, signature)}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": blocks.warps, "num_stages": 1 if form.scratch else blocks.stages}
    start = time.perf_counter()
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    seconds = time.perf_counter() - start
    registers, spills = measure(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    tensor_core = len(re.findall(r"^\s*(?:@\S+\s+)?(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", ptx, re.MULTILINE))
    return Resources(registers, spills, compiled.metadata.shared, tensor_core, seconds)


def measure(cubin: bytes) -> tuple[int, int]:
    """The registers of a thread, and the bytes that it spills, from machine code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _tool("cuobjdump", "-res-usage", str(path))
    registers, stack, local = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    return registers, max(stack, local)


def _aligned(kernel: Any, signature: dict[str, Any]) -> list[tuple[int, ...]]:
    """The paths of pointers and row strides: PyTorch aligns memory, and head sizes are multiples of 16."""
    found: list[tuple[int, ...]] = []
    for at, name in enumerate(kernel.arg_names):
        kind = signature[name]
        if isinstance(kind, str):
            found += [(at,)] if kind.startswith("*") else []
        elif isinstance(kind, Rows):
            found += [(at, i) for i in range(len(kind))]
        elif isinstance(kind, tuple):
            found += [(at, i) for i, each in enumerate(kind) if isinstance(each, str) and each.startswith("*")]
    return found


def _tool(name: str, *arguments: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=True).stdout
