"""`attach` adds the schemes and removes native positions; `detach` restores the model bit for bit."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.hf import interface
from locant.hf.families import seam_of
from locant.hf.finding import family_of
from locant.hf.following import follow, unfollow
from locant.hf.length import named_length
from locant.hf.methods import replace_method
from locant.hf.plan import ANY_LENGTH, STATE, Plan, current_schemes, plan_of
from locant.hf.seam import configs, use_attention
from locant.hf.states import hold, release

Save = Callable[..., None]
"""The `save_pretrained` of a swapped model."""


def attach(model: PreTrainedModel, plan: Plan, save: Save) -> None:
    """Removes the native positions, adds the schemes and switches the attention.

    `save` replaces the model's `save_pretrained`.
    """
    family, base = family_of(model), model.base_model
    config: Any = base.config
    plan.replaced = []
    plan.before = {"implementation": config._attn_implementation}
    base.__dict__[STATE] = plan
    owners: dict[int, nn.Module] = {}
    use_attention(model, seam_of(model), interface.NAME)
    for stack_plan in plan.stacks:
        stack = base.get_submodule(stack_plan.path)
        plan.replaced += family.mechanism.silence(stack, stack_plan.embed, plan.keep_native)
        for attention, scheme in zip(stack_plan.attentions, stack_plan.schemes, strict=True):
            module = base.get_submodule(attention.name)
            if id(scheme) in owners:  # shared: it belongs to the first module that has it
                module.__dict__[interface.OWNER] = owners[id(scheme)]
                module.__dict__[interface.NAME] = scheme  # so that people find it there; not a submodule
            else:
                module.add_module(interface.NAME, scheme)
                owners[id(scheme)] = module
            if scheme.reads:
                hold(module)
            module.__dict__["locant_impl"] = plan.impl
            module.__dict__[interface.CAUSAL] = family.causal.get(
                stack_plan.path, bool(getattr(module, "is_causal", True))
            )
        follow(
            stack, count=family.count, shift=family.shift(stack), native_count=stack_plan.native_count,
            attention_by_index=family.attention_by_index,
        )  # fmt: skip
    if named_length(config) is not None:
        plan.before["max_position_embeddings"] = named_length(config)
    set_length(model, plan)
    for config in configs(model):
        config.locant = plan.to_config()
    for module in {model, base}:
        replace_method(module, "save_pretrained", save)
    base.register_state_dict_pre_hook(_not_as_a_part)


def set_length(model: PreTrainedModel, plan: Plan) -> None:
    """Writes the number of positions that a swapped model has into its configs."""
    for config in configs(model):
        if named_length(config) is not None and (not plan.keep_native or plan.replaced):
            kept = plan.before["max_position_embeddings"] if _keeps_table(model, plan) else ANY_LENGTH
            config.max_position_embeddings = min(plan.max_length() or ANY_LENGTH, kept)


def _keeps_table(model: PreTrainedModel, plan: Plan) -> bool:
    """Whether a table of the model itself, which limits the length, is still in use."""
    mechanism, base = family_of(model).mechanism, model.base_model
    stacks = [base.get_submodule(stack.path) for stack in plan.stacks] if plan.keep_native else []
    return any(mechanism.own_table(stack) is not None for stack in stacks)


def detach(model: PreTrainedModel) -> Plan:
    """Restores the model bit for bit, also after an `attach` that failed half-way, and returns its plan."""
    plan = plan_of(model)
    assert plan is not None
    base = model.base_model
    here = next(base.parameters())
    for stack_plan in plan.stacks:
        unfollow(base.get_submodule(stack_plan.path))
        stack_plan.schemes = current_schemes(model, stack_plan)
        for attention in stack_plan.attentions:
            module = base.get_submodule(attention.name)
            module.__dict__.pop(interface.OWNER, None)
            module.__dict__.pop(interface.NAME, None)
            module._modules.pop(interface.NAME, None)
            release(module)
            module.__dict__.pop("locant_impl", None)
            module.__dict__.pop(interface.CAUSAL, None)
    for replaced in reversed(plan.replaced):
        if replaced.original is not None and not plan.native_is_lost:
            _move(replaced.original, here)  # the model may have been moved since
        replaced.put_back()
    use_attention(model, seam_of(model), plan.before["implementation"])
    for config in configs(model):
        if "max_position_embeddings" in plan.before:
            config.max_position_embeddings = plan.before["max_position_embeddings"]
        config.__dict__.pop("locant", None)
    base.__dict__.pop(STATE, None)
    for key in [key for key, hook in base._state_dict_pre_hooks.items() if hook is _not_as_a_part]:
        del base._state_dict_pre_hooks[key]
    for module in {model, base}:
        module.__dict__.pop("save_pretrained", None)
    return plan


def _not_as_a_part(base: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raises when an outer model is saved whose inner model was swapped alone: it would write a plain folder.

    A module has no reference to the module that contains it, so the model being saved is read from the call stack.
    """
    frame = sys._getframe() if prefix else None
    while frame is not None:
        saving = frame.f_locals.get("self") if frame.f_code.co_name == "save_pretrained" else None
        if isinstance(saving, PreTrainedModel):
            if "save_pretrained" in saving.__dict__:
                return
            raise ValueError(
                f"only a part of this {type(saving).__name__} was swapped ({prefix.rstrip('.')}), so it would "
                f"be saved as a plain model with the wrong positions; swap the whole model: locant.swap(model, …)"
            )
        frame = frame.f_back


def _move(original: Any, here: Tensor) -> None:
    if isinstance(original, Tensor):
        original.data = original.data.to(here.device, here.dtype)
    elif not isinstance(original, nn.Module):
        return
    elif list(original.parameters()):
        original.to(here.device, here.dtype)
    else:  # frequencies of a rotary embedding keep their precision
        original.to(here.device)


def own_config(model: PreTrainedModel) -> None:
    """Copies the configs of a model: switching its attention must not affect another model that shares them."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if config is not None:
            module.config = copy.deepcopy(config, memo)
