"""Which back end computes a call of `attend`. All rules are in this file; a back end only computes.

Back ends:

    fused   our C kernel, on CPUs
    triton  our Triton kernels, on CUDA devices; in Triton's interpreter also on CPUs, to test them
    sdpa    torch's `scaled_dot_product_attention`, with the terms in its mask
    flex    torch's FlexAttention, for GPUs
    eager   the reference

`impl="NAME"` takes that back end, or raises a ValueError with the reason. locant never substitutes another back end.

`impl="auto"` takes the first of these:

    1. `eager` under a transform of `torch.func` and in forward-mode differentiation.
    2. `fused` for a decoding step (`Request.decoding`) with terms or sides, gradients disabled, not compiled, where
       its kernel reads keys and values in place: up to 4 queries, up to 32 of heads that share a key/value head, no
       vector gain, no far rotations, no dropout.
    3. `sdpa` where positions cost it little (`cheap_for_sdpa`): `sdpa` supports the call, and one of these holds,
       tested in this order:
         - decoding (`Request.decoding`), gradients disabled: nothing but a bias, query vectors, levels, temperatures;
         - decoding: nothing but a bias and temperatures;
         - a bias alone, one sequence on a CPU: consecutive positions, unlimited (no mask, no additive mask, no window),
           not causal, gradients disabled, not compiled;
         - nothing but temperatures, unlimited, and not causal, or causal with consecutive positions and as many
           queries as keys.
    4. The first in `AUTO` that supports the call: `fused`, `sdpa`, `eager` on CPUs; `triton`, `flex`, `sdpa`, `eager`
       on CUDA devices; `sdpa`, `eager` elsewhere, and wherever torch.export or the exporter of ONNX traces: an
       exported program then has torch's own operators alone, and runs without locant.

`auto` never takes `sdpa` for a scheme that grows towards the future (xpos) unless attention is causal: torch's backward
pass computes exp(logit − log-sum), which has no correct digit for logits of 1e7 in float32.

`auto` takes `triton` on a device only where it is right (`verification.py`): the first call that would go to it
compares it with `eager` on that device, in a few small calls. If a result differs, `auto` warns once, with the largest
error, and goes on with `flex`. `impl="triton"` compares nothing.

In short: on a CPU with gradients, a call with terms goes to `fused`, except decoding with a bias and temperatures at
most, and calls that `fused` does not support.

What a back end does not support (`eager` supports everything):

                                                                        fused  triton  sdpa   flex
    need_weights=True                                                     ×       ×      ×      ×
    an additive mask                                                      ×       ×             ×
    a transform of torch.func, forward-mode differentiation               ×       ×      ×      ×
    a logit that is not a function of the offset alone (pair)             ×       ×             ×
    far rotations (`Request.far`)                                                 ×      ×      ×
    a scalar gain                                                                        ×
    a vector gain, or a value term                                                       ×      ×
    a softcap, or sinks                                                                  ×
    query or key vectors in a scheme without a reach                                            ×
    offsets that are not consecutive (`Offsets.inverse`)                  ×       ×             ×
    dropout                                                                                     ×
    float64, also of rotated queries and keys (xpos over a wide span)     ×       ×             ×
    float16, or another device than the CPU                               ×
    a CPU, except in Triton's interpreter                                         ×
    vectors of more than 256 numbers                                              ×
    vectors of more than 128 numbers, with query, key or value tables,
        in float32 or float16                                                     ×
    dropout while a CUDA graph is captured                                        ×
    a GPU of AMD, or of a compute capability below 8.0                            ×
    gradients on a CPU                                                                          ×
    no keys, no heads or a head size of 0                                 ×       ×
    no C compiler (fused), no triton, torch without FlexAttention (flex)  ×       ×             ×
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from locant.attention import eager, flex, fused, fused_direct, sdpa, triton, verification
from locant.attention.build import build
from locant.attention.request import Request
from locant.attention.sizes import same
from locant.attention.tables import transforming
from locant.schemes.base import exporting


@dataclass(frozen=True)
class Backend:
    """One way to compute a request."""

    name: str
    attend: Callable[[Request], tuple[Tensor, Tensor | None]]  # the output, and the weights if the request needs them
    unsupported: Callable[[Request], str | None]  # why it cannot compute a request; None if it can


def choose(request: Request, impl: str) -> Backend:
    """The back end for a request. ValueError if `impl` names one that is unknown or does not support the request."""
    if impl == "auto":
        return _choose_automatically(request)
    if impl not in BACKENDS:
        raise ValueError(f"unknown impl {impl!r}; choose one of: auto, {', '.join(BACKENDS)}")
    reason = BACKENDS[impl].unsupported(request)
    if reason is not None:
        able = [repr(name) for name, backend in BACKENDS.items() if backend.unsupported(request) is None]
        raise ValueError(f"impl={impl!r} cannot do this: {reason}; use impl='auto' or {' or '.join(able)}")
    return BACKENDS[impl]


def _choose_automatically(request: Request) -> Backend:
    if _transformed():
        return BACKENDS["eager"]  # torch.func has rules for every operation in it
    if _cheap_for_fused(request):
        return BACKENDS["fused"]
    if cheap_for_sdpa(request):
        return BACKENDS["sdpa"]
    order = AUTO_ELSEWHERE if exporting() else AUTO.get(request.q.device.type, AUTO_ELSEWHERE)
    able = [name for name in order if BACKENDS[name].unsupported(request) is None]
    if "sdpa" in able and _too_large_for_sdpa(request):
        able.remove("sdpa")
    device = request.q.device
    if able[0] == "triton" and not verification.agrees(device.type, device.index):
        able.remove("triton")
    return BACKENDS[able[0]]


def _too_large_for_sdpa(request: Request) -> bool:
    """Whether visible logits may be so large that the backward pass of torch's kernel loses their differences."""
    highest = request.limits[1]
    return request.scheme.grows and (highest is None or highest > 0)


def _cheap_for_fused(request: Request) -> bool:
    """Whether `fused` reads keys and values in place: rule 2 of `impl="auto"`."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not request.decoding:
        return False
    if not request.terms.used() and not request.sides.used():
        return False  # nothing that torch's kernel does not have
    return fused_direct.reads_in_place(request) and fused_unsupported(request) is None


def cheap_for_sdpa(request: Request) -> bool:
    """Whether positions cost `sdpa` little: rule 3 of `impl="auto"`."""
    if sdpa_unsupported(request) is not None or _too_large_for_sdpa(request):
        return False
    terms, sides = set(request.terms.used()), set(request.sides.used())
    if request.decoding and not torch.is_grad_enabled() and terms <= {"bias", "query", "level"} and "key" not in sides:
        return True  # the mask has a few rows, and each takes a product with the queries alone
    if not terms <= {"bias"} or not sides <= {"temperature"}:
        return False
    has_bias = bool(terms)
    if request.decoding:
        return True
    if has_bias and request.sides.temperature is not None:  # the mask would have an entry for every pair
        return False
    if has_bias and request.q.shape[0] == 1 and request.consecutive and request.q.device.type == "cpu":
        traced = torch.compiler.is_compiling()  # a view with these strides would fix the length of the graph
        return not traced and not request.causal and not request.limited and not torch.is_grad_enabled()
    square = request.consecutive and same(request.q.shape[2], request.k.shape[2])
    return not has_bias and not request.limited and (not request.causal or square)


def fused_unsupported(request: Request) -> str | None:
    """Why `fused` cannot compute a request; None if it can."""
    if not request.q.is_cpu:
        return f"it runs on CPUs, and these tensors are on {request.q.device.type}"
    if request.q.dtype not in fused.DTYPES:
        return f"it computes in float32, from float32 or bfloat16 tensors; these are {request.q.dtype}"
    if _transformed():
        return NO_TRANSFORMS
    if request.content_dtype == torch.float64:
        return f"it computes in float32, and {request.scheme} needs float64 at these positions"
    if request.terms.pair is not None:
        return f"{request.scheme} has a logit that is not a function of the offset alone (pair)"
    if request.additive is not None:
        return NO_ADDITIVE
    if request.need_weights:
        return NO_WEIGHTS
    if request.offsets.inverse is not None:
        return "positions with large gaps, or unknown while compiling, have no table over consecutive offsets"
    if request.v.shape[3] == 0:
        return "the head size of v is 0"
    missing: str | None = _missing_kernel()
    return missing


def sdpa_unsupported(request: Request) -> str | None:
    """Why `sdpa` cannot compute a request; None if it can."""
    if request.terms.gain is not None or request.terms.value is not None:
        cannot = [name for name in ("gain", "value") if name in request.terms.used()]
        return f"{request.scheme} uses {' and '.join(cannot)}, which do not fit into a mask"
    if request.far is not None:
        return NO_FAR.format(request.scheme)
    if request.softcap is not None:
        return "torch's kernel has no softcap"
    if request.sinks is not None:
        return "torch's kernel has no sinks, and a mask that holds them would have an entry for every pair"
    if request.need_weights:
        return NO_WEIGHTS
    return NO_TRANSFORMS if _transformed() else None


def triton_unsupported(request: Request) -> str | None:
    """Why `triton` cannot compute a request; None if it can."""
    device = request.q.device.type
    if device not in ("cuda", "cpu"):
        return f"it runs on CUDA devices, and these tensors are on {device}"
    missing: str | None = _missing_triton(device, request.q.device.index)
    if missing is not None:
        return missing
    if request.q.dtype not in triton.DTYPES:
        return f"it computes in float32, from float32, bfloat16 or float16 tensors; these are {request.q.dtype}"
    if _transformed():
        return NO_TRANSFORMS
    if request.content_dtype == torch.float64:
        return f"it computes in float32, and {request.scheme} needs float64 at these positions"
    if request.terms.pair is not None:
        return f"{request.scheme} has a logit that is not a function of the offset alone (pair)"
    if request.far is not None:
        return NO_FAR.format(request.scheme)
    if request.additive is not None:
        return NO_ADDITIVE
    if request.need_weights:
        return NO_WEIGHTS
    if request.offsets.inverse is not None:
        return "positions with large gaps, or unknown while compiling, have no table over consecutive offsets"
    if request.v.shape[3] == 0:
        return "the head size of v is 0"
    tables = (request.terms.query, request.terms.key)
    widest = max(request.rotated[0].shape[3], request.v.shape[3], *(x.shape[2] for x in tables if x is not None))
    if widest > triton.WIDEST:
        return f"a tile holds vectors of up to {triton.WIDEST} numbers; here they have {widest}"
    vectors = any(x is not None for x in (*tables, request.terms.value))
    if vectors and request.content_dtype != torch.bfloat16 and widest > triton.WIDEST_WITH_VECTORS:
        most = f"vectors of up to {triton.WIDEST_WITH_VECTORS} numbers"
        return f"a tile of {request.content_dtype} with tables of vectors holds {most}; here they have {widest}"
    if request.dropout and _capturing():
        return "a CUDA graph would drop the same weights at every replay"
    return None


def flex_unsupported(request: Request) -> str | None:
    """Why `flex` cannot compute a request; None if it can."""
    terms = request.terms
    if terms.pair is not None or terms.value is not None:
        which = "pair" if terms.pair is not None else "value"
        return f"{request.scheme} uses {which}, which a score_mod cannot express"
    if terms.gain is not None and terms.gain.ndim == 3:
        return f"{request.scheme} uses a vector gain, which a score_mod cannot express"
    if (terms.query is not None or terms.key is not None) and request.scheme.reach is None:
        return f"{request.scheme} has query or key vectors without a reach: it would need a product for every pair"
    if request.far is not None:
        return NO_FAR.format(request.scheme)
    if request.additive is not None:
        return NO_ADDITIVE
    if request.need_weights:
        return NO_WEIGHTS
    if _transformed():
        return NO_TRANSFORMS
    if request.dropout:
        return "FlexAttention has no dropout"
    if request.offsets.inverse is not None:
        return "positions with large gaps have no table over consecutive offsets"
    if request.content_dtype == torch.float64:
        whose = "" if request.q.dtype == torch.float64 else f", which {request.scheme} needs at these positions"
        return f"FlexAttention does not compute in float64{whose}"
    if request.q.device.type == "cpu":
        tensors = [request.q, request.k, request.v, request.sinks, *terms.tables().values()]
        tensors += request.sides.used().values()
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            return "FlexAttention has no backward pass on CPUs"
    if find_spec("torch.nn.attention.flex_attention") is None:
        return f"torch {torch.__version__} has no FlexAttention"
    return None


def eager_unsupported(request: Request) -> None:
    """None: `eager` computes every request."""


NO_WEIGHTS = "it does not return weights (need_weights=True)"
NO_ADDITIVE = "it does not take additive_mask"
NO_FAR = "{} has far rotations, which take more than one content product"
NO_TRANSFORMS = "it has no rule for torch.func and forward-mode derivatives"

BACKENDS: dict[str, Backend] = {
    "fused": Backend("fused", fused_direct.attend, fused_unsupported),
    "triton": Backend("triton", triton.attend, triton_unsupported),
    "sdpa": Backend("sdpa", sdpa.attend, sdpa_unsupported),
    "flex": Backend("flex", flex.attend, flex_unsupported),
    "eager": Backend("eager", eager.attend, eager_unsupported),
}
"""Every back end by the name that `impl` takes."""

AUTO: dict[str, tuple[str, ...]] = {
    "cpu": ("fused", "sdpa", "eager"),
    "cuda": ("triton", "flex", "sdpa", "eager"),
}
"""By type of device, the order in which `impl="auto"` tries back ends (rule 4)."""
AUTO_ELSEWHERE = ("sdpa", "eager")


def _transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is active. Compiled code traces it away."""
    return not torch.compiler.is_compiling() and transforming()


def _missing_kernel() -> str | None:
    built = build()
    return None if built.library is not None else f"the fused kernel is not available: {built.why}"


def _missing_triton(kind: str, index: int | None) -> str | None:
    return triton.missing() or (triton.missing_interpreter() if kind == "cpu" else triton.missing_gpu(index))


def _capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    if torch.compiler.is_compiling() or not torch.cuda.is_available():
        return False
    return torch.cuda.is_current_stream_capturing()


# The effect of torch.compiler.assume_constant_result, which would import the whole compiler: two seconds.
_missing_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined]
_missing_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]
