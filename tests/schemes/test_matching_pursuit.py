"""Sums of Gaussians near a curve."""

import torch

from locant.schemes.matching_pursuit import gaussians


def test_planted_bumps_are_found():
    offsets = torch.arange(-63, 64)
    wanted = 3 * torch.exp(-0.5 * (offsets + 1.0) ** 2) - 2 * torch.exp(-0.01 * (offsets - 4.0) ** 2)
    counts = (64 - offsets.abs()).double()
    amplitude, sharpness, centre = gaussians(offsets, wanted[None].double(), counts, 4)
    found = (amplitude[..., None] * torch.exp(-sharpness[..., None] * (offsets - centre[..., None]) ** 2)).sum(1)[0]
    apart = found - wanted
    assert float((apart - apart.mean()).abs().max()) < 0.3  # of 3: on the grid, not yet between its points
