"""Runs a case and compares it with the reference: `run(case)` returns an `Outcome`."""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from locant.attention.sides import NotCausal
from reliability.fuzz import calling, embeddings, inputs, reference, tolerance
from reliability.fuzz.case import Case, named
from reliability.fuzz.inputs import Inputs
from reliability.fuzz.problem import Arithmetic, Part, Problem
from reliability.fuzz.refusals import Expected, expected_refusals

COMPARED, REFUSED, FAILED = "compared", "refused", "failed"
LARGE_GROWTH = 10.0
"""Factors of xpos up to e¹⁰ leave logits far below 1/eps of float32, which is e¹⁶."""


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    kind: str  # COMPARED, REFUSED or FAILED
    what: str = ""  # the reason of a refusal, or what failed
    largest: float = 0.0  # error, as a share of what is allowed


def run(case: Case) -> Outcome:
    """Calls `attend` as the case says, and compares everything it returns."""
    given = inputs.build(case)
    expected = expected_refusals(case)
    before = [x.detach().clone() for x in given.tensors()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of FlexAttention, about a call that is not compiled
            found = calling.call(case, given)
    except Exception as error:  # anything a call can raise is an outcome
        return _raised(error, expected)
    if expected:
        return Outcome(FAILED, f"not refused, though it should be: {', '.join(x.reason for x in expected)}")
    if not all(torch.equal(x, y) for x, y in zip(given.tensors(), before, strict=True)):
        return Outcome(FAILED, "the call changed one of its inputs")
    outcome = _compared(case, given, found)
    if outcome.kind == COMPARED and any(name in embeddings.NAMES for name in case.scheme_names):
        return _worst([outcome, _embedded(case, given)])
    return outcome


def _embedded(case: Case, given: Inputs) -> Outcome:
    """`Scheme.embed` at the positions of the keys."""
    outside = embeddings.is_outside(case)
    try:
        found = given.scheme.embed(given.positions[1])
    except ValueError as error:
        if outside and any(phrase in str(error) for phrase in ("outside the table", "are mapped to")):
            return Outcome(COMPARED)
        return _raised(error, [])
    if outside:
        return Outcome(FAILED, "embed took a position outside its table")
    wide = computing_dtype(case, given)
    exact, plain = embeddings.expected(case, given, Arithmetic()), embeddings.plain(case, given, wide)
    return compared("embedding", found, named(case.parameters), exact, plain, wide)


def _raised(error: Exception, expected: list[Expected]) -> Outcome:
    if type(error) in (ValueError, TypeError, NotCausal):
        for each in expected:
            if each.phrase in str(error):
                return Outcome(REFUSED, each.reason)
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{place.filename.rpartition('/')[2]}:{place.lineno}"
    return Outcome(FAILED, f"{type(error).__name__} in {where}: {' '.join(str(error).split())[:300]}")


def _compared(case: Case, given: Inputs, found: list[calling.Results]) -> Outcome:
    keep = calling.dropout_factors(case, given) if case.dropout else None
    wide = computing_dtype(case, given)
    parts = inputs.parts_of(given.scheme)
    truth = expected_results(case, given, parts, Arithmetic(), keep)
    if _beyond_torch(case, given, parts):
        truth = {name: x for name, x in truth.items() if name in ("out", "weights")}
    plain: list[dict[str, Tensor]] = []
    for runs in tolerance.STAGES:
        for n in range(len(plain), runs):
            # Back ends differ. The steep slope of tanh carries the rounding of the backward pass further. Weights that
            # are not rounded to half precision keep the rounding of their logits: a weight of 1 would lose it.
            jitter = tolerance.jitter(case.data, n)
            a = Arithmetic(wide, case.torch_dtype, jitter, steep=n % 2 == 0, coarse=n % 4 < 2)
            plain.append(expected_results(case, given, parts, a, keep))
        outcome = _worst(
            compared(name, results.get(name), _dtype(name, case), exact, [x[name] for x in plain], wide)
            for results in found
            for name, exact in truth.items()
        )
        if outcome.kind == COMPARED:
            break
    return outcome


def _beyond_torch(case: Case, given: Inputs, parts: list[tuple[Part, list[str]]]) -> bool:
    """Whether visible logits exceed 1/eps, where the gradients of torch's kernel are wrong by any factor.

    Its backward pass computes exp(logit − log-sum), and the difference of such numbers has no correct digit. Only xpos
    gets there, for keys far in the future of a query.
    """
    growth = sum(
        reference.xpos_growth(part.options, *given.positions, part.map) for part, _ in parts if part.name == "xpos"
    )
    later = (given.positions[1][:, None, :] > given.positions[0][:, :, None])[:, None] & given.visible
    return case.impl == "sdpa" and growth > LARGE_GROWTH and bool(later.any())


def _worst(outcomes: Iterable[Outcome]) -> Outcome:
    return max(outcomes, key=lambda outcome: (outcome.kind == FAILED, outcome.largest))


def _dtype(name: str, case: Case) -> torch.dtype:
    """The dtype of a result: that of the parameters for gradients of parameters and sinks, that of q for the rest."""
    return named(case.parameters) if name.startswith("d ") or name == "ds" else case.torch_dtype


def compared(
    name: str, x: Tensor | None, dtype: torch.dtype, exact: Tensor, plain: list[Tensor], wide: torch.dtype
) -> Outcome:
    """One result of a call against the truth; `plain` are the results of the plain computation in `wide`."""
    if x is None:
        return Outcome(FAILED, f"there is no {name}")
    x = x.detach()
    if x.shape != exact.shape or x.dtype != dtype:
        return Outcome(FAILED, f"{name} is {x.dtype} {list(x.shape)}, not {dtype} {list(exact.shape)}")
    if x.numel() == 0:
        return Outcome(COMPARED)
    limits = torch.finfo(dtype)
    # A result in a wide dtype is no more precise than the computation that led to it.
    eps = max(limits.eps, torch.finfo(wide).eps)
    most = tolerance.allowed(exact, plain, eps, max(limits.smallest_normal * limits.eps, tolerance.NEGLIGIBLE))
    comparable = torch.isfinite(torch.stack(plain)).all(0)  # float16 overflows where the truth does not
    error = torch.where(comparable, (x.double() - exact).abs(), 0.0).nan_to_num(nan=math.inf).max()
    if error > most:
        return Outcome(FAILED, f"{name} is off by {error:.2e}, allowed {most:.2e}", float(error) / most)
    return Outcome(COMPARED, largest=float(error) / most if most else 0.0)


def computing_dtype(case: Case, given: Inputs) -> torch.dtype:
    """float32, or float64 if q and all parameters are float64: what tables and softmax are computed in."""
    dtypes = {case.torch_dtype, *(x.dtype for x in given.scheme.parameters())}
    return torch.float64 if dtypes == {torch.float64} else torch.float32


def expected_results(
    case: Case, given: Inputs, parts: list[tuple[Part, list[str]]], a: Arithmetic, keep: Tensor | None
) -> dict[str, Tensor]:
    """What the call must return, by name and in float64, as the reference computes it in some arithmetic."""
    if case.b * case.lq == 0:
        return _nothing(case, given)
    wanted = _wanted(case)
    leaves = {
        name: a.moved(x.detach()).requires_grad_(name in wanted)
        for name, x in zip("qkv", (given.q, given.k, given.v), strict=True)
    }
    params = {name: a.moved(x.detach()).requires_grad_("p" in wanted) for name, x in given.scheme.named_parameters()}
    sinks = None if given.sinks is None else a.moved(given.sinks.detach()).requires_grad_("s" in wanted)
    states = {name: None if x is None else a.moved(x.detach()) for name, x in (("xq", given.x_q), ("xk", given.x_k))}
    states = {name: None if x is None else x.requires_grad_("x" in wanted) for name, x in states.items()}
    usual = (3 * case.d if "deberta" in case.scheme_names else case.d) ** -0.5
    problem = Problem(
        parts=tuple(
            replace(part, params={key: params[full] for key, full in zip(part.params, names, strict=True)})
            for part, names in parts
        ),
        **leaves,
        q_pos=given.positions[0],
        k_pos=given.positions[1],
        visible=given.visible,
        scale=usual if case.scale is None else case.scale,
        softcap=case.softcap,
        additive=None if given.additive is None else given.additive.to(a.dtype),
        sinks=sinks,
        keep=None if keep is None else keep.to(a.dtype),
        x_q=_last(states["xk"], case) if states["xq"] is None else states["xq"],
        x_k=states["xk"],
        hidden=given.hidden,
    )
    results: dict[str, Tensor] = {}
    if case.context == "jvp":
        directions = tuple(x.to(a.dtype) for x in calling.tangents(case, given))
        results["out"], results["tangent"] = torch.func.jvp(
            lambda q, k, v: reference.attention(replace(problem, q=q, k=k, v=v), a)[0],
            tuple(leaves[name] for name in "qkv"),
            directions,
        )
    else:
        results["out"], weights = reference.attention(problem, a)
        if case.need_weights and case.context != "vjp":
            results["weights"] = weights
    others = {"s": sinks, **states}
    leaves |= {name: x for name, x in others.items() if x is not None}
    results |= calling.gradients(results, leaves, params, given)
    if a.jitter is not None:  # a result is as precise as the dtype that the call has it in
        results = {name: x.to(_dtype(name, case)) for name, x in results.items()}
    return {name: x.detach().double() for name, x in results.items()}


def _last(x_k: Tensor | None, case: Case) -> Tensor | None:
    """The hidden states of the queries, which are the last of the keys."""
    return None if x_k is None else x_k[:, case.lk - case.lq :]


def _wanted(case: Case) -> str:
    """The gradients among the results: those that the case wants, or what a transform returns."""
    if case.transformed:
        return "qkv" if case.context == "vjp" else ""
    return case.wanted


def _nothing(case: Case, given: Inputs) -> dict[str, Tensor]:
    """The results of a call without queries: empty, and gradients of 0."""
    results = {"out": given.q.new_zeros(case.b, case.h, case.lq, case.dv)}
    if case.need_weights and case.context not in ("vjp", "jvp"):
        results["weights"] = given.q.new_zeros(case.b, case.h, case.lq, case.lk)
    wanted = _wanted(case)
    tensors = {"dq": given.q, "dk": given.k, "dv": given.v, "ds": given.sinks, "dxq": given.x_q, "dxk": given.x_k}
    results |= {name: torch.zeros_like(x) for name, x in tensors.items() if x is not None and name[1] in wanted}
    if "p" in wanted:
        results |= {f"d {name}": torch.zeros_like(x) for name, x in given.scheme.named_parameters()}
    return {name: x.detach().double() for name, x in results.items()}
