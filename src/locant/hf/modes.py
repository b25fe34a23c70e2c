"""Modes that a model is put into for a while, and left as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Puts a module into eval mode; afterwards each of its parts returns to the mode it was in."""
    training = {part: part.training for part in module.modules()}
    try:
        module.eval()
        yield
    finally:
        for part, flag in training.items():
            part.training = flag


@contextmanager
def cache_kept(model: PreTrainedModel) -> Iterator[None]:
    """Restores `use_cache` in the config afterwards: Trainer turns it off and leaves it off."""
    config: Any = model.config
    before = vars(config).get("use_cache")
    try:
        yield
    finally:
        vars(config).pop("use_cache", None)
        if before is not None:
            config.use_cache = before
