"""Which calls must be refused, and with which words: the table in `locant.attention.choice`, and calls that are wrong.

A call is refused if and only if one of `EXPECTED` applies to it. Any other error is a failure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from reliability.fuzz import maps, reference
from reliability.fuzz.case import Case, named
from reliability.fuzz.inputs import full_positions, in_step

REACH = {
    "shaw": "clip", "huang1": "clip", "huang2": "clip", "huang3": "clip", "huang4": "clip", "toeplitz": "clip",
    "t5": "max_distance", "deberta": "max_distance", "inkling": "extent",
}  # fmt: skip
"""The option beyond which the tables of a scheme are constant. The other schemes with tables have no such distance."""
TABLES = {*reference.ADDED, *reference.GAINS}
TRAINED = {*TABLES, "pope"}
"""Schemes with parameters that attention differentiates."""


@dataclass(frozen=True)
class Expected:
    """A reason to refuse a call."""

    reason: str  # as the table of refusals names it
    phrase: str  # that the message contains
    applies: Callable[[Case], bool]


def _has(case: Case, *names: str) -> bool:
    return any(name in names for name in case.scheme_names)


def _of(case: Case, name: str) -> str:
    """The parts of the scheme with a name, as written."""
    return "+".join(part for part in case.spec.split("+") if part.startswith(name))


def _reach(case: Case) -> int | None:
    """The distance beyond which no table of the scheme changes; None if there is none."""
    parts = zip(case.scheme_names, case.spec.split("+"), case.maps, strict=True)
    found = [_reach_of(name, part, mapped) for name, part, mapped in parts if name in TABLES]
    if not found:  # a sum without tables has reach 0, a single scheme none
        return 0 if "+" in case.spec else None
    known = [reach for reach in found if reach is not None]
    return max(known) if len(known) == len(found) else None


def _reach_of(name: str, part: str, mapped: tuple[str, dict[str, float]] | None) -> int | None:
    if name == "fox":
        return 1
    if name == "local":
        return int(re.search(r"\bwindow=(\d+)", part)[1]) + 1  # type: ignore[index]
    if name not in REACH:
        return None
    reach = int(re.search(rf"\b{REACH[name]}=(\d+)", part)[1])  # type: ignore[index]
    return reach if mapped is None else maps.reach(*mapped, reach)


def _gaps(case: Case) -> bool:
    """Whether offsets have no table over a consecutive range: no reach, and a range of more than 4 (Lq + Lk)."""
    q_pos, k_pos = full_positions(case)
    if case.positions == "none" or _reach(case) is not None or q_pos.numel() == 0:
        return False
    low = int((k_pos.amin(-1) - q_pos.amax(-1)).min())
    high = int((k_pos.amax(-1) - q_pos.amin(-1)).max())
    return high - low >= 4 * (case.lq + case.lk)


def _differentiates(case: Case) -> bool:
    """Whether a tensor that FlexAttention gets requires a gradient."""
    if case.context not in ("plain", "autocast", "thread"):
        return False
    if "x" in case.wanted and case.reads:
        return True
    fixed = ("sandwich", "alibi:slopes=fixed", "local")
    parts = zip(case.scheme_names, case.spec.split("+"), strict=True)
    tables = any(("learned=true" in p or name in TRAINED) and not p.startswith(fixed) for name, p in parts)
    sinks = "s" in case.wanted and case.sinks != "none"
    return any(x in case.wanted for x in "qkv") or sinks or ("p" in case.wanted and tables)


def _vectors_without_reach(case: Case) -> bool:
    return _has(case, "xl", "shaw", "huang4", "deberta", "inkling") and _reach(case) is None


def widens(case: Case, dtype: str) -> bool:
    """Whether the powers of an xpos of the scheme overflow a dtype."""
    if not _has(case, "xpos") or case.b * case.lq == 0:
        return False
    q_pos, k_pos = full_positions(case)
    limit = math.log(torch.finfo(named(dtype)).max) / 2
    for part, mapped in zip(case.spec.split("+"), case.maps, strict=True):
        options = {key: float(value) for key, value in re.findall(r"(\w+)=([\d.]+)", part.partition("@")[0])}
        if part.startswith("xpos") and reference.xpos_growth(options, q_pos, k_pos, mapped) > limit:
            return True
    return False


def _sees_later_keys(case: Case) -> bool:
    """Whether a query of a scheme for causal attention sees a later key."""
    if not case.causal_only or case.causal or (case.window is not None and case.window[1] == 0):
        return False
    q_pos, k_pos = full_positions(case)
    return bool((k_pos[:, None, :] > q_pos[:, :, None]).any())


def _fox_order(case: Case) -> bool:
    return _has(case, "fox") and reference.fox_order(*full_positions(case)) is not None


def _turns_far(case: Case) -> bool:
    parts = zip(case.scheme_names, case.maps, strict=True)
    return any(
        name in reference.ROTATIONS and mapped is not None and mapped[0] == "selfextend" for name, mapped in parts
    )


def _on(*impls: str) -> Callable[[Callable[[Case], bool]], Callable[[Case], bool]]:
    return lambda applies: lambda case: case.impl in impls and applies(case)


EXPECTED = [
    # calls that are wrong, whatever computes them
    Expected("ambiguous mask", "could be [batch, keys] or [queries, keys]",
             lambda c: c.mask in ("BK", "QK") and c.b == c.lq > 1 and c.context != "vmap"),  # vmap: one sequence
    Expected("more queries than keys, no q_pos", "cannot infer positions for",
             lambda c: c.lq > c.lk and (c.positions == "none" or c.given == "k")),
    Expected("q_pos alone, other number of keys", "cannot infer positions of",
             lambda c: c.lq != c.lk and c.positions != "none" and c.given == "q"),
    Expected("value vectors of another size than v", "must have the head size of v",
             lambda c: "values=true" in c.spec and c.dv != c.d),
    Expected("xpos beyond float64", "overflows float64", lambda c: widens(c, "float64")),
    Expected("later keys", "is for causal attention", _sees_later_keys),
    Expected("order of tokens", "in the order of their positions, which is not defined", _fox_order),
    Expected("queries elsewhere", "each query must be one of the last keys", _fox_order),
    Expected("scale of 0", "it divides by the scale", lambda c: _has(c, "inkling") and c.scale == 0),
    Expected("one x, other queries", "x as one tensor is for queries that are the last of the keys",
             lambda c: c.states != "pair" and "q" in c.reads and c.lq <= c.lk and not in_step(c)),
    Expected("more queries than states", "pass x=(states of queries, states of keys)",
             lambda c: c.states == "keys" and c.reads and c.lq > c.lk),
    Expected("softcap with hidden pairs", "would show them again",
             lambda c: c.softcap is not None and _has(c, "local")),
    Expected("own keys", "use fope:heads=shared",
             lambda c: c.groups > 1 and c.b * c.lq > 0 and "heads=own" in _of(c, "fope")),
    # what a back end does not support
    Expected("weights", "does not return weights", _on("fused", "sdpa", "flex")(lambda c: c.need_weights)),
    Expected("additive mask", "additive_mask", _on("fused", "flex")(lambda c: c.additive != "none")),
    Expected("transform", "no rule for torch.func", _on("fused", "sdpa", "flex")(lambda c: c.transformed)),
    Expected("pair", "pair", _on("fused", "flex")(lambda c: _has(c, *reference.PAIRS))),
    Expected("far rotations", "has far rotations", _on("sdpa", "flex")(_turns_far)),
    Expected("gain in sdpa", "do not fit into a mask", _on("sdpa")(lambda c: _has(c, *reference.GAINS))),
    Expected("softcap in sdpa", "has no softcap", _on("sdpa")(lambda c: c.softcap is not None)),
    Expected("sinks in sdpa", "has no sinks", _on("sdpa")(lambda c: c.sinks != "none")),
    Expected("value in sdpa", "do not fit into a mask", _on("sdpa")(lambda c: "values=true" in c.spec)),
    Expected("vector gain in flex", "a vector gain, which a score_mod cannot express",
             _on("flex")(lambda c: _has(c, "huang3"))),
    Expected("value in flex", "which a score_mod cannot express", _on("flex")(lambda c: "values=true" in c.spec)),
    Expected("vectors without reach in flex", "without a reach", _on("flex")(_vectors_without_reach)),
    Expected("gaps", "large gaps", _on("fused", "flex")(_gaps)),
    Expected("dropout in flex", "has no dropout", _on("flex")(lambda c: c.dropout > 0)),
    Expected("float64 in flex", "does not compute in float64",
             _on("flex")(lambda c: c.dtype == "float64" or widens(c, c.dtype))),
    Expected("xpos in float64 in fused", "needs float64 at these positions",
             _on("fused")(lambda c: widens(c, c.dtype))),
    Expected("dtype in fused", "it computes in float32, from float32 or bfloat16",
             _on("fused")(lambda c: c.dtype in ("float16", "float64"))),
    Expected("gradients in flex", "no backward pass on CPUs", _on("flex")(_differentiates)),
]  # fmt: skip


def expected_refusals(case: Case) -> list[Expected]:
    """Every reason that applies to a case."""
    return [expected for expected in EXPECTED if expected.applies(case)]
