"""The proof of a swap: runs on a few tokens that show what the swapped model does with positions.

1. Every attention module received positions, and every table that was replaced is used.
2. Where a scheme acts, other positions change the output of attention. A scheme that goes by the order of tokens alone
   is taken away instead.
3. The model's own positions are gone: tokens that are all alike give queries and keys that are all alike.

If one of them fails, the swap raises and the model is as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.attention.sides import NotCausal
from locant.hf.call import AttentionCall
from locant.hf.finding import family_of
from locant.hf.listening import observing
from locant.hf.mechanisms import Carried, Embedded, EmbeddedPatches
from locant.hf.plan import Plan, StackPlan
from locant.hf.running import failing_in_words, probe_inputs, probe_length, probe_tokens, run, run_probe
from locant.schemes import Nope, Scheme

ROUNDING = 1e-6
"""Relative difference of two outputs that may be rounding."""
ALIKE = 1e-4
"""Relative difference between queries of tokens that are alike: more than rounding, less than any position makes."""


@torch.no_grad()
def prove(model: PreTrainedModel, plan: Plan) -> None:
    """Raises RuntimeError or NotImplementedError unless the swapped model does with positions what it should."""
    base, kind = model.base_model, model.config.model_type
    with _perturbed(plan.schemes()), _counting_tables(base) as unused:
        with (
            _outputs() as plain,
            _for_causal_models(kind),
            failing_in_words(model, "with a scheme in place of its own positions"),
        ):
            run_probe(base)
        with _outputs() as moved, observing(before=_elsewhere):
            run_probe(base)
    for stack in plan.stacks:
        for attention in stack.attentions:
            if base.get_submodule(attention.name) not in plain:
                raise RuntimeError(f"{kind}: {attention.name} received no positions; the model is unchanged")
    if unused():
        raise RuntimeError(
            f"{kind}: the model ignores the module that replaced its position table; the model is unchanged"
        )
    acting = {
        base.get_submodule(attention.name): scheme
        for stack in plan.stacks
        for attention, scheme in zip(stack.attentions, stack.schemes, strict=True)
        if not scheme.silent
    }
    if acting and not any(_differ(plain[module], moved[module]) for module in acting):
        scheme = next(iter(acting.values()))
        raise NotImplementedError(
            f"{kind}: with {scheme} the output does not depend on position; the model is unchanged"
        )
    _prove_silence(model, plan)


def _elsewhere(call: AttentionCall) -> AttentionCall:
    """The call at other positions, and in another order; without its scheme if that has no use for numbers."""
    if call.scheme is not None and (call.scheme.causal_only or call.scheme.reads_keys):
        return replace(call, scheme=Nope(), states=None)
    # Temperatures may begin far away.
    return replace(call, position_factor=-3 if call.scheme is None or call.scheme.mappable else 10_007)


@contextmanager
def _for_causal_models(kind: str) -> Iterator[None]:
    try:
        yield
    except NotCausal as error:
        raise NotCausal(
            error.scheme,
            f"{error.scheme} is for causal attention, and in this {kind} model tokens see later ones; choose a scheme "
            f"for both directions, or two_sided=true if it has that option. The model is unchanged",
        ) from None


@contextmanager
def _perturbed(schemes: list[Scheme]) -> Iterator[None]:
    """Adds noise to the parameters of schemes for a while: many have no effect at their initial values."""
    before = {parameter: parameter.detach().clone() for scheme in schemes for parameter in scheme.parameters()}
    generator = torch.Generator().manual_seed(0)
    try:
        for parameter in before:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.5 * noise.to(parameter.device, parameter.dtype))
        yield
    finally:
        for parameter, value in before.items():
            parameter.copy_(value)


@contextmanager
def _counting_tables(base: nn.Module) -> Iterator[Any]:
    """Yields a function that says whether a replaced table was not called."""
    kinds = (Carried, Embedded, EmbeddedPatches)
    tables = [module for module in base.modules() if isinstance(module, kinds) and module.scheme is not None]
    used: set[nn.Module] = set()
    hooks = [table.register_forward_hook(lambda module, *_: used.add(module)) for table in tables]
    try:
        yield lambda: set(tables) - used
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _outputs() -> Iterator[dict[nn.Module, Tensor]]:
    """Yields the output of every attention with positions, by module."""
    found: dict[nn.Module, Tensor] = {}

    def after(call: AttentionCall, out: Tensor) -> None:
        if call.positions is not None:
            found.setdefault(call.module, out.detach().float())

    with observing(after=after):
        yield found


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs of an attention differ by more than rounding, at their own size."""
    return bool((one - other).abs().max() > ROUNDING * one.abs().max())


# ---- the model's own positions --------------------------------------------------------------------


def _prove_silence(model: PreTrainedModel, plan: Plan) -> None:
    """Gives every attention module equal hidden states: then its queries and keys are equal, if no positions remain."""
    base, kind = model.base_model, model.config.model_type
    if getattr(base, "main_input_name", "input_ids") == "pixel_values":
        return
    names = {
        base.get_submodule(attention.name): attention.name for stack in plan.stacks for attention in stack.attentions
    }
    convolved = _convolved(model, plan)
    entry = {name for stack in plan.stacks for name in _first_of_all(stack, plan)}
    remaining: list[str] = []
    ran: set[nn.Module] = set()
    tokens = probe_tokens(base, probe_length(base))
    tokens = tokens[:, :1].expand_as(tokens).contiguous()
    inputs = probe_inputs(base, tokens)
    lengths = {x.shape[1] for name, x in inputs.items() if name.endswith("input_ids")}

    def same_states(module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = [*([kwargs["hidden_states"]] if "hidden_states" in kwargs else []), *args, *kwargs.values()]
        along = next((found for x in given if (found := _tokens_of(x, lengths)) is not None), None)
        if along is None:
            return None
        states = [x for x in given if _are_states(x, along, lengths)]
        # Without the ends: MobileBERT joins each token with its neighbours.
        inner = [x.narrow(along, 1, x.shape[along] - 2) for x in states if x.shape[along] > 2]
        # A module that runs again (ALBERT) gets what it made of the tokens, where a scheme may change values (shaw).
        if module not in ran and names[module] in entry and not all(_alike(x, along) for x in inner):
            remaining.append(f"{names[module]} (in its inputs)")
        ran.add(module)

        def constant(x: Any) -> Any:
            return x.narrow(along, 0, 1).expand_as(x) if any(x is each for each in states) else x

        return tuple(map(constant, args)), {name: constant(x) for name, x in kwargs.items()}

    def compare(call: AttentionCall) -> None:
        first = convolved.get(call.module, 0)
        if call.module in names and not (_alike(call.query, 2) and _alike(call.key[:, :, first:], 2)):
            remaining.append(names[call.module])

    hooks = [module.register_forward_pre_hook(same_states, with_kwargs=True) for module in names]
    try:
        with observing(before=compare):
            run(base, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if remaining:
        raise NotImplementedError(
            f"{kind} models cannot be swapped: their own positions still reach {remaining[0]} in a way that locant "
            f"does not know; the model is unchanged"
        )


def _convolved(model: PreTrainedModel, plan: Plan) -> dict[nn.Module, int]:
    """How many of the first tokens of an attention may have other keys: they are convolved with what is not there."""
    base, family = model.base_model, family_of(model)
    return {
        base.get_submodule(attention.name): family.convolved(base.get_submodule(stack.path))
        for stack in plan.stacks
        for attention in stack.attentions
    }


def _tokens_of(x: Any, lengths: set[int]) -> int | None:
    """The dimension of hidden states that counts tokens; None if an argument of an attention module is something else.

    [batch, tokens, width]; tokens come first in XLNet and last in SqueezeBERT.
    """
    return next((along for along in (1, 0, 2) if _are_states(x, along, lengths)), None)


def _are_states(x: Any, along: int, lengths: set[int]) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3 and x.shape[along] in lengths


def _first_of_all(stack: StackPlan, plan: Plan) -> list[str]:
    """The attention module whose inputs are token embeddings, if nothing is added to them and it is in layer 0."""
    first = stack.attentions[0].name
    number = re.search(r"\d+", first.removeprefix(stack.path))
    plain = stack.embed is None and not plan.keep_native and number is not None and int(number[0]) == 0
    return [first] if plain else []


def _alike(x: Tensor, along: int) -> bool:
    """Whether a tensor is the same at all places of a dimension. NaN, as in damaged weights, says nothing."""
    return not bool((x - x.narrow(along, 0, 1)).abs().max() > ALIKE * x.abs().max())
