"""What of locant is active on this machine, and why: `locant doctor`."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from locant.attention.attend import BACKENDS, choose
from locant.attention.build import build, cache_folder
from locant.attention.request import prepare
from locant.spec import scheme


@dataclass(frozen=True)
class Finding:
    name: str
    active: bool | None  # None: a fact, neither good nor bad
    detail: str


def examine() -> list[Finding]:
    """Versions, and each back end with the reason if it is not there."""
    built = build()
    found = [
        Finding("python", None, f"{platform.python_version()} on {platform.platform()}"),
        Finding("torch", None, f"{torch.__version__}, {torch.get_num_threads()} threads"),
        Finding("GPU", None, torch.cuda.get_device_name() if torch.cuda.is_available() else "none that torch can use"),
    ]
    if built.library is None:
        found.append(Finding("fused", False, f"{built.why}. Without it attention with vectors is slow, not wrong."))
    else:
        how = f"built in {built.seconds:.1f} s" if built.seconds else "built before"
        lanes, threaded = built.library.locant_lanes(), "-fopenmp" in built.command
        found.append(
            Finding("fused", True, f"{how} with `{built.command}`: {lanes} lanes, {'' if threaded else 'not '}threaded")
        )
        found.append(Finding("its library", None, str(built.path)))
    found.append(Finding("cache folder", None, str(cache_folder())))
    found.append(Finding("sdpa", True, "torch's own kernel; a bias is a view"))
    flex = "for GPUs; here it can be compared with, forward only" if not torch.cuda.is_available() else "the GPU path"
    found.append(Finding("flex", torch.cuda.is_available(), flex))
    found.append(Finding("eager", True, "the reference; always there"))
    return found


def choices() -> dict[str, dict[str, str]]:
    """What impl="auto" takes on this machine: by scheme, in each of a few situations."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    table: dict[str, dict[str, str]] = {}
    for spec in ("rope", "tisa", "huang4:clip=64", "huang3:clip=64", "shaw:clip=64", "cope"):
        built = scheme(spec, n_heads=2, head_dim=16, d_model=32).to(kind)
        row = table[spec] = {}
        for situation, (queries, dtype, train) in SITUATIONS.items():
            q = torch.zeros(1, 2, queries, 16, dtype=dtype, device=kind, requires_grad=train)
            k = torch.zeros(1, 2, 64, 16, dtype=dtype, device=kind, requires_grad=train)
            with torch.set_grad_enabled(train):
                chosen = choose(prepare(q, k, k, built, causal=True), "auto")
            row[situation] = next(name for name, backend in BACKENDS.items() if backend is chosen)
    return table


SITUATIONS = {
    "reading": (64, torch.float32, False),
    "training": (64, torch.float32, True),
    "in bfloat16": (64, torch.bfloat16, True),
    "in float64": (64, torch.float64, True),
    "decoding": (1, torch.float32, False),
}
"""Queries out of 64 keys, dtype, and whether gradients are wanted."""
