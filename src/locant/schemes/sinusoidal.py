"""Sinusoidal absolute positions, added to the token embeddings.

    e[p, 2t] = sin(p · theta^(−2t/d))      e[p, 2t+1] = cos(p · theta^(−2t/d))

Vaswani et al. 2017, arXiv 1706.03762. The Gram matrix of the embedding depends on the offset alone. The model gets
token + embedding, so it is not shift-invariant.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locant.schemes.base import Scheme, check_even, check_float, check_int, check_positions, exact


class Sinusoidal(Scheme):
    """Fixed sines and cosines. Parameters: 0."""

    shift_invariant = False
    takes_reals = True
    dtype: Tensor

    def __init__(self, *, theta: float = 10000.0, d_model: int) -> None:
        super().__init__()
        check_float(self, "theta", theta, above=0)
        check_int(self, "d_model", d_model, at_least=2)
        check_even(self, "d_model", d_model)
        self.theta = theta
        self.d_model = d_model
        # Its dtype follows .to(), .half() and .double(), as the dtype of a table would.
        self.register_buffer("dtype", torch.zeros(()), persistent=False)

    def embed(self, pos: Tensor) -> Tensor:
        angle = exact(check_positions(self, pos))[..., None] * frequencies(self.d_model, self.theta, pos.device)
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2).to(self.dtype)


def frequencies(width: int, theta: float, device: torch.device) -> Tensor:
    """Returns theta^(−2t/width) for t = 0 … width/2 − 1."""
    return theta ** -(exact(torch.arange(0, width, 2, device=device)) / width)
