"""Random calls of the Triton kernels in the interpreter, against `eager` in float64: output and every gradient.

A number is the seed of a call: scheme, sizes, dtype, mask, positions, softcap and sinks. Tolerances are those of the
tests of `fused`: four times the error of `eager` in the same dtype, and twenty times the rounding of the sums. These
kernels round weights to half precision, as FlashAttention does; four times that rounding is allowed too.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import torch

from locant.attention import choice
from locant.attention.request import prepare
from tests import cases, frontier_cases
from tests.attention.test_fused import build_scheme, expect, results, tensors

SPECS = [
    *(spec for spec in cases.SPECS if spec not in cases.PAIRS),
    *(spec for spec in frontier_cases.SPECS if not spec.startswith(("dape", "inkling", "fox"))),
    "huang2:clip=3+shaw:clip=90,heads=own+tisa",
    "rope+huang4:clip=20",
    "xl+huang3",
    "shaw:clip=3,heads=own+huang3:clip=2",
    "inkling:extent=4,width=3",
    "fox",
]
KINDS = ("plain", "causal", "padded", "packed", "left padded", "scattered", "window", "random mask")


@dataclass(frozen=True)
class Outcome:
    """A call, and how near its results are to the truth."""

    seed: int
    scheme: str
    kind: str
    dtype: str
    sizes: str
    tensor: int  # the result that is worst: 0 is the output, then the gradients
    error: float  # of that result
    part: float  # of the error that is allowed
    seconds: float


def run(seed: int) -> Outcome:
    """The outcome of a random call."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    start = time.process_time()
    spec = draw.choice(SPECS)
    kv, groups = draw.choice((1, 2)), draw.choice((1, 2))
    kv = 2 if "free=2" in spec or "fope" in spec else kv
    groups = 1 if "fope" in spec else groups
    b, d = draw.choice((1, 2)), draw.choice((32, 16, 24) if "partial" not in spec else (32,))
    lq = draw.choice((1, 9, 16, 17, 31, 33, 40))
    lk = lq if draw.random() < 0.5 else lq + draw.choice((1, 5, 16))
    dtype = draw.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    kind = "causal" if spec in ("fox", "grape") or spec.startswith("inkling") else draw.choice(KINDS)
    scheme = build_scheme(spec, kv * groups, d)
    how: dict[str, Any] = _arguments(kind, draw, b, lq, lk)
    if scheme.reads:
        how["x"] = torch.randn(b, lk, kv * groups * d)
    if draw.random() < 0.2 and not scheme.hides:  # a softcap would show what it hides, and is refused
        how["softcap"] = 3.0
    if draw.random() < 0.2:
        how["sinks"] = torch.randn(kv * groups)
    given = tensors(b, kv * groups, kv, lq, lk, d, dtype=dtype)
    reason = choice.triton_unsupported(prepare(*given, scheme, **how))
    assert reason is None, f"seed {seed}: {reason}"
    truth, allowed, grad = expect(scheme, given, weights=dtype, **how)
    found = results("triton", scheme, given, grad, **how)
    worst = (0.0, 0, 0.0)
    for index, (x, exact, most) in enumerate(zip(found, truth, allowed, strict=True)):
        if exact is not None:
            error = float((x.detach().double() - exact.detach()).abs().max())
            part = error / float(most) if float(most) else float(error != 0)
            worst = max(worst, (part if part == part else float("inf"), index, error))
    name = str(dtype).removeprefix("torch.")
    sizes = f"{b}x{kv * groups}/{kv}x{lq}x{lk}x{d}"
    return Outcome(seed, spec, kind, name, sizes, worst[1], worst[2], worst[0], time.process_time() - start)


def _arguments(kind: str, draw: random.Random, b: int, lq: int, lk: int) -> dict[str, Any]:
    """Masks and positions of a kind."""
    k_pos = torch.arange(lk)
    if kind == "causal":
        return {"causal": True}
    if kind == "padded":
        return {"mask": torch.arange(lk) < torch.tensor([[lk], [max(1, lk // 2)]])[-b:]}
    if kind == "packed":
        cut = lk // 2
        k_pos = torch.cat([torch.arange(cut), torch.arange(lk - cut)])
        first = torch.arange(lk) < cut
        mask = (first[lk - lq :, None] == first)[None, None]
        return {"q_pos": k_pos[lk - lq :], "k_pos": k_pos, "mask": mask, "causal": True}
    if kind == "left padded":
        pad = torch.tensor([[0], [lk // 3]])[-b:]
        pos = (k_pos - pad).clamp(min=0)
        return {"q_pos": pos[:, lk - lq :], "k_pos": pos, "mask": (k_pos >= pad)[:, None, None], "causal": True}
    if kind == "scattered":  # close enough for a table over all offsets
        most = lq + lk
        return {"q_pos": torch.randint(0, most, (b, lq)), "k_pos": torch.randint(0, most, (1, lk)), "causal": True}
    if kind == "window":
        return {"window": (draw.randrange(8), draw.randrange(4))}
    if kind == "random mask":
        return {"mask": torch.rand(b, 1, lq, lk) < 0.6}
    return {}
