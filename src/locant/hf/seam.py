"""Which attention a model runs: transformers' own, or locant's (the seam, `interface.attention`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from locant.hf import interface
from locant.hf.families import seam_of
from locant.hf.family import Seam
from locant.hf.plan import plan_of


def configs(model: PreTrainedModel) -> list[Any]:
    """Returns the configs of a model and of its base model, each once; most models share one."""
    return list({id(config): config for config in (model.config, model.base_model.config)}.values())


def use_attention(model: PreTrainedModel, seam: Seam | None, implementation: str) -> None:
    """Switches a model to an attention implementation by name: ours (`interface.NAME`) or one of transformers."""
    if seam is None:
        model.set_attn_implementation(implementation)
        return
    (seam.open if interface.is_ours(implementation) else seam.close)(model.base_model)
    for config in configs(model):  # transformers would refuse: it does not know that this family has a seam
        config._attn_implementation_internal = implementation


@contextmanager
def through_seam(model: PreTrainedModel) -> Iterator[None]:
    """Runs a model's own attention through the seam for as long as the block lasts; its outputs stay the same.

    A swapped model already uses the seam, and so does a model inside an outer block; then this does nothing.
    """
    base: Any = model.base_model
    if interface.is_ours(base.config._attn_implementation):
        yield
        return
    seam = seam_of(model)
    before = [(config, config._attn_implementation) for config in _every_config(model)]
    try:
        use_attention(model, seam, interface.NAME)
        for config, implementation in before:  # parts of a model may have different implementations
            if config._attn_implementation == interface.NAME:
                config._attn_implementation_internal = interface.observed(implementation or "eager")
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        _leave(model, seam)


def _leave(model: PreTrainedModel, seam: Seam | None) -> None:
    """Ends a block in which the model may have been swapped: a swap gives a model copies of its configs."""
    plan = plan_of(model)
    if plan is not None:
        plan.before["implementation"] = interface.original(plan.before["implementation"])
        return
    if seam is not None:
        seam.close(model.base_model)
    for config in _every_config(model):
        config._attn_implementation_internal = interface.original(config._attn_implementation)


def _every_config(model: PreTrainedModel) -> list[Any]:
    """The configs of a model and of all its parts, each once."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return list(found.values())
