"""`Unturned` replaces a rotary module: what it returns rotates nothing. `Form` describes what the module returned."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locant.hf.rotary_calls import RotaryCall, layer_type_of, positions_of, tensors_of

PLAIN = (str, int, float, bool, list, tuple, dict)
"""Types of attributes that `Unturned` takes over."""


@dataclass(frozen=True)
class Form:
    """What a rotary module returns, as plain data.

    Either cos and sin, each [*positions, columns], or one complex tensor of that shape.
    """

    complex: bool
    columns: tuple[tuple[str, int], ...]
    """Layer type, and the width of the output for it. The layer type is "" for calls that name none."""
    dropped: int = 0
    """How many leading dimensions of the positions the output lacks (positions in several dimensions)."""


class Unturned(nn.Module):
    """Replaces a rotary module: cos = 1 and sin = 0, or the complex number 1.

    It has the config and the plain attributes of the original: some models read them (`mrope_section`).
    """

    def __init__(self, form: Form, original: nn.Module | None = None) -> None:
        super().__init__()
        for name, value in vars(original).items() if original is not None else ():
            if not name.startswith("_") and (name == "config" or isinstance(value, PLAIN)):
                self.__dict__[name] = value
        self.form = form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        positions = positions_of(args, kwargs)
        if positions is None:
            raise TypeError("the rotary module of a swapped model was called without positions")
        like = next(value for value in (*args, *kwargs.values(), positions) if isinstance(value, Tensor))
        columns = dict(self.form.columns)
        width = columns.get(layer_type_of(args, kwargs), next(iter(columns.values())))
        shape = (*positions.shape[self.form.dropped :], width)
        if self.form.complex:
            return torch.ones((), dtype=torch.complex64, device=like.device).expand(shape)
        dtype = like.dtype if like.is_floating_point() else torch.float32
        one = torch.ones((), dtype=dtype, device=like.device).expand(shape)
        return one, torch.zeros((), dtype=dtype, device=like.device).expand(shape)


def form_of_calls(calls: Iterable[RotaryCall]) -> Form:
    """Returns the form that calls of one module had."""
    columns: dict[str, int] = {}
    for call in calls:
        positions, output = call.positions, tensors_of(call.output)
        dropped = 0 if positions is None else positions.ndim + 1 - output[0].ndim
        if positions is None or dropped < 0 or positions.shape[dropped:] != output[0].shape[:-1]:
            shape = None if positions is None else list(positions.shape)
            raise NotImplementedError(
                f"locant does not know this kind of rotary embedding: {type(call.module).__name__} returned shape "
                f"{list(output[0].shape)} for positions of shape {shape}, expected [*positions, columns]"
            )
        columns[call.layer_type] = call.columns
    return Form(len(output) == 1, tuple(columns.items()), dropped)


def form_of_module(module: nn.Module) -> Form:
    """Returns the form of a rotary module that is called as transformers' own are: (x, position_ids[, layer_type]).

    The module runs on the meta device, so this works before the weights are there.
    """
    empty = copy.deepcopy(module).to("meta")
    # Without the decorator that makes frequencies depend on the length: it reads positions, and there are none.
    forward = inspect.unwrap(type(module).forward)
    config: Any = getattr(module, "config", None)
    types = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    calls, errors = [], []
    for more in ((), *((each,) for each in types)):
        args = (torch.empty(1, 1, 1, device="meta"), torch.zeros(1, 1, dtype=torch.long, device="meta"), *more)
        try:
            call = RotaryCall("", module, args, {}, forward(empty, *args))
            form_of_calls([call])
            calls.append(call)
        except (TypeError, AttributeError, NotImplementedError, RuntimeError, KeyError, IndexError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    if not calls:
        raise NotImplementedError(
            f"locant does not know this kind of rotary embedding: {type(module).__name__} cannot be called with "
            f"hidden states and position_ids ({errors[0]})"
        )
    return form_of_calls(calls)
