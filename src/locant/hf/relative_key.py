"""Checkpoints trained with `position_embedding_type` relative_key or relative_key_query (transformers 4).

Transformers 5 no longer has these methods but still accepts the config: it opens such a checkpoint as a model with
absolute positions, with one UNEXPECTED line in its log. Here it opens correctly:

    relative_key          q_i·a_{j−i}                    Shaw et al. without values    shaw:values=false
    relative_key_query    q_i·a_{j−i} + k_j·a_{j−i}      method 4 of Huang et al.      huang4

The tables are `….attention.self.distance_embedding.weight`, [2·max − 1, head size], shared by the heads, row
query − key + max − 1, inside 1/√head size. These checkpoints do not use their absolute table. Past the old maximum,
where transformers 4 raised an error, the last row is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from locant.hf.building import in_words, open_model
from locant.hf.checkpoint import Weights, file_of
from locant.hf.model_class import model_class
from locant.hf.swapping import exchange

SPECS = {"relative_key": "shaw:values=false,clip={}", "relative_key_query": "huang4:clip={}"}
KEY = "distance_embedding.weight"


def load(path: str | Path, auto: Any, data: dict[str, Any], weights: Weights | None, **kwargs: Any) -> PreTrainedModel:
    """Opens such a checkpoint. `data` is its config.json."""
    kind = data["position_embedding_type"]
    tables = {name: table for name, table in _weights(path).items() if name.endswith(KEY)}
    if not tables:
        raise ValueError(f"{path}: the config has position_embedding_type={kind}, but the weights have no {KEY}")
    with in_words(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    cls = model_class(auto, config, data)
    cls_ignores = cls._keys_to_ignore_on_load_unexpected or []
    cls._keys_to_ignore_on_load_unexpected = [*cls_ignores, KEY.replace(".", r"\.")]  # they are loaded here
    try:
        model, _ = open_model(cls, path, weights, **kwargs)
    finally:
        cls._keys_to_ignore_on_load_unexpected = cls_ignores
    largest = (next(iter(tables.values())).shape[0] + 1) // 2
    exchange(model, SPECS[kind].format(largest - 1))
    layers = {
        name.removesuffix(".locant"): module for name, module in model.named_modules() if name.endswith(".locant")
    }
    for name, table in tables.items():
        place = name.removesuffix(f".{KEY}")
        # A model with a head adds a prefix to the names; a base model lacks the prefix of the file.
        found = [layer for layer in layers if layer.endswith(f".{place}") or f".{place}".endswith(f".{layer}")]
        if len(found) != 1:
            raise ValueError(f"{path}: {cls.__name__} has no layer for {name}")
        own: Any = layers.pop(found[0]).table
        if own.shape[1:] != table.shape:
            raise ValueError(f"{path}: {name} has the shape {list(table.shape)}, expected {list(own.shape[1:])}")
        with torch.no_grad():
            own.copy_(table.flip(0)[None])  # their rows go by i − j
    if layers:
        raise ValueError(f"{path}: there is no {KEY} for {', '.join(layers)}")
    return model


def _weights(path: str | Path) -> dict[str, Tensor]:
    """All weights of a checkpoint in one file; old ones are often not safetensors."""
    file = file_of(path, "model.safetensors")
    if file is not None:
        return load_file(file)
    file = file_of(path, "pytorch_model.bin")
    if file is None:
        raise ValueError(f"{path}: found neither model.safetensors nor pytorch_model.bin")
    with in_words(path):
        weights: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return weights
