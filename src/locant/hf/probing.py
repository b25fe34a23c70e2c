"""Short runs of a model that show which attention modules it has, and whether they use their schemes.

Attention modules are not listed per family. A probe records which modules call the seam; a model that does not call it
is refused, whatever its name.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.hf.call import AttentionCall
from locant.hf.families import OUTSIDE, family_of
from locant.hf.family import Family
from locant.hf.length import named_length
from locant.hf.listening import observing
from locant.hf.modes import evaluating
from locant.hf.plan import Attention
from locant.hf.seam import through_seam

PROBE_LENGTH = 7
"""Tokens of a probe."""


def find_attentions(model: PreTrainedModel, family: Family) -> dict[str, list[Attention]]:
    """Returns the self-attention modules of each stack in the order they run, found by running the model once."""
    base = model.base_model
    names = {module: name for name, module in base.named_modules()}
    paths = family.stacks(base)
    calls: dict[str, list[Attention]] = {path: [] for path in paths}

    def record(call: AttentionCall) -> None:
        module, query, key = call.module, call.query, call.key
        name = names.get(module)
        lengths = query.shape[2], key.shape[2]
        for path in paths:
            # The probe gives encoder and decoder unequal lengths, so that cross-attention can be told apart.
            if name is not None and (not path or name.startswith(f"{path}.")) and lengths[0] == lengths[1]:
                calls[path].append(Attention(name, query.shape[1], query.shape[3]))
                if not hasattr(module, "is_causal"):
                    kind = model.config.model_type
                    raise NotImplementedError(
                        f"{kind} models cannot be swapped: their attention modules have no attribute is_causal"
                    )

    with through_seam(model), observing(before=record):
        run_probe(base)
    for path, found in calls.items():
        expected = _layers(base.get_submodule(path))
        if len(found) == 0 or (expected is not None and len(found) != expected):
            kind = model.config.model_type
            raise NotImplementedError(
                f"{kind} models cannot be swapped: {len(found)} of {expected} layers called the attention; {OUTSIDE}"
            )
    return {path: list(dict.fromkeys(found)) for path, found in calls.items()}  # ALBERT runs one module many times


def _layers(stack: nn.Module) -> int | None:
    if isinstance(getattr(stack, "layers", None), nn.ModuleList):  # BART: one number for two stacks
        return len(stack.layers)  # type: ignore[arg-type]
    for name in ("num_hidden_layers", "num_layers"):
        number = getattr(stack.config, name, None)
        if isinstance(number, int):
            return number
    return None


@torch.no_grad()
def run_probe(base: nn.Module) -> Tensor:
    """Returns the last hidden states of a few tokens (or of one small image), computed in eval mode."""
    with evaluating(base):
        device = next(base.parameters()).device
        if getattr(base, "main_input_name", "input_ids") == "pixel_values":
            config: Any = base.config
            size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
            pixels = torch.linspace(-1, 1, config.num_channels * size * size, device=device).sin()
            inputs = {"pixel_values": pixels.view(1, config.num_channels, size, size).to(next(base.parameters()).dtype)}
        else:
            vocabulary = base.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
            length = _probe_length(base)
            tokens = (torch.arange(3, 3 + length, device=device) % vocabulary)[None]
            inputs = {"input_ids": tokens}
            if getattr(base.config, "is_encoder_decoder", False) and hasattr(base, "decoder"):
                inputs["decoder_input_ids"] = tokens[:, : max(1, length - 2)]
        output = base(**inputs)
    hidden: Tensor = output.last_hidden_state if "last_hidden_state" in output else output.logits
    return hidden.float()


def _probe_length(base: nn.Module) -> int:
    """Seven tokens, or fewer if the model has fewer positions."""
    longest = named_length(base.config)
    if longest is None:
        return PROBE_LENGTH
    with suppress(NotImplementedError):  # RoBERTa's positions start at 2
        family = family_of(base)  # type: ignore[arg-type]
        longest -= family.shift(base.get_submodule(family.stacks(base)[0]))
    return max(1, min(PROBE_LENGTH, longest))
