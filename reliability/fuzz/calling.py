"""Calls `locant.attend` as a case says, and returns what it computed: output, weights and gradients by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

import locant
from locant.attention import eager, flex, sdpa
from reliability.fuzz.case import Case
from reliability.fuzz.inputs import Inputs

Results = dict[str, Tensor | None]
SMALL_SLICE = 64


def call(case: Case, inputs: Inputs) -> list[Results]:
    """The results of a case; several if it calls `attend` from several threads."""
    with _settings(case):
        _calls_before(case, inputs)
        if case.context == "thread":
            with ThreadPoolExecutor(2) as pool:
                return list(pool.map(lambda _: _differentiated(case, inputs), range(2)))
        if case.transformed:
            return [TRANSFORMS[case.context](case, inputs)]
        return [_differentiated(case, inputs)]


def how(case: Case, inputs: Inputs) -> dict[str, Any]:
    """The keyword arguments of the call."""
    return {
        "q_pos": inputs.q_pos, "k_pos": inputs.k_pos, "mask": inputs.mask, "additive_mask": inputs.additive,
        "causal": case.causal, "window": case.window, "scale": case.scale,
        "softcap": case.softcap, "sinks": inputs.sinks, "dropout": case.dropout, "impl": case.impl,
        "x": passed_states(case, inputs.x_q, inputs.x_k),
    }  # fmt: skip


def passed_states(case: Case, x_q: Tensor | None, x_k: Tensor | None) -> Any:
    """Hidden states as `attend` takes them."""
    if not case.reads:
        return None
    return (x_q, x_k) if case.states == "pair" else x_k if case.states == "keys" else x_q


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def _differentiated(case: Case, inputs: Inputs) -> Results:
    """Output and weights, and the gradients that the case wants."""
    leaves = {
        name: x.detach().requires_grad_(name in case.wanted)
        for name, x in zip("qkv", (inputs.q, inputs.k, inputs.v), strict=True)
    }
    arguments = how(case, inputs)
    if inputs.sinks is not None:
        leaves["s"] = arguments["sinks"] = inputs.sinks.detach().requires_grad_("s" in case.wanted)
    states = {name: None if x is None else x.detach() for name, x in (("xq", inputs.x_q), ("xk", inputs.x_k))}
    leaves |= {name: x.requires_grad_("x" in case.wanted) for name, x in states.items() if x is not None}
    arguments["x"] = passed_states(case, states["xq"], states["xk"])
    if case.dropout:
        torch.default_generator.manual_seed(case.data)
    with CONTEXTS.get(case.context, nullcontext)():  # PyTorch wants the backward pass outside autocast
        qkv = (leaves[name] for name in "qkv")
        found = locant.attend(*qkv, inputs.scheme, need_weights=case.need_weights, **arguments)
    out, weights = found if case.need_weights else (found, None)
    results: Results = {"out": out, "weights": weights}
    return results | gradients(results, leaves, dict(inputs.scheme.named_parameters()), inputs)


def gradients(
    results: Mapping[str, Tensor | None], leaves: dict[str, Tensor], params: dict[str, Tensor], inputs: Inputs
) -> dict[str, Tensor]:
    """The gradients of q, k, v, sinks and hidden states ("dq", …, "dxk") and parameters ("d NAME") that require one.

    They are those of output and weights. Where autograd has none it is 0.
    """
    wanted = {f"d{name}": x for name, x in leaves.items() if x.requires_grad}
    wanted |= {f"d {name}": x for name, x in params.items() if x.requires_grad}
    of_results = {"out": inputs.grad, "weights": inputs.weights_grad}
    ends = {name: x for name in of_results if (x := results.get(name)) is not None and x.requires_grad}
    found = [None] * len(wanted)
    if wanted and ends:
        given = [of_results[name].to(x.dtype) for name, x in ends.items()]
        found = torch.autograd.grad(list(ends.values()), list(wanted.values()), given, allow_unused=True)
    return {name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(wanted.items(), found, strict=True)}


def dropout_factors(case: Case, inputs: Inputs) -> Tensor:
    """What the dropout of a case multiplies the weights with, [B, H, Lq, Lk].

    Unit vectors as values make the output equal to the weights: a zero is a weight that was dropped. A scheme with
    value vectors would add them, so it is left out: what eager and fused drop depends on the seed and the shape alone.
    """
    units = torch.eye(case.lk, dtype=case.torch_dtype).expand(case.b, case.kv, -1, -1)
    gradients = case.context not in ("no_grad", "inference")
    with _settings(case), torch.set_grad_enabled(gradients):
        torch.default_generator.manual_seed(case.data)
        if "values=true" in case.spec:
            pos = {"q_pos": torch.arange(case.lq), "k_pos": torch.arange(case.lk)}
            out = locant.attend(inputs.q * 0, inputs.k * 0, units, dropout=case.dropout, impl=case.impl, **pos)
        else:
            leaves = [x.detach().requires_grad_(bool(case.wanted)) for x in (inputs.q, inputs.k, units)]
            found = locant.attend(*leaves, inputs.scheme, need_weights=case.need_weights, **how(case, inputs))
            out = found[0] if isinstance(found, tuple) else found
    return (out.detach() != 0).double() / (1 - case.dropout)


# ------------------------------------------------------------------------------------------------- transforms


def tangents(case: Case, inputs: Inputs) -> tuple[Tensor, ...]:
    """The directions of a forward-mode derivative."""
    g = torch.Generator().manual_seed(case.data + 2)
    return tuple(torch.randn(x.shape, generator=g).to(x.dtype) for x in (inputs.q, inputs.k, inputs.v))


def _vmapped(case: Case, inputs: Inputs) -> Results:
    """The call on one sequence at a time, vectorised over the batch by torch.func."""
    rest = {"q_pos": inputs.q_pos, "k_pos": inputs.k_pos, "mask": inputs.mask, "x_q": inputs.x_q, "x_k": inputs.x_k}
    by_row = {
        name: x is not None and x.ndim > 1 and x.shape[0] == case.b and (name != "mask" or case.mask != "QK")
        for name, x in rest.items()
    }

    def one(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> Any:
        given = {name: x[None] if by_row[name] and x is not None else x for name, x in zip(rest, others, strict=True)}
        given["x"] = passed_states(case, given.pop("x_q"), given.pop("x_k"))
        arguments = {**how(case, inputs), **given}
        found = locant.attend(q[None], k[None], v[None], inputs.scheme, need_weights=case.need_weights, **arguments)
        return tuple(x[0] for x in found) if case.need_weights else found[0]

    dims = (0, 0, 0, *(0 if by_row[name] else None for name in rest))
    found = torch.func.vmap(one, in_dims=dims)(inputs.q, inputs.k, inputs.v, *rest.values())
    out, weights = found if case.need_weights else (found, None)
    return {"out": out, "weights": weights}


def _plain_function(case: Case, inputs: Inputs) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = locant.attend(q, k, v, inputs.scheme, need_weights=case.need_weights, **how(case, inputs))
        return found[0] if isinstance(found, tuple) else found

    return function


def _vjp(case: Case, inputs: Inputs) -> Results:
    out, pull = torch.func.vjp(_plain_function(case, inputs), inputs.q, inputs.k, inputs.v)
    dq, dk, dv = pull(inputs.grad)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def _jvp(case: Case, inputs: Inputs) -> Results:
    out, moved = torch.func.jvp(_plain_function(case, inputs), (inputs.q, inputs.k, inputs.v), tangents(case, inputs))
    return {"out": out, "tangent": moved}


TRANSFORMS = {"vmap": _vmapped, "vjp": _vjp, "jvp": _jvp}


# ------------------------------------------------------------------------------------------------- surroundings


@contextmanager
def _settings(case: Case) -> Iterator[None]:
    """Small slices of the queries, as long sequences have them, if the case says so; FlexAttention not compiled.

    A compiled kernel of FlexAttention takes seconds on a CPU, and every shape needs its own.
    """
    usual = eager.CHUNK, sdpa.ROWS, flex._run_compiled
    if case.slices:
        eager.CHUNK = sdpa.ROWS = SMALL_SLICE
    flex._run_compiled = flex._run
    try:
        yield
    finally:
        eager.CHUNK, sdpa.ROWS, flex._run_compiled = usual


@torch.no_grad()
def _calls_before(case: Case, inputs: Inputs) -> None:
    """Calls that leave tables of the scheme in the cache, which the call of the case must not take for its own."""
    if case.before == "nothing" or not case.lq * case.b:
        return
    q, k, v, scheme = inputs.q, inputs.k, inputs.v, inputs.scheme
    with suppress(ValueError):  # the call of the case is refused as well, and counted
        if case.before == "shorter":
            n = max(1, min(case.lk // 2, case.lq))
            x = _some_states(inputs, slice(n), slice(n))
            locant.attend(q[:, :, :n], k[:, :, :n], v[:, :, :n], scheme, causal=case.causal_only, x=x, impl=case.impl)
        elif case.before == "steps":
            for n in range(max(1, case.lk - 3), case.lk + 1):
                x = _some_states(inputs, slice(-1, None), slice(n))
                locant.attend(q[:, :, -1:], k[:, :, :n], v[:, :, :n], scheme, causal=True, x=x, impl=case.impl)
        else:
            _call_with_other_parameters(case, inputs)


def _some_states(inputs: Inputs, queries: slice, keys: slice) -> Any:
    """The hidden states of some tokens; None if there are none of both."""
    if inputs.x_q is None or inputs.x_k is None:
        return None
    return inputs.x_q[:, queries], inputs.x_k[:, keys]


def _call_with_other_parameters(case: Case, inputs: Inputs) -> None:
    """The same call with other parameters, which are then set back in the way the case says; `same`: with the same."""
    parameters = list(inputs.scheme.parameters())
    stored = [x.clone() for x in parameters]
    for x in parameters:
        if case.before == "rest":  # all but the first number
            x.view(-1)[1:] += 1
        elif case.before != "same":
            x += 1
    try:
        locant.attend(inputs.q, inputs.k, inputs.v, inputs.scheme, **{**how(case, inputs), "dropout": 0.0})
    finally:
        for x, old in zip(parameters, stored, strict=True):
            if case.before == "data":
                x.data = old
            else:
                x.copy_(old)
