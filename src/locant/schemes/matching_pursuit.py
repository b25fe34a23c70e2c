"""Approximates curves by sums of Gaussians: orthogonal matching pursuit over a grid of centres and sharpnesses.

Each step adds the Gaussian that explains most of the residual, and then solves for all amplitudes again (Pati et al.
1993). Curves are compared up to a constant, which softmax ignores.
"""

from __future__ import annotations

import torch
from torch import Tensor

FAR_CENTRES = (-64.0, -48.0, -32.0, -24.0, 24.0, 32.0, 48.0, 64.0)
"""Centres in addition to −16 … 16."""
RIDGE = 1e-6
"""Added to the diagonal of the normal equations: neighbouring Gaussians are nearly equal."""


def gaussians(offsets: Tensor, curves: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns amplitude, sharpness and centre [H, count] of Gaussians whose sum is near the curves [H, R].

    offsets [R], weight [R] of each offset. The sum of a head is Σ amplitude · exp(−sharpness · (r − centre)²).
    """
    r = offsets.double()
    centres = torch.cat([torch.arange(-16, 17.0), torch.tensor(FAR_CENTRES)]).double()
    sharpnesses = torch.logspace(-4, 0.3, 12, dtype=torch.float64)
    grid = torch.cartesian_prod(sharpnesses, centres)  # [G, 2]
    atoms = torch.exp(-grid[:, :1] * (r - grid[:, 1:]) ** 2)  # [G, R]
    root = (weight / weight.sum()).sqrt()
    constant = root / root.norm()

    def projected(x: Tensor) -> Tensor:
        """Weights x [..., R] and removes its constant part."""
        x = x * root
        flat: Tensor = x - (x @ constant)[..., None] * constant
        return flat

    flat, goal = projected(atoms), projected(curves.double())
    norms = flat.norm(dim=-1).clamp(min=1e-9)
    chosen: list[Tensor] = []  # one [H] per step: indices into the grid
    amplitude = torch.zeros(goal.shape[0], 0, dtype=torch.float64)
    residual = goal
    for _ in range(count):
        gain = (residual @ flat.T).abs() / norms  # [H, G]
        if chosen:
            gain.scatter_(1, torch.stack(chosen, 1), 0.0)
        chosen.append(gain.argmax(-1))
        basis = flat[torch.stack(chosen, 1)]  # [H, n, R]
        gram = basis @ basis.mT + RIDGE * torch.eye(len(chosen), dtype=torch.float64)
        amplitude = torch.linalg.solve(gram, (basis @ goal[..., None]))[..., 0]
        residual = goal - (amplitude[:, None] @ basis)[:, 0]
    picked = grid[torch.stack(chosen, 1)]
    return amplitude, picked[..., 0], picked[..., 1]
