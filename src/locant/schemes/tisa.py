"""TISA, translation-invariant self-attention. Wennberg & Henter, ACL 2021, arXiv 2106.01950.

    logit_ij = scale · q_i·k_j + f(r)        f(r) = Σ_s amplitude_s · exp(−|sharpness_s| · (r − offset_s)²)

The bias is a sum of a few Gaussian kernels over the offset for every head, with three parameters per kernel. It works
at any length. `kernels=0` has no effect.

Past the offsets of its training the bias dies out, and far keys are all alike. A causal model that reads on then loses
some of its quality (docs/results: 0.12 nats at 16 times its length). `tisa+alibi:slopes=learned` keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_int, wide
from locant.schemes.components import Components
from locant.schemes.matching_pursuit import gaussians
from locant.terms import Terms

FLATTEST = 1e-5
"""Sharpness below which a kernel counts as flat, in the scale of the parameters."""


class Tisa(Scheme):
    """Radial basis functions of the offset. Parameters: 3 · kernels · n_heads."""

    takes_reals = True

    def __init__(self, *, kernels: int = 5, n_heads: int) -> None:
        super().__init__()
        check_int(self, "kernels", kernels, at_least=0)
        check_int(self, "n_heads", n_heads, at_least=1)
        self.kernels, self.n_heads = kernels, n_heads
        # The authors' initialization.
        self.amplitude = nn.Parameter(0.1 + 0.01 * torch.randn(n_heads, kernels))
        self.sharpness = nn.Parameter(0.1 + 0.01 * torch.randn(n_heads, kernels))
        self.offset = nn.Parameter(5.0 * torch.randn(n_heads, kernels))

    def terms(self, r: Tensor) -> Terms:
        return Terms(bias=self.bumps(r).sum(-1))

    def bumps(self, r: Tensor) -> Tensor:
        """Returns every kernel separately, [H, R, kernels]; f is their sum."""
        amplitude, sharpness, offset = (wide(x)[:, None, :] for x in (self.amplitude, self.sharpness, self.offset))
        distance = r[None, :, None] - offset
        # e^−80 is negligible in a logit, and CPUs are ten times slower on values below the smallest normal float.
        return amplitude * torch.exp((-sharpness.abs() * distance**2).clamp(min=-80.0))

    def parameter_count(self) -> int:
        return 3 * self.kernels * self.n_heads

    def components(self, r: Tensor) -> Components | None:
        if self.kernels == 0:
            return None
        bumps = self.bumps(r)
        return Components("added to the logit", bumps.sum(-1), bumps, self.amplitude, self.sharpness, self.offset)

    def parameter_scale(self, name: str) -> Tensor | float:
        """A kernel is 1/√sharpness wide, and sharpness spans four decades in a trained model."""
        sharpness = self.sharpness.detach().abs().clamp(min=FLATTEST)
        return {"sharpness": sharpness, "offset": 1 / sharpness.sqrt()}.get(name, 1.0)

    @property
    def can_start_from_curve(self) -> bool:
        return self.kernels > 0

    def start_from_curve(self, offsets: Tensor, bias: Tensor, weight: Tensor) -> None:
        amplitude, sharpness, centre = gaussians(offsets, bias, weight, self.kernels)
        self.amplitude.data.copy_(amplitude)
        self.sharpness.data.copy_(sharpness)
        self.offset.data.copy_(centre)

    @classmethod
    def from_published(cls, state: Mapping[str, Tensor]) -> Tisa:
        """Returns a scheme that computes the same as the authors' published module.

        Their code evaluates the kernels at i − j − 1 = −r − 1, mirrored and shifted by one against the paper:
        (−r − 1 − c)² = (r − (−c − 1))², so the same curve has offset −(c + 1). `state` is the module's
        state_dict: kernel_offsets, kernel_amplitudes, kernel_sharpness, each [kernels, n_heads].
        """
        offsets = state["kernel_offsets"]
        scheme = cls(kernels=offsets.shape[0], n_heads=offsets.shape[1]).to(offsets)
        with torch.no_grad():
            scheme.offset.copy_(-(offsets.mT + 1))
            scheme.amplitude.copy_(state["kernel_amplitudes"].mT)
            scheme.sharpness.copy_(state["kernel_sharpness"].mT)
        return scheme

    def to_published(self) -> dict[str, Tensor]:
        """Returns the state_dict with which the authors' published module computes the same as this scheme."""
        return {
            "kernel_offsets": -(self.offset.detach().mT + 1),
            "kernel_amplitudes": self.amplitude.detach().mT.clone(),
            "kernel_sharpness": self.sharpness.detach().mT.clone(),
        }
