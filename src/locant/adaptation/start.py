"""Where a fit starts: the least-squares answer, for schemes whose own start is far from any good one.

The Toeplitz bias nearest to the difference D of the logits, row by row up to a constant that a softmax does not notice:

    argmin_b Σ_rows Σ_j ( D_ij − b(j − i) − ρ_i )²

is linear: N b = g, with N the centred counts of the offsets that rows see, and g the row-centred D summed by offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from locant.attention import eager
from locant.attention.request import prepare
from locant.schemes import Scheme, Shaw, Tisa, Toeplitz

if TYPE_CHECKING:
    from locant.attention.request import Request

READ = 256
"""As far as a curve is read from parameters."""
FLOOR = 1e-4
"""Weights below this count as this: their logarithm has no information that attention uses."""


def start(scheme: Scheme, requests: list[Request], goal: list[Tensor], own: Scheme) -> None:
    """Sets the parameters of a scheme to where its fit should start; `own` is what the model had in this place."""
    parts = [part for part in scheme.modules() if isinstance(part, Scheme)]
    for part in parts:
        if isinstance(part, Shaw) and part.values:  # values have nothing to do with where attention looks
            part.value_table.data.zero_()
    curved = [part for part in parts if isinstance(part, Toeplitz) or (isinstance(part, Tisa) and part.kernels)]
    if len(curved) == 1:  # of two, who knows which is to do what
        offsets, bias, counts = read(own, requests) if is_bias(own) else curve(requests, goal)
        _follow(curved[0], offsets, bias, counts)


def _follow(scheme: Scheme, offsets: Tensor, bias: Tensor, counts: Tensor) -> None:
    if isinstance(scheme, Toeplitz):
        near = offsets.abs() <= scheme.clip
        low, high = int(offsets[near].min()) + scheme.clip, int(offsets[near].max()) + scheme.clip
        table = torch.zeros(scheme.table.shape, dtype=torch.float64)
        table[:, (offsets + scheme.clip)[near]] = bias[:, near]
        table[:, :low] = table[:, low : low + 1]  # what was never seen is as the farthest that was
        table[:, high + 1 :] = table[:, high : high + 1]
        scheme.table.data.copy_(table)
    elif isinstance(scheme, Tisa):
        amplitude, sharpness, offset = kernels(offsets, bias, counts, scheme.kernels)
        scheme.amplitude.data.copy_(amplitude)
        scheme.sharpness.data.copy_(sharpness)
        scheme.offset.data.copy_(offset)


def is_bias(scheme: Scheme) -> bool:
    """Whether a scheme is a bias by offset and nothing else: then its curve can be read off."""
    r = torch.zeros(1, dtype=torch.long, device=next(scheme.parameters(), torch.empty(0)).device)
    return scheme.terms(r).used() == ("bias",) and type(scheme).rotate is Scheme.rotate


def read(own: Scheme, requests: list[Request]) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets, the bias there, exactly, and how much each matters: as in `curve`, from the parameters."""
    offsets = torch.arange(-READ, 1 if requests[0].causal else READ + 1)
    bias = own.terms(offsets.to(requests[0].q.device)).bias
    assert bias is not None
    heads = requests[0].q.shape[1]
    return offsets, bias.detach().cpu().double().expand(heads, -1), 1.0 / (1 + offsets.abs()).double()


def units(scheme: nn.Module) -> dict[nn.Parameter, Tensor | float]:
    """How far each parameter of schemes that wants a gradient has to go to make a difference, by its scheme."""
    return {  # of a sum first, then of its parts, which know better
        parameter: unit(part, name)
        for part in scheme.modules()
        if isinstance(part, Scheme)
        for name, parameter in part.named_parameters()
        if parameter.requires_grad
    }


def unit(scheme: Scheme, name: str) -> Tensor | float:
    """How far a parameter has to go to make a difference."""
    if isinstance(scheme, Tisa) and name == "sharpness":
        return scheme.sharpness.detach().abs().clamp(min=1e-5)
    if isinstance(scheme, Tisa) and name == "offset":
        return 1 / scheme.sharpness.detach().abs().clamp(min=1e-5).sqrt()
    return 1.0


def curve(requests: list[Request], goal: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets [R] that were seen, the Toeplitz bias [H, R] nearest in least squares, and how often each was seen."""

    reach = max(max(p.shape[2], p.shape[3]) for p in goal) - 1
    heads, size = goal[0].shape[1], 2 * reach + 1
    normal = torch.zeros(size, size, dtype=torch.float64)
    right = torch.zeros(heads, size, dtype=torch.float64)
    counts = torch.zeros(size, dtype=torch.float64)
    for request, p in zip(requests, goal, strict=True):
        made = prepare(
            request.q, request.k, request.v, None, causal=request.causal, mask=request.mask, scale=request.scale
        )
        difference = (p.clamp(min=FLOOR).log() - eager.logits(made)).cpu().double()  # [B, H, Lq, Lk]
        visible = request.visible()
        # [1, Lq, Lk]: sequences are not padded, so that all of a batch see the same
        seen = (torch.ones_like(p[:1, 0]) if visible is None else visible[:1, 0]).cpu().double()
        number = seen.sum(-1, keepdim=True).clamp(min=1)
        centred = (difference - (difference * seen[:, None]).sum(-1, keepdim=True) / number[:, None]) * seen[:, None]
        r = (request.k_pos[:, None, :] - request.q_pos[:, :, None])[0].cpu() + reach  # [Lq, Lk]
        right.index_add_(1, r.flatten(), centred.sum(0).flatten(1))
        hot = torch.nn.functional.one_hot(r, size).double() * seen[0][..., None]  # [Lq, Lk, R]
        rows = hot.sum(1)  # [Lq, R] how often a row sees each offset: 0 or 1
        normal += len(p) * (torch.diag(rows.sum(0)) - rows.T @ (rows / number[0]))
        counts += len(p) * rows.sum(0)
    kept = counts > 0
    inverse = torch.linalg.pinv(normal[kept][:, kept], hermitian=True)
    return torch.arange(-reach, reach + 1)[kept], right[:, kept] @ inverse, counts[kept]


def kernels(offsets: Tensor, bias: Tensor, counts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Amplitude, sharpness and offset [H, count] of Gaussians whose sum is near to the bias, up to a constant.

    Orthogonal matching pursuit over a grid of centres and widths: the Gaussian that explains most of what is left, one
    after the other, with all amplitudes solved for anew each time.
    """
    r = offsets.double()
    centres = torch.cat([torch.arange(-16, 17.0), torch.tensor([-64.0, -48, -32, -24, 24, 32, 48, 64])]).double()
    widths = torch.logspace(-4, 0.3, 12, dtype=torch.float64)
    grid = torch.cartesian_prod(widths, centres)  # [G, 2] sharpness, centre
    atoms = torch.exp(-grid[:, :1] * (r - grid[:, 1:]) ** 2)  # [G, R]
    weight = (counts / counts.sum()).sqrt()
    one = weight / weight.norm()

    def projected(x: Tensor) -> Tensor:
        """Weighted, without its constant part."""
        x = x * weight
        flat: Tensor = x - (x @ one)[..., None] * one
        return flat

    flat, goal = projected(atoms), projected(bias.double())
    norms = flat.norm(dim=-1).clamp(min=1e-9)
    chosen: list[Tensor] = []
    amplitude = torch.zeros(goal.shape[0], 0, dtype=torch.float64)
    left = goal
    for _ in range(count):
        gain = (left @ flat.T).abs() / norms  # [H, G]
        if chosen:
            gain.scatter_(1, torch.stack(chosen, 1), 0.0)
        chosen.append(gain.argmax(-1))
        basis = flat[torch.stack(chosen, 1)]  # [H, n, R]
        gram = basis @ basis.mT + 1e-6 * torch.eye(len(chosen), dtype=torch.float64)
        amplitude = torch.linalg.solve(gram, (basis @ goal[..., None]))[..., 0]
        left = goal - (amplitude[:, None] @ basis)[:, 0]
    picked = grid[torch.stack(chosen, 1)]
    return amplitude, picked[..., 0], picked[..., 1]
