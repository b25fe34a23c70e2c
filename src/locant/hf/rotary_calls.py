"""Calls of rotary modules: cos and sin, or exp(i·angle), as a module made them in a forward pass.

A module that is called with positions can be asked for its angles at other positions (`RotaryCall.at`), so that what
was measured on a few tokens can be compared with what the model does far away.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class RotaryCall:
    """One call of a rotary module."""

    path: str  # of the module, below its stack
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def layer_type(self) -> str:
        """The layer type that the call names; "" if it names none."""
        return layer_type_of(self.args, self.kwargs)

    @property
    def columns(self) -> int:
        """The width of the output."""
        return int(tensors_of(self.output)[0].shape[-1])

    @property
    def positions(self) -> Tensor | None:
        """The positions that the call names, [..., L]."""
        return positions_of(self.args, self.kwargs)

    def at(self, positions: Tensor) -> Tensor:
        """Returns magnitude · exp(i·angle) at other positions [L], as complex numbers [L, columns], in full precision.

        A copy of the module computes it: some modules change when they see longer rows.
        """
        given = self.positions
        assert given is not None
        row = positions.to(given.device).expand(*given.shape[:-1], -1)

        def replaced(value: Any) -> Any:
            if value is given:
                return row
            return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

        module = copy.deepcopy(self.module)
        with torch.no_grad():
            output = module(*map(replaced, self.args), **{name: replaced(each) for name, each in self.kwargs.items()})
        return turns_of(output).flatten(0, -3)[0].cpu()

    def of_pairs(self, turns: Tensor, pairs: int) -> Tensor | None:
        """Returns one column for each pair, of turns [L, columns]; None if columns and pairs do not fit."""
        if self.columns == pairs:
            return turns
        if self.columns != 2 * pairs:
            return None
        for one, other in ((turns[:, :pairs], turns[:, pairs:]), (turns[:, ::2], turns[:, 1::2])):
            if torch.equal(one, other):
                return one
        return None


def tensors_of(output: Any) -> tuple[Tensor, ...]:
    """Returns cos and sin, or one complex tensor; raises TypeError if the output is neither."""
    if isinstance(output, Tensor) and output.is_complex():
        return (output,)
    if isinstance(output, (tuple, list)) and len(output) == 2:
        cos, sin = output
        if isinstance(cos, Tensor) and isinstance(sin, Tensor) and cos.shape == sin.shape and cos.is_floating_point():
            return cos, sin
    raise TypeError(f"a rotary module must return cos and sin, or a complex tensor; got {type(output).__name__}")


def is_rotary_form(output: Any) -> bool:
    """Returns whether an output has the form of rotations: two tensors of one shape, or a complex one."""
    try:
        return bool(tensors_of(output))
    except TypeError:
        return False


def turns_of(output: Any) -> Tensor:
    """Returns magnitude · exp(i·angle), complex128, with at least 3 dimensions [..., L, columns]."""
    found = tensors_of(output)
    both = found[0] if len(found) == 1 else torch.complex(found[0].double(), found[1].double())
    both = both.detach().to(torch.complex128)
    return both if both.ndim > 2 else both[None]


def sources(calls: list[RotaryCall], length: int) -> list[RotaryCall]:
    """Returns the calls whose outputs are rotations by position, of rows of this length.

    These are numbers of one modulus that change along positions. A module that only hands on what another one made is
    left out.
    """
    found: list[RotaryCall] = []
    made: set[int] = set()
    for call in calls:
        if not is_rotary_form(call.output):
            continue
        tensors = tensors_of(call.output)
        if _rotates(turns_of(call.output), length) and made.isdisjoint(map(id, tensors)):
            found.append(call)
            made.update(map(id, tensors))
    return found


def _rotates(turns: Tensor, length: int) -> bool:
    if turns.numel() == 0 or turns.shape[-2] != length:
        return False
    size = turns.abs()
    mean = float(size.mean())
    alike = mean > 0 and float((size - mean).abs().max()) < 0.02 * mean  # bfloat16 rounds cos and sin to 0.4 %
    return alike and float((turns[..., 1:, :] - turns[..., :1, :]).abs().max()) > 1e-3 * mean


def positions_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Returns the argument that holds positions: the first tensor of whole numbers."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()) and value.ndim:
            return value
    return None


def layer_type_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns the argument that names a layer type; "" if there is none."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, str)), "")


@contextmanager
def recording(modules: dict[str, nn.Module], add: Callable[[RotaryCall], None]) -> Iterator[None]:
    """Passes every call of the modules, by their paths, to `add` for as long as the block lasts."""

    def listen(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            add(RotaryCall(path, module, args, kwargs, output))

        return hook

    hooks = [module.register_forward_hook(listen(path), with_kwargs=True) for path, module in modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
