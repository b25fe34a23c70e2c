"""TISA, the later version by its first author (2023, published as code).

    f(r) = log( eps + |bias| + Σ_s |amplitude_s| · sigmoid( sign(amplitude_s) · (r − offset_s) / sharpness_s ) )
           − slope_h · |r|

Sigmoid steps instead of Gaussian kernels, inside a logarithm, minus a decay like ALiBi's. The slopes are fixed. Head h
has a field of f_h positions, with f_h geometric from `min_field` to `max_field`: the decay alone reduces its weight to
1e-8 at a distance of f_h / 2. The last `free` heads have no steps and slope 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_float, check_int, exact, wide
from locant.schemes.components import Components
from locant.terms import Terms

EPS = 1e-8


class Tisa2(Scheme):
    """Log of a sum of sigmoids, with decay. Parameters: (3 · kernels + 1) · n_heads."""

    takes_reals = True

    def __init__(
        self,
        *,
        kernels: int = 21,
        min_field: float = 16.0,
        max_field: float = 1024.0,
        free: int = 0,
        n_heads: int,
    ) -> None:
        super().__init__()
        check_int(self, "kernels", kernels, at_least=0)
        check_float(self, "min_field", min_field, above=0)
        check_float(self, "max_field", max_field, above=0)
        check_int(self, "n_heads", n_heads, at_least=1)
        check_int(self, "free", free, at_least=0)
        if free > n_heads:
            raise ValueError(f"tisa2: free must be at most n_heads = {n_heads}, got {free}")
        if min_field > max_field:
            raise ValueError(f"tisa2: min_field must be at most max_field = {max_field:g}, got {min_field:g}")
        self.kernels, self.min_field, self.max_field = kernels, min_field, max_field
        self.free, self.n_heads = free, n_heads
        self.amplitude = nn.Parameter(0.01 * torch.randn(n_heads, kernels))
        self.sharpness = nn.Parameter(torch.full((n_heads, kernels), 5.0))
        self.offset = nn.Parameter(15.0 * torch.randn(n_heads, kernels))
        self.bias = nn.Parameter(torch.ones(n_heads))

    def slopes(self, device: torch.device | None = None) -> Tensor:
        """Returns the slope of the decay of each head, [H]."""
        aware = self.n_heads - self.free
        steepest, flattest = (-math.log(EPS) / (field / 2) for field in (self.min_field, self.max_field))
        step = exact(torch.arange(aware, device=device)) / max(aware - 1, 1)
        geometric = steepest * (flattest / steepest) ** step
        return torch.cat([geometric, geometric.new_zeros(self.free)])

    def terms(self, r: Tensor) -> Terms:
        return Terms(bias=self._sum(self.steps(r)).log() - self.slopes(r.device)[:, None] * r.abs())

    def steps(self, r: Tensor) -> Tensor:
        """Returns every step separately, [H, R, kernels]: the sum is inside the logarithm. Zero in free heads."""
        amplitude, sharpness, offset = (wide(x)[:, None, :] for x in (self.amplitude, self.sharpness, self.offset))
        steps = amplitude.abs() * torch.sigmoid(amplitude.sign() * (r[None, :, None] - offset) / sharpness)
        aware = torch.arange(self.n_heads, device=r.device)[:, None, None] < self.n_heads - self.free
        return steps * aware

    def _sum(self, steps: Tensor) -> Tensor:
        """[H, R], the argument of the logarithm."""
        return EPS + wide(self.bias).abs()[:, None] + steps.sum(-1)

    def components(self, r: Tensor) -> Components | None:
        if self.kernels == 0:
            return None
        steps = self.steps(r)
        meaning = "inside the logarithm"
        return Components(meaning, self._sum(steps), steps, self.amplitude, self.sharpness, self.offset)

    def parameter_count(self) -> int:
        return (3 * self.kernels + 1) * self.n_heads
