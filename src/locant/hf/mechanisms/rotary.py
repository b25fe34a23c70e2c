"""Rotary positions: cos and sin are computed once per forward and used in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locant.hf.mechanisms.base import Read, Replaced, Run, add_embedding, find
from locant.schemes import Rope, Scheme


class Unturned(nn.Module):
    """Replaces a rotary embedding: cos = 1 and sin = 0 rotate nothing."""

    def __init__(self, pairs: int) -> None:
        super().__init__()
        self.pairs = pairs

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        one = torch.ones((), dtype=x.dtype, device=x.device).expand(*position_ids.shape, 2 * self.pairs)
        return one, torch.zeros_like(one[:1, :1]).expand_as(one)


@dataclass(frozen=True)
class Rotary:
    """cos and sin made once per forward and applied in every layer (Llama and most since)."""

    path: str = "rotary_emb"
    layout: str | None = "half"  # None: unknown, so it can be silenced but not read
    kind: str = "rotary"

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        parent, name = find(stack, self.path)
        original = getattr(parent, name)
        setattr(parent, name, Unturned(_speeds(original)[0].shape[0]))
        return [Replaced(parent, name, original), *add_embedding(stack, embed)]

    def read(self, stack: nn.Module, attentions: list[nn.Module], run: Run) -> Read:
        if self.layout is None:
            raise NotImplementedError(
                f"cannot read the rotary positions of {type(stack).__name__}: "
                f"locant does not know how they pair coordinates"
            )
        rotary = stack.get_submodule(self.path)
        return Read(self.kind, None, [_rope(stack, rotary, attention, self.layout) for attention in attentions])

    def width(self, stack: nn.Module) -> int:
        return int(stack.get_input_embeddings().weight.shape[1])  # type: ignore[operator]


def _speeds(rotary: nn.Module, layer_type: str | None = None) -> tuple[Tensor, float]:
    """Radians per position, and the factor on cos and sin, that the model uses now."""
    for prefix in (f"{layer_type}_", "full_attention_", ""):
        speed = getattr(rotary, f"{prefix}inv_freq", None)
        if speed is not None:
            return speed, float(getattr(rotary, f"{prefix}attention_scaling", 1.0))
    raise NotImplementedError(
        f"{type(rotary).__name__} has no inv_freq: locant does not know this kind of rotary embedding"
    )


def _rope(stack: nn.Module, rotary: nn.Module, attention: nn.Module, layout: str) -> Rope:
    """The rotary settings of one layer, read from the config and compared with the frequencies in use."""
    config: Any = stack.config
    types = getattr(config, "layer_types", None)
    layer_type = types[attention.layer_idx] if types is not None else None
    parameters = config.rope_parameters
    if layer_type is not None and layer_type in parameters:
        parameters = parameters[layer_type]
    speed, magnitude = _speeds(rotary, layer_type)
    head_dim = int(attention.head_dim) if hasattr(attention, "head_dim") else int(attention.head_size)  # type: ignore[arg-type]

    kind = parameters.get("rope_type", "default")
    names = {"factor": "factor", "original_max_position_embeddings": "original", "beta_fast": "beta_fast",
             "beta_slow": "beta_slow", "low_freq_factor": "low", "high_freq_factor": "high"}  # fmt: skip
    options: dict[str, Any] = {ours: parameters[theirs] for theirs, ours in names.items() if parameters.get(theirs)}
    if kind == "dynamic":
        options["original"] = config.max_position_embeddings
    if kind == "default":
        options = {}
    scaling = "none" if kind == "default" else kind
    rope = Rope(
        theta=float(parameters["rope_theta"]),
        layout=layout,
        partial=2 * speed.shape[0] / head_dim,
        scaling=scaling,
        head_dim=head_dim,
        **options,
    )
    ours = rope.frequencies(torch.ones(1, dtype=torch.long)).flatten().to(speed)
    if not torch.allclose(ours, speed, rtol=1e-4, atol=0) or abs(rope.magnitude() - magnitude) > 1e-4:
        raise NotImplementedError(
            f"the rotary settings {parameters} of {type(stack).__name__} do not give the frequencies of {rope}"
        )
    return rope
