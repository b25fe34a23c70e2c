"""Rotary positions from a table of sines and cosines: one per attention (GPT-J, CodeGen), or one for all (RoFormer)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locant.hf.mechanisms.base import Read, Replaced, Run, add_embedding, find
from locant.hf.methods import replace_method
from locant.schemes import Rope, Scheme


@dataclass(frozen=True)
class RotaryTable:
    """GPT-J, CodeGen: every attention has a table [positions, rotary_dim], first sines, then cosines."""

    kind: str = "rotary"
    attribute: str = "embed_positions"

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        replaced = add_embedding(stack, embed)
        for module in stack.modules():
            if isinstance(getattr(module, self.attribute, None), Tensor):
                replace_method(module, "forward", _at_zero)
                replaced.append(Replaced(module, "forward", None))
        return replaced

    def read(self, stack: nn.Module, attentions: list[nn.Module], run: Run) -> Read:
        schemes: list[Scheme] = []
        for attention in attentions:
            head_dim: Any = attention.head_dim
            table: Any = getattr(attention, self.attribute)
            schemes.append(_rope(type(stack).__name__, table, head_dim))
        return Read(self.kind, None, schemes)

    def width(self, stack: nn.Module) -> int:
        return int(stack.get_input_embeddings().weight.shape[1])  # type: ignore[operator]


@dataclass(frozen=True)
class SharedRotaryTable:
    """RoFormer: one module makes the sines and cosines [length, head_dim] for all layers."""

    path: str = "encoder.embed_positions"
    kind: str = "rotary"

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        parent, name = find(stack, self.path)
        original = getattr(parent, name)
        setattr(parent, name, Unused())  # the attention of a swapped model does not rotate
        return [Replaced(parent, name, original), *add_embedding(stack, embed)]

    def read(self, stack: nn.Module, attentions: list[nn.Module], run: Run) -> Read:
        if any(getattr(attention, "rotary_value", False) for attention in attentions):
            raise NotImplementedError(
                f"cannot read the positions of {type(stack).__name__}: it rotates values too (rotary_value=True), and "
                f"no scheme does. It can be swapped to other positions"
            )
        table: Any = stack.get_submodule(self.path).weight
        return Read(self.kind, None, [_rope(type(stack).__name__, table, table.shape[1]) for _ in attentions])

    def width(self, stack: nn.Module) -> int:
        return int(stack.get_input_embeddings().weight.shape[1])  # type: ignore[operator]


class Unused(nn.Module):
    """Replaces RoFormer's table. The model passes the result on to its layers, which ignore it."""

    def forward(self, shape: Any, past: int = 0, position_ids: Tensor | None = None) -> Tensor:
        return torch.zeros(1, 1)


def _at_zero(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of an attention that rotates all tokens by position 0, which changes nothing."""
    position_ids = kwargs.get("position_ids")
    if position_ids is None:
        raise RuntimeError(f"{type(self).__name__} received no position_ids; call it through the swapped model")
    return type(self).forward(self, *args, **{**kwargs, "position_ids": torch.zeros_like(position_ids)})


def _rope(model: str, table: Tensor, head_dim: int) -> Rope:
    """The scheme of a table [positions, 2·pairs]; raises NotImplementedError if they are not the same numbers."""
    size = table.shape[1]
    if size > head_dim:
        raise NotImplementedError(f"{model} rotates {size} dimensions of heads of size {head_dim}")
    rope = Rope(layout="interleaved", partial=size / head_dim, head_dim=head_dim)
    places = torch.arange(table.shape[0], device=table.device)
    angle = places[:, None].double() * rope.frequencies(places[:1] + 1).flatten().double()
    ours = torch.cat([angle.sin(), angle.cos()], dim=-1)
    # The angles of the table were rounded to float32: at position n they may be off by n·2^−23. A model in half
    # precision has rounded the sines and cosines as well.
    tolerance = 1e-5 + torch.finfo(table.dtype).eps / 2 + places[:, None] * 2.0**-23
    off = (ours - table.double()).abs()
    if bool((off > tolerance).any()):
        where = int((off - tolerance).amax(-1).argmax())
        raise NotImplementedError(
            f"cannot read the positions of {model}: its rotary table does not have the angles of {rope}; at position "
            f"{where} a sine or cosine is off by {float(off[where].max()):.1g}, more than rounding to {table.dtype} "
            f"explains. It can be swapped to other positions"
        )
    return rope
