"""Matrix products of float32 at the speed of the processor.

PyTorch computes them with MKL, which is slow on processors of AMD; oneDNN, which PyTorch has too, is about twice as
fast there. PyTorch takes oneDNN if the precision "medium" is set. That setting permits rounding to bfloat16, so it is
used only where a test shows that nothing is rounded: on AMD, and without CUDA, for which it has another meaning.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

TEST_SIZES = ((64, 64, 64), (512, 128, 512), (1024, 384, 384))
"""Products that must be exact with "medium"."""
_lock = threading.Lock()
_inside = 0


@contextmanager
def fast_products() -> Iterator[None]:
    """Lets PyTorch compute the products of the block with oneDNN where this is faster and as exact.

    The setting belongs to the process. It is left alone if the caller has changed it.
    """
    global _inside
    with _lock:
        taken = _inside > 0 or (torch.get_float32_matmul_precision() == "highest" and is_faster())
        if taken:
            _inside += 1
            torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        if taken:
            with _lock:
                _inside -= 1
                if _inside == 0:
                    torch.set_float32_matmul_precision("highest")


@cache
def is_faster() -> bool:
    """Whether oneDNN computes products of float32 on this machine faster than MKL, and without rounding."""
    if torch.cuda.is_available() or not torch.backends.mkl.is_available() or "AuthenticAMD" not in _processor():
        return False
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        return not any(_rounds(*sizes) for sizes in TEST_SIZES)
    finally:
        torch.set_float32_matmul_precision(before)


def _processor() -> str:
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return ""


def _rounds(rows: int, inner: int, columns: int) -> bool:
    """Whether products lose digits, in any of the layouts that a layer and its gradients have."""
    # Every product and sum is exact in float32, which has 24 bits; bfloat16 has 8 and drops the 2⁻¹¹.
    left = torch.full((rows, inner), 1 + 2.0**-11, dtype=torch.float32)
    right = torch.ones(inner, columns, dtype=torch.float32)
    exact = inner * (1 + 2.0**-11)
    found = [
        left @ right,
        right.T @ left.T,
        left @ right.T.contiguous().T,
        torch.addmm(torch.zeros_like(right[0]), left, right),
        torch.bmm(left[None], right[None]),
    ]
    return any(not bool((each == exact).all()) for each in found)
