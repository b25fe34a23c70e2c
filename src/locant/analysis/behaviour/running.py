"""Runs of a model for the measurements of this package, and checks of their inputs."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.hf.facts import limits


def checked(model: PreTrainedModel, ids: Tensor, *, sequences: int, length: int) -> Tensor:
    """Returns ids on the model's device; raises ValueError where a measurement cannot use them."""
    if getattr(model.base_model, "main_input_name", "input_ids") != "input_ids":
        raise ValueError(f"{type(model).__name__} does not take token ids; use a model of text")
    if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"ids must be integers [sequences, tokens]; got {ids.dtype} {list(ids.shape)}")
    if ids.shape[0] < sequences:
        raise ValueError(f"too few sequences: got {ids.shape[0]}, need {sequences} or more")
    if ids.shape[1] < length:
        raise ValueError(f"too short: got sequences of {ids.shape[1]} tokens, need {length} or more")
    size = vocabulary(model)
    if int(ids.min()) < 0 or int(ids.max()) >= size:
        raise ValueError(f"ids must be in 0 … {size - 1}; got {int(ids.min())} … {int(ids.max())}")
    config: Any = model.config
    padding = getattr(config, "pad_token_id", None)
    others = [getattr(config, name, None) for name in ("eos_token_id", "bos_token_id")]
    if padding is not None and padding not in others and bool((ids == padding).any()):
        raise ValueError(f"ids contain padding (token {padding}); cut all texts to the length of the shortest")
    return ids.long().to(next(model.parameters()).device)


def check_length(model: PreTrainedModel, length: int) -> None:
    """Raises ValueError if a model has fewer than `length` positions."""
    limit, _ = limits(model)
    if limit is not None and length > limit:
        raise ValueError(f"too long: got {length} tokens, the model has {limit} positions")


def shuffled(ids: Tensor, first: int, end: int, generator: torch.Generator) -> Tensor:
    """Returns ids with the tokens first … end − 1 of each sequence in a random order of its own."""
    order = torch.rand(ids.shape[0], end - first, generator=generator).argsort(-1).to(ids.device)
    return torch.cat([ids[:, :first], ids[:, first:end].gather(1, order), ids[:, end:]], dim=1)


def run(module: nn.Module, ids: Tensor, **given: Any) -> Any:
    """Returns the output of a model or of one of its stacks."""
    return module(input_ids=ids, return_dict=True, **given)


def finite(hidden: Tensor) -> Tensor:
    """Returns an output in float64; raises ValueError if it contains NaN or infinity."""
    if not bool(hidden.isfinite().all()):
        raise ValueError("the outputs of the model contain NaN or infinity; check its weights")
    return hidden.double()


def pooled(stack: nn.Module, ids: Tensor) -> Tensor:
    """Returns the mean of the last hidden states of each sequence, [B, width]."""
    return finite(run(stack, ids).last_hidden_state).mean(1)


def has_head(model: PreTrainedModel) -> bool:
    """Whether a model has a head that predicts tokens."""
    return model is not model.base_model and model.get_output_embeddings() is not None


def losses(model: PreTrainedModel, ids: Tensor, targets: int) -> Tensor:
    """Returns the mean loss of the last `targets` tokens of each sequence, [B]."""
    logits = finite(run(model, ids).logits)[:, -targets - 1 : -1]
    found = F.cross_entropy(logits.flatten(0, 1), ids[:, -targets:].flatten(), reduction="none")
    return found.view(ids.shape[0], targets).mean(1)


def vocabulary(model: PreTrainedModel) -> int:
    """Returns how many tokens a model has embeddings for."""
    tokens: Any = model.get_input_embeddings()
    return int(tokens.weight.shape[0])


def standard_error(values: Tensor) -> float:
    """Returns the standard error of the mean of independent values."""
    return float(values.std() / math.sqrt(len(values)))
