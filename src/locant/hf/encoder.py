"""The encoder of an encoder-decoder as a model by itself, which can be looked at like any other encoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from locant.hf.plan import STATE, Plan, StackPlan, plan_of


def has_decoder(model: PreTrainedModel) -> bool:
    """Whether a model is an encoder together with a decoder; the encoder of one by itself is not."""
    return bool(getattr(model.config, "is_encoder_decoder", False)) and hasattr(model.base_model, "decoder")


@contextmanager
def encoder_of(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The encoder, which for the moment knows the plan that the whole was swapped by; other models as they are."""
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
    """What a plan says of one stack, with names as seen from there."""
    inside = set(encoder.modules())

    def seen_from_inside(stack: StackPlan) -> StackPlan:
        attentions = [replace(x, name=x.name.removeprefix(f"{path}.")) for x in stack.attentions]
        return replace(stack, path="", attentions=attentions)

    return replace(
        plan,
        stacks=[seen_from_inside(stack) for stack in plan.stacks if stack.path == path],
        replaced=[each for each in plan.replaced if each.parent in inside],
    )
