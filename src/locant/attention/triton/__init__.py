"""Our GPU kernel, in Triton: every table, forward and backward, with memory linear in L.

`kernels/` has the kernels, `launch.py` runs them, `blocks.py` chooses the sizes of tiles. The operators are those of
`operators.py`, as for `fused`: for CUDA, and for CPUs in the interpreter.

Triton is imported at the first call. In its interpreter (TRITON_INTERPRET=1, set before triton is imported) the kernels
also run on CPUs: slowly, to prove that they are right.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from locant.attention.fused_call import Call, make_call
from locant.attention.operators import Operators
from locant.attention.request import Request

if TYPE_CHECKING:
    from locant.attention.triton.launch import Launch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256
"""The largest width of queries, values and side vectors: one row of a tile must fit into shared memory."""
WIDEST_WITH_VECTORS = 128
"""… in float32 and float16 with tables of vectors, whose products have operands of 32 bits."""
OLDEST = (8, 0)
"""The oldest compute capability that Triton supports, and that the kernels were compiled for."""


def missing() -> str | None:
    """Why the kernels cannot be used here, on any device; None if they can."""
    if find_spec("triton") is None:
        return "triton is not installed; pip install 'locant[gpu]'"
    return None


def missing_interpreter() -> str | None:
    """Why the kernels cannot be used on a CPU; None if they can."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "it runs on CUDA devices; on CPUs only in Triton's interpreter (TRITON_INTERPRET=1), to test it"
    loaded = sys.modules.get("triton.language")
    if loaded is not None and hasattr(loaded.sum, "cache_key"):
        return "TRITON_INTERPRET=1 was set after triton had been imported; set it before Python starts"
    return None


def missing_gpu(index: int | None) -> str | None:
    """Why the kernels cannot be used on a CUDA device; None if they can."""
    if torch.version.hip is not None:
        return "it runs on GPUs of NVIDIA, and this torch is for those of AMD"
    if not torch.cuda.is_available():
        return None  # a fake tensor: nothing runs
    found = torch.cuda.get_device_capability(index)
    if found < OLDEST:
        return (
            f"it needs a GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or later; this one has {found[0]}.{found[1]}"
        )
    return None


_autotuning = False


def autotune(on: bool) -> None:
    """Whether block sizes are measured at the first call of each kind, instead of taken from a table.

    Off by default: other sizes sum in another order, so results then differ from machine to machine in their last bits.
    """
    global _autotuning
    _autotuning = on


def attend(request: Request) -> tuple[Tensor, None]:
    """The output [B, H, Lq, Dv] in the dtype of q, and None: the kernel keeps no weights."""
    out, _ = forward(*make_call(request))
    return out.to(request.q.dtype), None


def _on_device_of(call: Call) -> AbstractContextManager[Any]:
    """Makes the device of a call the current one, which Triton launches on."""
    return torch.cuda.device(call.q.device) if call.q.is_cuda else nullcontext()


def _launch(call: Call, backward: bool, run: Callable[[Launch], object]) -> Launch:
    """The call, ready to `run`, with block sizes of the table or measured ones."""
    from locant.attention.triton.launch import Launch, tuned_launch

    return tuned_launch(call, run, backward) if _autotuning else Launch(call)


def _compute(call: Call, out: Tensor, lse: Tensor) -> None:
    with _on_device_of(call):
        _launch(call, False, lambda launch: launch.forward(out, lse)).forward(out, lse)


def _pull(call: Call, grad: Tensor, out: Tensor, lse: Tensor, grads: dict[str, Tensor]) -> None:
    def run(launch: Launch) -> None:
        launch.backward(grad, out, lse, grads)

    with _on_device_of(call):
        run(_launch(call, True, run))


def _kept(call: Call) -> Tensor:
    """The factors of the weights under dropout, [B, H, Lq, Lk]."""
    from locant.attention.triton.launch import Launch

    with _on_device_of(call):
        return Launch(call).kept().double() / (1 - call.dropout)


OPERATORS = Operators("triton_attend", ("cuda", "cpu"), _compute, _pull, _kept)
forward, backward = OPERATORS.forward, OPERATORS.backward
