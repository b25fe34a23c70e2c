"""Which attention a model runs: transformers' own, or locant's (the seam, `interface.attention`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from locant.hf import interface
from locant.hf.families import Family, family_of
from locant.hf.plan import plan_of


def configs(model: PreTrainedModel) -> list[Any]:
    """Returns the configs of a model and of its base model, each once; most models share one."""
    return list({id(config): config for config in (model.config, model.base_model.config)}.values())


def use_attention(model: PreTrainedModel, family: Family, implementation: str) -> None:
    """Switches a model to an attention implementation by name: ours (`interface.NAME`) or one of transformers."""
    if family.seam is None:
        model.set_attn_implementation(implementation)
        return
    (family.seam.open if implementation == interface.NAME else family.seam.close)(model.base_model)
    for config in configs(model):  # transformers would refuse: it does not know that this family has a seam
        config._attn_implementation_internal = implementation


@contextmanager
def through_seam(model: PreTrainedModel) -> Iterator[None]:
    """Runs a model's attention through the seam for as long as the block lasts, with the positions it has.

    The attention of a swapped model goes there already.
    """
    if plan_of(model) is not None:
        yield
        return
    family, implementation = family_of(model), model.config._attn_implementation
    use_attention(model, family, interface.NAME)
    try:
        yield
    finally:
        use_attention(model, family, implementation)
