"""Short runs of a model on a few tokens, to see what it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.attention.sides import NotCausal
from locant.hf.length import named_length
from locant.hf.modes import evaluating

PROBE_LENGTH = 7
"""Tokens of a probe."""


def vocabulary(base: nn.Module) -> int:
    """Returns the number of tokens that a model knows."""
    try:
        embeddings = base.get_input_embeddings()  # type: ignore[operator]
    except NotImplementedError:  # Dia, TrOCR: transformers does not know which module of the base model it is
        embeddings = next(module for module in base.modules() if isinstance(module, nn.Embedding))
    table = getattr(embeddings, "weight", None)
    return int(base.config.vocab_size if table is None else table.shape[0])  # type: ignore[union-attr, arg-type]


def probe_tokens(base: nn.Module, length: int, stride: int = 1) -> Tensor:
    """Returns tokens [1, length], none of which is a padding token: 3, 3 + stride, …"""
    device = next(base.parameters()).device
    known = vocabulary(base)
    padding = getattr(base.config, "pad_token_id", None)
    chosen = [token for token in range(3, known + 3) if token % known != padding]
    return torch.tensor([[chosen[index * stride % len(chosen)] % known for index in range(length)]], device=device)


def probe_inputs(base: nn.Module, tokens: Tensor, **others: Any) -> dict[str, Any]:
    """Returns the arguments of a model for tokens [B, L]; those of a decoder are two fewer.

    Encoder and decoder get unequal lengths, so that cross-attention can be told apart.
    """
    inputs: dict[str, Any] = {"input_ids": tokens, **others}
    if getattr(base.config, "is_encoder_decoder", False) and hasattr(base, "decoder"):
        inputs["decoder_input_ids"] = decoder_tokens(base, tokens[:, : max(1, tokens.shape[1] - 2)])
    return inputs


def decoder_tokens(base: nn.Module, tokens: Tensor) -> Tensor:
    """Returns tokens [B, L] as the decoder of an encoder-decoder takes them: Dia's has channels, [B, L, C]."""
    if base.config.model_type != "dia":  # type: ignore[union-attr]
        return tokens
    channels: Any = base.config.decoder_config.num_channels  # type: ignore[union-attr]
    return tokens[..., None].repeat(1, 1, channels)


def _pixels(base: nn.Module) -> dict[str, Tensor]:
    """One small image."""
    config: Any = base.config
    here = next(base.parameters())
    size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
    pixels = torch.linspace(-1, 1, config.num_channels * size * size, device=here.device).sin()
    return {"pixel_values": pixels.view(1, config.num_channels, size, size).to(here.dtype)}


@torch.no_grad()
def run(base: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Returns the last hidden states, computed in eval mode."""
    with evaluating(base):
        output = base(**inputs, return_dict=True)
    hidden: Tensor = output.last_hidden_state if "last_hidden_state" in output else next(iter(output.values()))
    return hidden.float()


@contextmanager
def failing_in_words(model: PreTrainedModel, when: str) -> Iterator[None]:
    """Raises NotImplementedError with the name of the family in place of whatever goes wrong inside a model's code."""
    try:
        yield
    except (NotImplementedError, NotCausal):
        raise
    except Exception as problem:  # any: the code is that of a model nobody has tried
        raise NotImplementedError(
            f"{model.config.model_type} models cannot be swapped: {when} the model fails with "
            f"{type(problem).__name__}: {problem}"
        ) from problem


def run_probe(base: nn.Module) -> Tensor:
    """Returns the last hidden states of a few tokens (or of one small image), computed in eval mode."""
    if getattr(base, "main_input_name", "input_ids") == "pixel_values":
        return run(base, _pixels(base))
    return run(base, probe_inputs(base, probe_tokens(base, probe_length(base))))


def probe_length(base: nn.Module) -> int:
    """Seven tokens, or fewer if the model has fewer positions."""
    longest = named_length(base.config)
    if longest is None:
        return PROBE_LENGTH
    unused = (getattr(base.config, "pad_token_id", None) or 0) + 1  # rows of RoBERTa that no token has
    return max(1, min(PROBE_LENGTH, longest - unused)) if longest < PROBE_LENGTH + unused else PROBE_LENGTH
