"""`AttentionCall`: one attention of a model as it reaches the seam, with the positions of its tokens.

`interface.attention` makes one of each call that transformers makes. Observers (`listening`) receive it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locant.attention.request import Request, prepare
from locant.attention.sides import States
from locant.schemes import Scheme

AttentionFunction = Callable[..., tuple[Tensor, "Tensor | None"]]
"""An attention of transformers: (module, query, key, value, mask, …) -> output [B, Lq, H, D] and weights."""

OWN_LOGITS = "own_logits"
"""Entry of `AttentionCall.others`: True if the model's logits are not scale·q·k under the mask of the call."""


class Positions(NamedTuple):
    """The positions of the tokens of one forward pass. Without q and k they are past, past + 1, …"""

    q: Tensor | None  # [B or 1, Lq]
    k: Tensor | None  # [B or 1, Lk]: cached keys, then q
    past: int = 0
    weights: bool = False  # the caller requests the attention weights; not every model passes that on
    cached: Tensor | None = None
    """The number of cached keys in compiled code with a static cache; k then has a column for each of its places."""
    counted: bool = False
    """Whether k is 0, 1, 2, …, and q the last of it: the default of `attend`, which then makes no positions."""

    def of_places(self, cached: Tensor, lq: int, lk: int) -> Tensor:
        """Returns the positions of lk keys of a static cache, [B, lk], when their number is known as a tensor alone.

        A sliding layer has the last lk keys. Empty places at the end are masked; they get the position of the last key.
        """
        assert self.k is not None
        last = cached + lq - 1
        places = torch.arange(lk, device=last.device) + (last + 1 - lk).clamp(min=0)
        return self.k.index_select(-1, torch.minimum(places, last))

    def of_queries(self, length: int, device: torch.device | None) -> Tensor:
        """Returns the positions of the queries, [B or 1, length]."""
        return (torch.arange(length, device=device) + self.past)[None] if self.q is None else self.q


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one attention. B sequences, H heads, Lq queries, Lk keys, heads of size D."""

    module: nn.Module
    query: Tensor  # [B, H, Lq, D]
    key: Tensor  # [B, Hkv, Lk, D]
    value: Tensor  # [B, Hkv, Lk, D]
    mask: Tensor | None  # as transformers made it; bool (True = may attend) where there is a scheme
    scheme: Scheme | None  # None: cross-attention, or a model that is not swapped
    positions: Positions | None  # None: a model that is not swapped
    is_causal: bool
    scale: float | None
    dropout: float
    position_bias: Tensor | None
    weights_wanted: bool
    others: Mapping[str, Any]  # all other keyword arguments of transformers: softcap, s_aux, …
    transformers_attention: AttentionFunction  # computes the call where locant adds nothing to it
    states: States | None = None  # hidden states, for a scheme that reads them
    position_factor: int = 1
    """Positions are multiplied by this before attention. Only a probe of a swap sets it."""

    @property
    def is_native(self) -> bool:
        """Whether the model is not swapped."""
        return self.scheme is None and self.positions is None

    @property
    def softcap(self) -> float | None:
        """The cap of the logits (Gemma 2); None if the model has none."""
        return self.others.get("softcap")

    @property
    def sinks(self) -> Tensor | None:
        """One more logit per head, [H] (gpt-oss); None if the model has none."""
        found: Tensor | None = self.others.get("s_aux")
        return found

    @property
    def is_plain(self) -> bool:
        """Whether positions play no part. Transformers' own attention then computes the same.

        NoPE is plain attention, except for packed sequences, which only positions separate. Attention with a softcap or
        sinks is not plain: the sdpa function of transformers refuses the one and ignores the other.
        """
        if self.softcap is not None or self.sinks is not None:
            return False
        if self.scheme is None:
            return True
        packed = self._known_positions().q is not None and self.is_causal and self.mask is None
        return self.scheme.silent and not packed

    def arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments of `locant.attend`, without dropout and the choice of a back end."""
        query, key, value, mask = self.query, self.key, self.value, self.mask
        lq, lk, here = query.shape[2], key.shape[2], query.device
        causal = self.is_causal and mask is None and lq > 1
        if causal and lk > lq:  # a static cache before its first use: the keys after the queries do not exist yet
            key, value, lk = key[:, :, :lq], value[:, :, :lq], lq
        q_pos, k_pos = self._positions(lq, lk) if self.scheme is not None else (None, None)
        if self.scheme is None and lq > lk:  # cross-attention: `attend` has no default positions for these lengths
            q_pos, k_pos = torch.arange(lq, device=here), torch.arange(lk, device=here)
        if causal and q_pos is not None:  # without a mask, causal means by index, whatever the positions are
            mask = torch.ones(lq, lk, dtype=torch.bool, device=here).tril()[None, None]
            # In a packed row, a new sequence starts wherever the position equals the first position. Transformers
            # masks packed sequences too, but not when there is a cache.
            again = (q_pos.diff(dim=-1) < 0) & (q_pos[:, 1:] == q_pos[:, :1])
            sequence = F.pad(again, (1, 0)).cumsum(-1)
            mask = mask & (sequence[:, None, :, None] == sequence[:, None, None, :])
            causal = False
        if mask is not None:
            mask = mask[..., :lk]
        return {"q": query, "k": key, "v": value, "scheme": self.scheme, "q_pos": q_pos, "k_pos": k_pos, "mask": mask,
                "causal": causal, "scale": self.scale, "softcap": self.softcap, "sinks": self.sinks,
                "x": self.states}  # fmt: skip

    def request(self) -> Request:
        """Returns what `attend` is about to compute. Only for calls with a scheme."""
        return prepare(**self.arguments())

    def _known_positions(self) -> Positions:
        """The positions of a call with a scheme. NoPE needs them too: the stack may add them to its tokens."""
        if self.positions is None:
            raise RuntimeError(
                f"{type(self.module).__name__} received no positions; call it through the swapped model it belongs to"
            )
        return self.positions

    def _positions(self, lq: int, lk: int) -> tuple[Tensor | None, Tensor | None]:
        """q_pos and k_pos for `attend`; None where its own default is right."""
        positions = self._known_positions()
        q, k, past, cached = positions.q, positions.k, positions.past, positions.cached
        device, factor = self.query.device, self.position_factor
        if positions.counted and k is not None and lk == k.shape[-1] and factor == 1:
            return None, None
        if cached is not None:
            k = positions.of_places(cached, lq, lk)
        if q is None or k is None:
            if lk == past + lq and factor == 1:
                return None, None
            first = max(past + lq - lk, 0)  # a sliding cache has dropped the keys before this one
            last = min(past + lq, first + lk)
            q, k = torch.arange(past, past + lq, device=device)[None], torch.arange(first, last, device=device)[None]
        known = k.shape[-1]
        # A sliding cache holds only the last keys. A static one has empty places at the end, which are masked.
        k = k[:, known - lk :] if lk <= known else torch.cat([k, k[:, -1:].expand(-1, lk - known)], dim=-1)
        return (q, k) if factor == 1 else (q * factor, k * factor)
