"""XLNet's positions: sinusoids of the distance, projected in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locant.hf.mechanisms.base import Read, Replaced, Run, add_embedding
from locant.hf.methods import replace_method
from locant.schemes import XL, Scheme


@dataclass(frozen=True)
class ProjectedSinusoids:
    """XLNet: (q + v)·W s(i − j). A swapped model keeps u (`r_w_bias`) in its queries: q + v is then q + u + (v − u)."""

    kind: str = "relative"

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        replace_method(stack, "relative_positional_encoding", _no_sinusoids)
        return [Replaced(stack, "relative_positional_encoding", None), *add_embedding(stack, embed)]

    def read(self, stack: nn.Module, attentions: list[nn.Module], run: Run) -> Read:
        config: Any = stack.config
        for name, plain in (("bi_data", not config.bi_data), ("clamp_len", config.clamp_len <= 0)):
            if not plain:
                raise NotImplementedError(
                    f"cannot read the positions of XLNet with {name}={getattr(config, name)}; no scheme has this. The "
                    f"model can be swapped to other positions"
                )
        return Read(self.kind, None, [_scheme(attention) for attention in attentions])

    def own_table(self, stack: nn.Module) -> Tensor | None:
        return None

    def width(self, stack: nn.Module) -> int:
        return int(stack.get_input_embeddings().weight.shape[1])  # type: ignore[operator]


@torch.no_grad()
def _scheme(attention: Any) -> XL:
    scheme = XL(n_heads=attention.n_head, head_dim=attention.d_head, d_model=attention.d_model).to(attention.r)
    scheme.project.copy_(attention.r.permute(1, 2, 0))
    scheme.position_bias.copy_(attention.r_r_bias - attention.r_w_bias)
    return scheme


def _no_sinusoids(self: Any, qlen: int, klen: int, bsz: int | None = None, device: Any = None) -> Tensor:
    """No rows: what the layers project of them is empty, and nothing uses it."""
    return torch.zeros(0, bsz or 1, self.d_model, dtype=self.dtype, device=device)
