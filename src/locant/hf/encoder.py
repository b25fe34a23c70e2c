"""The encoder of an encoder-decoder, alone, so that it can be analysed like any other encoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from locant.hf.facts import has_decoder
from locant.hf.plan import STATE, Plan, StackPlan, plan_of


@contextmanager
def encoder_of(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Yields the encoder, with its part of the plan if the whole model is swapped; other models as they are."""
    if not has_decoder(model):
        yield model
        return
    base: Any = model.base_model
    encoder: Any = base.get_encoder()
    plan, path = plan_of(model), next(name for name, module in base.named_modules() if module is encoder)
    if plan is None:
        yield encoder
        return
    encoder.__dict__[STATE] = _part(plan, path, encoder)
    try:
        yield encoder
    finally:
        del encoder.__dict__[STATE]


def _part(plan: Plan, path: str, encoder: nn.Module) -> Plan:
    """The part of a plan that concerns one stack, with names relative to it."""
    inside = set(encoder.modules())

    def seen_from_inside(stack: StackPlan) -> StackPlan:
        attentions = [replace(x, name=x.name.removeprefix(f"{path}.")) for x in stack.attentions]
        return replace(stack, path="", attentions=attentions)

    return replace(
        plan,
        stacks=[seen_from_inside(stack) for stack in plan.stacks if stack.path == path],
        replaced=[each for each in plan.replaced if each.parent in inside],
    )
