"""The logits of a scheme when all tokens are the same: they differ by position alone."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from locant.attention import eager
from locant.attention.request import prepare
from locant.schemes import Scheme

LENGTH = 128
"""Positions at which a scheme without a table is measured."""


@torch.no_grad()
def scheme_logits(
    scheme: Scheme, *, length: int = LENGTH, n_heads: int = 1, head_dim: int = 64, causal: bool = False, draws: int = 8,
    seed: int = 0,
) -> Tensor:  # fmt: skip
    """Returns the logits [draws, heads, length, length] of a scheme when all tokens are the same, float64.

    For a bias q = k = 0 and there is one draw: the bias itself. Otherwise each draw has one random q and one random k
    per head, and one hidden state for a scheme that reads it, the same at every position: all differences between pairs
    are due to position. A scheme for causal attention is measured there, whatever `causal` is.
    """
    if scheme.max_length is not None:
        length = min(length, scheme.max_length)
    scheme = copy.deepcopy(scheme).double()
    here = next(scheme.parameters(), torch.empty(0)).device
    terms = scheme.terms(torch.zeros(1, dtype=torch.long, device=here))
    bias_alone = not scheme.rotates and not scheme.has_sides and set(terms.used()) <= {"bias", "score"}
    generator = torch.Generator().manual_seed(seed)
    shape = (1 if bias_alone else draws, getattr(scheme, "n_heads", n_heads), 1, getattr(scheme, "head_dim", head_dim))
    q, k = (torch.randn(shape, generator=generator, dtype=torch.float64).to(here) for _ in range(2))
    q, k = (x.expand(-1, -1, length, -1) * (0 if bias_alone else 1) for x in (q, k))
    x = None
    if scheme.reads:
        width = getattr(scheme, "d_model", q.shape[1] * q.shape[3])
        x = torch.randn((len(q), 1, width), generator=generator, dtype=torch.float64).to(here).expand(-1, length, -1)
    logits = eager.logits(prepare(q, k, k, scheme, causal=causal or scheme.causal_only, x=x))
    return logits.expand(shape[0], shape[1], length, length).double().cpu()
