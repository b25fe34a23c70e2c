"""Initial values of a fit: a scheme that can starts from a curve over the offset, others from their own start.

If the model's own positions are a bias, the curve is read from its parameters. Otherwise it is measured: the Toeplitz
bias b nearest in least squares to the difference D between the log attention weights and the logits without positions,
row by row up to a constant ρ_i that softmax ignores,

    argmin_b,ρ Σ_rows Σ_j ( D_ij − b(j − i) − ρ_i )²

This is linear, N b = g: N are the centred counts of the offsets in each row, and g is the row-centred D summed by
offset.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locant.attention import eager
from locant.attention.request import Request, prepare
from locant.schemes.base import Scheme

Curve = tuple[Tensor, Tensor, Tensor]
"""Offsets [R], the bias [H, R] and the weight [R] of each offset: the arguments of `Scheme.start_from_curve`."""

READ = 256
"""Largest distance at which a curve is read from the parameters of a bias."""
FLOOR = 1e-4
"""Attention weights below this are raised to it: the logarithm of a negligible weight is noise."""


def set_initial_values(scheme: Scheme, requests: list[Request], goal: list[Tensor], own: Scheme) -> None:
    """Sets the parameters of a scheme to the start of its fit. `own` is the model's own scheme in this layer."""
    scheme.clear_values()
    if scheme.can_start_from_curve:
        scheme.start_from_curve(*(read_curve(own, requests) if is_bias(own) else measured_curve(requests, goal)))


def is_bias(scheme: Scheme) -> bool:
    """Whether a scheme is a bias by offset and nothing else. Its curve can then be read from its parameters."""
    r = torch.zeros(1, dtype=torch.long, device=next(scheme.parameters(), torch.empty(0)).device)
    return scheme.terms(r).used() == ("bias",) and not scheme.rotates and not scheme.has_sides


def read_curve(own: Scheme, requests: list[Request]) -> Curve:
    """Returns the exact curve of a bias; near offsets have more weight."""
    offsets = torch.arange(-READ, 1 if requests[0].causal else READ + 1)
    bias = own.terms(offsets.to(requests[0].q.device)).bias
    assert bias is not None
    heads = requests[0].q.shape[1]
    return offsets, bias.detach().cpu().double().expand(heads, -1), 1.0 / (1 + offsets.abs()).double()


def measured_curve(requests: list[Request], goal: list[Tensor]) -> Curve:
    """Returns the Toeplitz bias nearest in least squares, at the offsets that occur; their weight is their count.

    goal   attention weights [B, H, Lq, Lk] of each request, to be reproduced.
    """
    reach = max(max(p.shape[2], p.shape[3]) for p in goal) - 1
    heads, size = goal[0].shape[1], 2 * reach + 1
    normal = torch.zeros(size, size, dtype=torch.float64)
    right = torch.zeros(heads, size, dtype=torch.float64)
    counts = torch.zeros(size, dtype=torch.float64)
    for request, p in zip(requests, goal, strict=True):
        plain = prepare(
            request.q, request.k, request.v, None, causal=request.causal, mask=request.mask, scale=request.scale,
            softcap=request.softcap,
        )  # fmt: skip
        difference = (p.clamp(min=FLOOR).log() - eager.logits(plain)).cpu().double()  # [B, H, Lq, Lk]
        visible = request.visible()
        # [1, Lq, Lk]: sequences are not padded, so all rows of a batch have the same visible keys
        seen = (torch.ones_like(p[:1, 0]) if visible is None else visible[:1, 0]).cpu().double()
        number = seen.sum(-1, keepdim=True).clamp(min=1)
        centred = (difference - (difference * seen[:, None]).sum(-1, keepdim=True) / number[:, None]) * seen[:, None]
        r = (request.k_pos[:, None, :] - request.q_pos[:, :, None])[0].cpu() + reach  # [Lq, Lk]
        right.index_add_(1, r.flatten(), centred.sum(0).flatten(1))
        hot = torch.nn.functional.one_hot(r, size).double() * seen[0][..., None]  # [Lq, Lk, R]
        rows = hot.sum(1)  # [Lq, R] how often each offset occurs in a row: 0 or 1
        normal += len(p) * (torch.diag(rows.sum(0)) - rows.T @ (rows / number[0]))
        counts += len(p) * rows.sum(0)
    kept = counts > 0
    inverse = torch.linalg.pinv(normal[kept][:, kept], hermitian=True)
    return torch.arange(-reach, reach + 1)[kept], right[:, kept] @ inverse, counts[kept]
