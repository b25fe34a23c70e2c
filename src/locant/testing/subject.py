"""`Subject`: a scheme under test, with tensors that fit it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from locant.attention import attend, eager
from locant.attention.request import prepare
from locant.schemes import MAPS, SCHEMES, Map, Scheme
from locant.schemes.base import DIMS
from locant.spec import scheme as from_spec


class Subject:
    """A scheme under test, in float64 and with changed parameters, and random q, k, v and hidden states that fit it."""

    def __init__(self, scheme: Scheme, batch: int = 2, length: int = 11) -> None:
        self.original = scheme
        self.scheme = copy.deepcopy(scheme).double()
        with torch.no_grad():
            for parameter in self.scheme.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        n_heads, head_dim = getattr(scheme, "n_heads", 4), getattr(scheme, "head_dim", 8)
        self.length = length if scheme.max_length is None else min(length, scheme.max_length)
        shape = (batch, n_heads, self.length, head_dim)
        self.q, self.k, self.v = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
        self.d_model = getattr(scheme, "d_model", n_heads * head_dim)
        self.x = torch.randn(batch, self.length, self.d_model, dtype=torch.float64) if scheme.reads else None

    def how(
        self, tokens: Tensor | slice = slice(None), rows: slice = slice(None), dtype: torch.dtype = torch.float64
    ) -> dict[str, Any]:
        """Arguments of `attend` that the scheme needs: the hidden states of these tokens, and causal attention."""
        x = None if self.x is None else self.x[rows][:, tokens].to(dtype)
        return {"x": x, "causal": self.scheme.causal_only}

    def logits(self, pick: Tensor, pos: Tensor, scheme: Scheme | None = None, *, keys: slice = slice(None)) -> Tensor:
        """Logits of the tokens `pick`, at the positions `pos`; 0 for keys that a causal scheme does not see.

        `keys` are the keys among these tokens.
        """
        scheme = scheme or self.scheme
        q, k, v = (x[:, :, pick] for x in (self.q, self.k, self.v))
        how = self.how(pick)
        if how["x"] is not None:
            how["x"] = (how["x"], how["x"][:, keys])
        found = eager.logits(prepare(q, k[:, :, keys], v[:, :, keys], scheme, q_pos=pos, k_pos=pos[keys], **how))
        return found.masked_fill(pos[keys] > pos[:, None], 0.0) if scheme.causal_only else found


def effects(subject: Subject, pos: Tensor) -> tuple[Tensor, Tensor | None]:
    """Everything that a scheme affects: logits, at short and long distances, outputs, and embeddings."""
    distances = (1, 40, 1000) if subject.scheme.max_length is None else (1,)
    parts = [subject.logits(pos, pos * apart) for apart in distances]
    parts.append(attend(subject.q, subject.k, subject.v, subject.scheme, impl="eager", **subject.how()))
    return torch.cat([part.detach().flatten() for part in parts]), subject.scheme.embed(pos)


def rebuild(scheme: Scheme) -> Scheme:
    """A new scheme from the spec of this one, which need not be registered."""
    parts = [part for part in scheme.modules() if isinstance(part, Scheme)]
    maps = {**MAPS, **{part.name(): type(part) for part in parts if isinstance(part, Map)}}
    known = {**SCHEMES, **{part.name(): type(part) for part in parts if not isinstance(part, Map)}}
    return from_spec(str(scheme), schemes=known, maps=maps, **{dim: getattr(scheme, dim, None) for dim in DIMS})
