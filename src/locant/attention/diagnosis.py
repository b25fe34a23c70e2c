"""Which parts of attention work on this machine, and why the others do not: `locant doctor`."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata

import torch

from locant.attention import triton, verification
from locant.attention.build import Built, build, cache_folder
from locant.attention.choice import choose
from locant.attention.request import prepare
from locant.spec import scheme

SITUATIONS = {
    "reading": (64, torch.float32, False),
    "training": (64, torch.float32, True),
    "in bfloat16": (64, torch.bfloat16, True),
    "in float64": (64, torch.float64, True),
    "decoding": (1, torch.float32, False),
}
"""By name: the number of queries over 64 keys, the dtype, and whether gradients are needed."""


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    name: str
    active: bool | None  # None for a fact that is neither good nor bad
    detail: str


def diagnose() -> list[Finding]:
    """Versions, and every back end: whether it works here, and if not, the reason."""
    gpu = torch.cuda.is_available()
    return [
        Finding("python", None, f"{platform.python_version()} on {platform.platform()}"),
        Finding("torch", None, f"{torch.__version__}, {torch.get_num_threads()} threads"),
        Finding("GPU", None, torch.cuda.get_device_name() if gpu else "none that torch can use"),
        *_diagnose_kernel(),
        _diagnose_triton(gpu),
        Finding("sdpa", True, "torch's own kernel; a bias is a view; no softcap, no sinks"),
        Finding("flex", gpu, "for GPUs" if gpu else "for GPUs; here only forward, to compare with"),
        Finding("eager", True, "the reference; it runs everywhere"),
    ]


def _diagnose_kernel() -> list[Finding]:
    built = build()
    if built.library is None:
        return [Finding("fused", False, f"{built.why}. Without it attention with vectors is slow, but right.")]
    how = f"built in {built.seconds:.1f} s" if built.seconds else "built before"
    lanes, threads = built.library.locant_lanes(), "threads" if "-fopenmp" in built.command else "no threads"
    return [
        Finding("fused", True, f"{how} with `{built.command}`: {lanes} lanes, {threads}"),
        Finding("its library", None if built.path else False, str(built.path or built.why)),
        Finding("cache folder", False if built.trouble else None, _diagnose_cache(built)),
    ]


def _diagnose_triton(gpu: bool) -> Finding:
    missing = triton.missing()
    if missing is not None:
        return Finding("triton", False, missing)
    if gpu:
        unable = triton.missing_gpu(torch.cuda.current_device())
        if unable is not None:
            return Finding("triton", False, unable)
        found = verification.verdict(torch.device("cuda", torch.cuda.current_device()))
        how = found.detail if found.agrees else f"impl='auto' does not take it: {found.detail}"
        return Finding("triton", found.agrees, f"triton {metadata.version('triton')}, our kernels for GPUs; {how}")
    interpreted = triton.missing_interpreter() is None
    return Finding(
        "triton", interpreted, "interpreted, to test it" if interpreted else triton.missing_interpreter() or ""
    )


def _diagnose_cache(built: Built) -> str:
    """The cache folder; if it is not used, why, what happens instead, and what to do."""
    folder = str(cache_folder() or "none")
    if not built.trouble:
        return folder
    instead = f"{built.path.parent} is used instead" if built.path else "every process builds the kernel again"
    return f"{folder} is not used: {built.trouble}. {instead}. Mend it, or set LOCANT_CACHE to a folder of your own"


def choices() -> dict[str, dict[str, str]]:
    """The back end that impl="auto" takes on this machine: by scheme, in each of `SITUATIONS`."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    table: dict[str, dict[str, str]] = {}
    for spec in ("rope", "tisa", "huang4:clip=64", "huang3:clip=64", "shaw:clip=64", "cope"):
        built = scheme(spec, n_heads=2, head_dim=16, d_model=32).to(kind)
        row = table[spec] = {}
        for situation, (queries, dtype, train) in SITUATIONS.items():
            q = torch.zeros(1, 2, queries, 16, dtype=dtype, device=kind, requires_grad=train)
            k = torch.zeros(1, 2, 64, 16, dtype=dtype, device=kind, requires_grad=train)
            with torch.set_grad_enabled(train):
                row[situation] = choose(prepare(q, k, k, built, causal=True), "auto").name
    return table
