"""Sinusoidal absolute positions, added to the token embeddings.

    e[p, 2t] = amplitude · sin(p · theta^(−2t/d))      e[p, 2t+1] = amplitude · cos(p · theta^(−2t/d))

Vaswani et al. 2017, arXiv 1706.03762. The Gram matrix of the embedding depends on the offset alone. The model gets
token + embedding, so it is not shift-invariant.

The paper multiplies token embeddings by √d, so that tokens and positions are about equally long. Most later models do
not: GPT-2 and BERT begin with token embeddings of standard deviation 0.02, and sines of amplitude 1 are 35 times as
long. Such a model hardly sees its tokens. `sinusoidal:amplitude=0.02` restores the ratio of the paper there.
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

    def __init__(self, *, theta: float = 10000.0, amplitude: float = 1.0, d_model: int) -> None:
        super().__init__()
        check_float(self, "theta", theta, above=0)
        check_float(self, "amplitude", amplitude, above=0)
        check_int(self, "d_model", d_model, at_least=2)
        check_even(self, "d_model", d_model)
        self.theta = theta
        self.amplitude = amplitude
        self.d_model = d_model
        # Its dtype follows .to(), .half() and .double(), as the dtype of a table would.
        self.register_buffer("dtype", torch.zeros(()), persistent=False)

    def embed(self, pos: Tensor) -> Tensor:
        angle = exact(check_positions(self, pos))[..., None] * frequencies(self.d_model, self.theta, pos.device)
        waves = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)
        return (self.amplitude * waves).to(self.dtype)


def frequencies(width: int, theta: float, device: torch.device) -> Tensor:
    """Returns theta^(−2t/width) for t = 0 … width/2 − 1."""
    return theta ** -(exact(torch.arange(0, width, 2, device=device)) / width)
