"""Facts about a model: is it causal, does it have a decoder, how many positions does it have."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.hf.families import FAMILIES
from locant.hf.finding import family_of
from locant.hf.following import FOLLOW, Following
from locant.hf.length import named_length
from locant.hf.mechanisms import Table
from locant.hf.modes import evaluating
from locant.hf.plan import ANY_LENGTH, plan_of


class Limits(NamedTuple):
    """How long inputs may be."""

    positions: int | None  # that the model has; None: any number
    trained: int | None  # that its config names


def has_decoder(model: PreTrainedModel) -> bool:
    """Whether a model is an encoder with a decoder. The encoder of such a model, taken alone, is not."""
    return bool(getattr(model.config, "is_encoder_decoder", False)) and hasattr(model.base_model, "decoder")


def layer_stack(model: PreTrainedModel) -> nn.Module:
    """Returns the module that runs the layers; of an encoder-decoder the encoder's.

    For a family that locant does not know this is the base model.
    """
    base = model.base_model
    try:
        return base.get_submodule(family_of(model).stacks(base)[0])
    except NotImplementedError:
        return base


def first_position(model: PreTrainedModel) -> int:
    """Returns the number that position_ids start at: 0, or 2 for RoBERTa. NotImplementedError for unknown families."""
    return family_of(model).shift(layer_stack(model))


def takes_position_ids(model: PreTrainedModel) -> bool:
    """Whether the stack of layers goes by position_ids. T5's does once it is swapped to positions that need them."""
    stack = layer_stack(model)
    following: Following | None = stack.__dict__.get(FOLLOW)
    swapped = following is not None and not following.native_count
    family = FAMILIES.get(stack.config.model_type)  # type: ignore[union-attr, arg-type]
    if not swapped and family is not None and family.ignores_ids:
        return False
    return swapped or "position_ids" in inspect.signature(type(stack).forward).parameters


def limits(model: PreTrainedModel) -> Limits:
    """Returns how many positions a model has, and how many its config names."""
    config: Any = model.config
    trained = named_length(config)
    try:
        plan, family = plan_of(model), family_of(model)
    except NotImplementedError:  # unknown to locant: assume nothing beyond the config
        return Limits(trained, trained)
    stack = layer_stack(model)
    if plan is not None:
        trained = plan.before.get("max_position_embeddings", trained)
    found = [] if plan is None else [plan.max_length()]
    if plan is None or plan.keep_native:
        table = family.mechanism.own_table(stack)
        found.append(None if table is None else table.shape[0])
    if isinstance(family.mechanism, Table) and trained is not None:
        trained -= family.shift(stack)  # RoBERTa's 514 are 512
    known = [limit for limit in found if limit is not None]
    return Limits(min(known) if known else None, trained)


def maximum_length(model: PreTrainedModel, before: int = ANY_LENGTH) -> int:
    """Returns the tokens at which inputs of a swapped model are to be truncated; ANY_LENGTH if it reads any number.

    Inputs of an encoder-decoder are those of its encoder. The decoder may have fewer positions.

    before   the maximum before the swap. It still holds if the model kept its own positions.
    """
    plan = plan_of(model)
    if plan is not None and not plan.keep_native:
        return min(ANY_LENGTH, plan.stacks[0].max_length() or ANY_LENGTH)
    known = [named_length(model.config), limits(model).positions, before]
    return min([ANY_LENGTH, *(limit for limit in known if limit is not None)])


def is_causal(model: PreTrainedModel, ids: Tensor) -> bool:
    """Whether a different last token leaves the states of earlier tokens unchanged. `ids` is [sequences, tokens]."""
    stack = layer_stack(model)
    some = ids[:2, :8]
    other = some.clone()
    other[:, -1] = some[:, 0].where(some[:, 0] != some[:, -1], (some[:, -1] - 1).abs())  # any other token
    with evaluating(model), torch.no_grad():
        before, after = (_states(stack, x)[:, :-1] for x in (some, other))
    return bool((before - after).abs().max() <= 1e-6 * before.abs().max())


def _states(stack: nn.Module, ids: Tensor) -> Tensor:
    hidden: Tensor = stack(input_ids=ids, return_dict=True).last_hidden_state
    if not bool(hidden.isfinite().all()):
        raise ValueError("the outputs of the model contain NaN or infinity; check its weights")
    return hidden.double()
