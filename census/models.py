"""Tiny random models, and the inputs that each of them takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from census.names import Architecture, config_class
from census.sizes import tiny

SPREAD = 0.3
"""Standard deviation of matrices: with transformers' own, positions change an output by less than rounding does."""
SPREADS = {"mobilebert": 0.1}
"""Architectures whose layers do not normalize, so that their outputs grow with the spread."""
KEPT = ("A_log", "dt_", "D", "conv1d", "inv_freq", "hash", "norm", "duration_predictor")
"""Parts of the names of tensors that keep transformers' initial values: state spaces diverge with others, and the
exponential of a random duration is more frames than memory holds."""


SIDE = 4
"""Corners of the boxes of models that read where words are on a page."""


def _boxes(ids: Tensor) -> Tensor:
    """One box for each token, the same for all: what a page looks like is not what is checked."""
    return torch.tensor([0.1, 0.1, 0.2, 0.2]).expand(*ids.shape, SIDE)


EXTRA: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "bros": lambda ids: {"bbox": _boxes(ids)},
    "udop": lambda ids: {"bbox": _boxes(ids)},
    "lxmert": lambda ids: {"visual_feats": torch.ones(len(ids), 2, 8), "visual_pos": torch.zeros(len(ids), 2, 4)},
}
"""What an architecture needs beside tokens and mask."""
PLANES = {"kyutai_speech_to_text": 3}
"""Architectures with several tokens at each place: [batch, length, planes]."""
CHANNELS = 9
"""Channels of dia."""
CODEBOOKS = {"musicgen": 4, "musicgen_melody": 4}
"""Architectures with several tokens at each place: [batch · codebooks, length]."""


def inputs(architecture: Architecture, ids: Tensor, mask: Tensor | None = None, **more: Any) -> dict[str, Any]:
    """Returns the arguments of a call.

    ids    tokens [B, L].
    mask   attention mask, if any.
    more   further arguments, such as `decoder_input_ids`.
    """
    name = architecture.name
    if name in PLANES:
        ids = ids[..., None].expand(-1, -1, PLANES[name]) % 8
    if name == "esmfold":
        ids = ids % 20  # amino acids
    given: dict[str, Any] = {"input_ids": ids.repeat_interleave(CODEBOOKS.get(name, 1), 0)}
    if mask is not None:
        given["attention_mask"] = mask
    if name == "dia":  # a decoder of sound: several channels at each place
        more["decoder_input_ids"] = more["decoder_input_ids"][..., None].expand(-1, -1, CHANNELS)
    if name in EXTRA:
        given.update(EXTRA[name](ids))
    return {**given, **more}


def build(architecture: Architecture, seed: int = 0) -> PreTrainedModel:
    """Returns a tiny model in eval mode whose positions matter. The seed alone decides its weights."""
    torch.manual_seed(seed)
    model_class = architecture.load()
    model = model_class(tiny(architecture.name, config_class(model_class))).eval().float()
    spread = SPREADS.get(architecture.name, SPREAD)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            kept = any(part.startswith(KEPT) for part in name.split("."))
            if "norm" in name.lower() and parameter.ndim == 1 and name.endswith("weight"):
                parameter.mul_(1 + 0.2 * torch.randn(parameter.shape))  # as trained ones: a norm after a rotation shows
            if kept or not parameter.requires_grad or not parameter.is_floating_point():
                continue
            if parameter.ndim > 1:
                parameter.normal_(std=spread)
            elif name.endswith("bias"):
                parameter.normal_(std=spread / 3)
        for name, module in model.named_modules():
            if is_table(module) and module.padding_idx is not None and "position" in name:
                module.weight[module.padding_idx] = 0.0  # padding has no position
    return model


def is_table(module: nn.Module) -> bool:
    """Whether a module is a table of embeddings. I-BERT's are not of PyTorch's class."""
    return isinstance(getattr(module, "weight", None), Tensor) and hasattr(module, "padding_idx")


OUTPUTS = (
    "logits",
    "last_hidden_state",
    "language_output",
    "encoder_last_hidden_state",
    "states",
    "spectrogram",
    "pooler_output",
)
"""Where the output of a model is, in this order."""

FORBIDDEN = -1e30
"""Below it a logit stands for a token that may not be written."""


@torch.no_grad()
def output(model: PreTrainedModel, given: dict[str, Any]) -> Tensor:
    """Returns the output of a model. Models that draw random numbers draw the same ones each time."""
    torch.manual_seed(0)
    result = model(**given)
    found = next(result[name] for name in OUTPUTS if result.get(name) is not None)
    return found.float().masked_fill(found < FORBIDDEN, 0.0)
