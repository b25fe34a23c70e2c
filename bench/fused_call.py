"""One call of the fused kernel, for benchmarks. Shared by falling.py, softcap.py and window.py."""

from collections.abc import Callable
from typing import Any

import torch

import locant


def fused_call(scheme: locant.Scheme, shape: tuple[int, ...], train: bool, **how: Any) -> Callable[[], None]:
    """Returns a function that computes a call of `attend` on random tensors, with its backward pass if `train`."""
    q, k, v = (torch.randn(shape).requires_grad_() for _ in range(3))
    target = torch.randn(shape)

    def run() -> None:
        with torch.set_grad_enabled(train):
            out = locant.attend(q, k, v, scheme, impl="fused", **how)
        if train:
            out.backward(target)

    return run
