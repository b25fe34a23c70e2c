"""Builds a model from a folder, within the bounds that its weights set.

transformers builds a model on the meta device, where it takes no memory, and then fills in the weights. Between the two
`open_model` compares the model with the weights: a config that describes a larger model is refused there.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import PreTrainedModel

from locant.hf.checkpoint import CONFIG, Weights

PARTS, PARTS_PER_TENSOR = 10_000, 20
"""A model may have this many modules and parameters, and so many more for each tensor of its weights."""
SPARE = 2**24
"""Numbers that a model may have beyond its weights, such as those of a new head."""
PACKED = 16
"""Numbers that quantised weights may hold in the place of one."""


def open_model(
    cls: Any,
    name: str | Path,
    weights: Weights | None,
    *,
    prepare: Callable[[PreTrainedModel], None] = lambda model: None,
    **kwargs: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Returns `cls.from_pretrained(name, **kwargs)` and what transformers reports about the weights.

    `prepare` changes the model after it is built and before the weights are filled in. Raises ValueError if the model
    does not fit the weights.
    """

    class Loading(cls):
        """The class, with checks between building a model and filling in its weights."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with _few_parts(weights, name):
                super().__init__(*args, **kwargs)
                prepare(self)
            _check_size(self, weights, name)

    Loading.__name__, Loading.__qualname__, Loading.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    kwargs.pop("output_loading_info", None)
    with in_words(name):
        model, info = Loading.from_pretrained(name, output_loading_info=True, trust_remote_code=False, **kwargs)
    model.__class__ = cls
    return model, info


@contextmanager
def in_words(name: str | Path) -> Iterator[None]:
    """Turns what a damaged folder can raise into a ValueError that names the folder."""
    try:
        yield
    except (ImportError, NotImplementedError):
        raise
    except OSError as problem:
        if problem.errno is None or problem.filename is not None:  # of transformers, or with the name of a file
            raise
        raise ValueError(
            f"{name} cannot be opened: {problem}. Its weights may be incomplete; copy or download them again"
        ) from problem
    except ValueError as problem:
        if str(name) in str(problem):
            raise
        raise ValueError(f"{name}: {problem}") from None
    except pickle.UnpicklingError:
        raise ValueError(f"{name}: its weights are a pickle that holds more than tensors, or is damaged") from None
    except Exception as problem:
        raise ValueError(
            f"{name} cannot be opened: {type(problem).__name__}: {problem}. Its {CONFIG} and its weights must be those "
            f"of one model"
        ) from problem


@contextmanager
def _few_parts(weights: Weights | None, name: str | Path) -> Iterator[None]:
    """Raises ValueError when a model gets more modules and parameters than its weights can fill."""
    tensors = {} if weights is None else weights.tensors
    most = PARTS + PARTS_PER_TENSOR * len(tensors) if tensors else PARTS * PARTS_PER_TENSOR
    count, here = 0, threading.get_ident()

    def register(module: nn.Module, part: str, value: Any) -> None:
        nonlocal count
        count += threading.get_ident() == here
        if count > most:
            raise ValueError(
                f"{name}: {CONFIG} describes a model with more than {most:,} parts; the weights have {len(tensors):,} "
                f"tensors"
            )

    hooks = [register_module_module_registration_hook(register), register_module_parameter_registration_hook(register)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_size(model: PreTrainedModel, weights: Weights | None, name: str | Path) -> None:
    """Raises ValueError if a model is much larger than its weights."""
    if weights is None:
        return
    packed = PACKED if getattr(model.config, "quantization_config", None) is not None else 2
    sizes = {place: parameter.numel() for place, parameter in model.named_parameters()}
    if sum(sizes.values()) > packed * weights.count + SPARE:
        largest = max(sizes, key=lambda place: sizes[place])
        shape = list(model.get_parameter(largest).shape)
        raise ValueError(
            f"{name}: {CONFIG} describes a model of {sum(sizes.values()):,} numbers, but the weights have "
            f"{weights.count:,}; its largest parameter is {largest} {shape}"
        )
    extra = {place: buffer.numel() for place, buffer in model.named_buffers()}
    if sum(extra.values()) > weights.count + SPARE:
        largest = max(extra, key=lambda place: extra[place])
        raise ValueError(
            f"{name}: {CONFIG} describes a model with {sum(extra.values()):,} fixed numbers, but the weights have "
            f"{weights.count:,}; most are in {largest}"
        )
