"""SelfExtend: near offsets are exact, far ones grouped. Jin et al. 2024, arXiv 2401.01325.

    tables:       r → r where |r| ≤ window, else sign(r)·(window + ⌊(|r| − window) / size⌋)
    rotations:    (i, j) → (i, j) where |r| ≤ window
                  (⌊i/size⌋ + shift, ⌊j/size⌋) for earlier keys, shift = window − ⌊window/size⌋
                  (⌊i/size⌋ − shift, ⌊j/size⌋) for later keys, the mirror image, which the paper does not need

Far offsets continue where the window ends. Rotations take one more product for earlier keys, and another for later ones
(`terms.Far`). The offset of a far pair depends on where the groups begin, so a rotary scheme is no longer
shift-invariant. For tables the map is a function of r. The offsets of rotations and of tables differ by at most one if
`size` divides `window`, else by at most two.

Absolute positions have no offset to map: a vector that is added to a token cannot depend on the key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locant.schemes.base import Scheme, check_int
from locant.schemes.map import Map, floor_divided, probed
from locant.terms import Far


class SelfExtend(Map):
    """Exact offsets within `window`, groups of `size` beyond. Parameters: those of the scheme."""

    monotone = takes_reals = True

    def __init__(self, scheme: Scheme, /, *, window: int = 128, size: int = 4) -> None:
        super().__init__(scheme)
        check_int(self, "size", size, at_least=1)
        check_int(self, "window", window, at_least=0)
        if window < size:
            raise ValueError(
                f"selfextend: with window = {window} < size = {size} a far key could share the group of its query, and "
                f"be as near as a key inside the window; use window ≥ {size}"
            )
        self.window, self.size, self.linear = window, size, size == 1
        inner = self.scheme
        if inner.embeds or self.has_pair:
            what = "adds a vector to each token" if inner.embeds else "reads positions, not offsets"
            raise ValueError(
                f"selfextend maps offsets, and {inner} {what}; use interpolated, grouped or recurrent with it"
            )
        if inner.rotates and not inner.pairwise:
            raise ValueError(
                f"selfextend cannot map {inner}: its rotations depend on the length of the whole text; use grouped"
            )
        if inner.rotates and (gain := probed(inner).gain) is not None and gain.ndim == 3:
            raise ValueError(f"selfextend cannot map {inner}: it rotates and has a gain per coordinate; use grouped")

    @property
    def has_far(self) -> bool:
        return self.scheme.rotates

    def offsets(self, r: Tensor) -> Tensor:
        distance = r.abs()
        far = self.window + floor_divided(distance - self.window, self.size)
        return r.sign() * torch.where(distance <= self.window, distance, far)

    def rotate(self, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
        return self.scheme.rotate(q, k, q_pos, k_pos)

    def rotate_far(self, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> Far | None:
        if not self.scheme.rotates:
            return None
        shift = self.window - self.window // self.size
        group = floor_divided(q_pos, self.size)
        # Both kinds of queries in one call: xPos measures positions from the middle of a call.
        both, where = torch.cat([q, q], dim=2), torch.cat([group + shift, group - shift], dim=-1)
        turned, keys = self.scheme.rotate(both, k, where, floor_divided(k_pos, self.size))
        left, right = turned.split(q.shape[2], dim=2)
        return Far(self.window, left, right, keys)

    def first_at(self, limit: int) -> int:
        return limit if limit <= self.window else self.window + (limit - self.window) * self.size
