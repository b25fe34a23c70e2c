"""Inkling's relative logits, and the temperature of its global layers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locant.hf.mechanisms.base import Read, Replaced, Run, add_embedding, embedding_width
from locant.schemes import Inkling, Scheme

ATTENTIONS = "InklingAttention"


class NoMixture(nn.Module):
    """Replaces the layer that mixes Inkling's curves: zeros that take no memory."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, states: Tensor) -> Tensor:
        return states.new_zeros(()).expand(*states.shape[:2], self.heads)


class NoLogits(nn.Module):
    """Replaces the module that gathers Inkling's bias of every pair: nothing is added to the logits."""

    def forward(self, *args: Any) -> None:
        return None


@dataclass(frozen=True)
class RelativeLogits:
    """Inkling: every query mixes learned curves over the distance. Scale and window stay the model's."""

    kind: str = "relative logits"

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        replaced = add_embedding(stack, embed)
        for attention in _attentions(stack):
            for name, new in (("r_proj", NoMixture(attention.num_heads)), ("rel_logits_proj", NoLogits())):
                replaced.append(Replaced(attention, name, getattr(attention, name)))
                setattr(attention, name, new)
            # The module multiplies its queries by the temperature if its config enables it.
            config = attention.config
            replaced.append(Replaced(attention, "config", config))
            attention.config = copy.copy(config)
            attention.config.log_scaling_n_floor = None
        return replaced

    def read(self, stack: nn.Module, attentions: list[nn.Module], run: Run) -> Read:
        return Read(self.kind, None, [_scheme(attention) for attention in attentions])

    def own_table(self, stack: nn.Module) -> Tensor | None:
        return None

    def width(self, stack: nn.Module) -> int:
        return embedding_width(stack)


def convolved(stack: nn.Module) -> int:
    """Returns how many tokens before its own the key of a token depends on: Inkling's keys are convolved."""
    return max(int(attention.k_sconv.conv_kernel_size) for attention in _attentions(stack)) - 1


def _attentions(stack: nn.Module) -> list[Any]:
    return [module for module in stack.modules() if type(module).__name__ == ATTENTIONS]


@torch.no_grad()
def _scheme(attention: Any) -> Scheme:
    config, profiles = attention.config, attention.rel_logits_proj.proj
    width, extent = profiles.shape
    weight = attention.r_proj.weight  # [heads · width, d_model]
    options: dict[str, Any] = {"extent": extent, "width": width}
    if not attention.is_sliding and config.log_scaling_n_floor is not None:
        options |= {"alpha": float(config.log_scaling_alpha), "n0": int(config.log_scaling_n_floor)}
    scheme = Inkling(**options, n_heads=attention.num_heads, d_model=weight.shape[1]).to(weight)
    scheme.project.copy_(weight)
    scheme.profiles.copy_(profiles)
    return scheme
