"""Takes oneDNN instead of MKL for float32 matrix products on AMD.

PyTorch takes MKL, which is slow on processors of AMD; oneDNN, which PyTorch has too, is about twice as fast there
(docs/log.md). The precision "medium" selects oneDNN. It also permits rounding to bfloat16, so it is set only on
AMD, only without CUDA, where it has another meaning, and only if test products are exact.
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
    """Computes the products of the block with oneDNN where `takes_onednn` says so.

    The setting belongs to the process. If it is not "highest" on entry, the caller has chosen it, and nothing is done.
    Otherwise it is "highest" again when the last block has ended.
    """
    global _inside
    with _lock:
        taken = _inside > 0 or (_unchanged() and takes_onednn())
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
def takes_onednn() -> bool:
    """Whether to take oneDNN: an AMD processor, PyTorch with MKL and without CUDA, and exact test products.

    Nothing is timed: a run that resumes must come to the same answer.
    """
    if torch.cuda.is_available() or not torch.backends.mkl.is_available() or "AuthenticAMD" not in _processor():
        return False
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        return not any(_rounds(*sizes) for sizes in TEST_SIZES)
    finally:
        torch.set_float32_matmul_precision(before)


def _unchanged() -> bool:
    """Whether the caller has left the precision of products as it is."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # the caller has set the precision of one library
        return False


def _processor() -> str:
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return ""


def _rounds(rows: int, inner: int, columns: int) -> bool:
    """Whether products lose digits, in any of the layouts that a layer and its gradients have."""
    # Every product and sum is exact in float32, which has 24 bits; bfloat16 has 8 and rounds 1 + 2⁻¹¹ to 1.
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
