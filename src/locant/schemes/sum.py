"""Several schemes at once: `Sum(Tisa(...), Learned(...))`, or `tisa:kernels=5+learned:length=512`.

Embeddings, biases and vector terms add, rotations are applied one after the other, gains and temperatures multiply, and
side vectors join to longer ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from locant.schemes.base import DIMS, Scheme
from locant.terms import Far, Sides, Terms, Tokens


class Sum(Scheme):
    """The sum of its parts. Parameters: the sum of theirs."""

    def __init__(self, *parts: Scheme) -> None:
        super().__init__()
        if not parts or not all(isinstance(part, Scheme) for part in parts):
            raise TypeError(f"Sum needs one scheme or more, got {[type(part).__name__ for part in parts]}")
        flat = [inner for part in parts for inner in part.parts_of_sum()]
        for dim in DIMS:
            sizes = [(str(part), getattr(part, dim)) for part in flat if hasattr(part, dim)]
            if len({size for _, size in sizes}) > 1:
                spelled = ", ".join(f"{part} has {size}" for part, size in sizes)
                raise ValueError(f"the parts of a Sum must belong to one model; {dim} differs: {spelled}")
        self.parts = nn.ModuleList(flat)
        for dim in DIMS:  # a Sum has the dimensions of its parts
            for part in flat:
                if hasattr(part, dim):
                    setattr(self, dim, getattr(part, dim))
        for what in ("has_levels", "has_far"):
            having = [str(part) for part in flat if getattr(part, what)]
            if len(having) > 1:
                raise ValueError(f"a Sum can have one such part, not {len(having)}: {', '.join(having)}")
        far = [part for part in flat if part.has_far]
        if far and any(part.rotates for part in flat if part is not far[0]):
            raise ValueError(f"{far[0]} cannot be added to another scheme that rotates")
        if far and any(_has_vector_gain(part) for part in flat):
            raise ValueError(f"{far[0]} cannot be added to a scheme with a gain per coordinate")
        wider = [part for part in flat if part.widens]
        if wider and sum(part.rotates for part in flat) > 1:
            raise ValueError(f"{wider[0]} cannot be added to another scheme that rotates")
        if wider and any(_has_vector_gain(part) for part in flat):
            raise ValueError(f"{wider[0]} cannot be added to a scheme with a gain per coordinate")
        # A vector gain does not commute with rotations: (R_i q)ᵀ diag(g_r) (R_j k) depends on i and j, not on r alone.
        rotations = [part for part in flat if part.rotates]
        mixed = bool(rotations) and any(_has_vector_gain(part) for part in flat)
        # Rotations of different pairs of coordinates do not commute with each other either.
        tangled = len(rotations) > 1 and (len({part.planes for part in rotations}) > 1 or rotations[0].planes is None)
        self.shift_invariant = all(part.shift_invariant for part in flat) and not mixed and not tangled
        self.pairwise = all(part.pairwise for part in flat) and not tangled
        self.incremental = all(part.incremental for part in flat) and not tangled
        self.grows = any(part.grows for part in flat)
        self.widens = any(part.widens for part in flat)
        self.own_keys = any(part.own_keys for part in flat)
        self.causal_only = any(part.causal_only for part in flat)
        self.reads_queries = any(part.reads_queries for part in flat)
        self.reads_keys = any(part.reads_keys for part in flat)
        self.read_width = sum(part.read_width for part in flat)
        self.hides = any(part.hides for part in flat)
        self.has_levels = any(part.has_levels for part in flat)
        self.max_length = min((part.max_length for part in flat if part.max_length is not None), default=None)

    def schemes(self) -> list[Scheme]:
        """Returns the parts."""
        return [part for part in self.parts if isinstance(part, Scheme)]

    def parts_of_sum(self) -> list[Scheme]:
        return self.schemes()

    @property
    def embeds(self) -> bool:
        return any(part.embeds for part in self.schemes())

    @property
    def rotates(self) -> bool:
        return any(part.rotates for part in self.schemes())

    @property
    def has_terms(self) -> bool:
        return any(part.has_terms for part in self.schemes())

    @property
    def has_sides(self) -> bool:
        return any(part.has_sides for part in self.schemes())

    def embed(self, pos: Tensor) -> Tensor | None:
        total = None
        for part in self.schemes():
            added = part.embed(pos)
            if added is not None:
                total = added if total is None else total + added
        return total

    def rotate(self, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
        for part in self.schemes():
            q, k = part.rotate(q, k, q_pos, k_pos)
        return q, k

    @property
    def has_far(self) -> bool:
        return any(part.has_far for part in self.schemes())

    def rotate_far(self, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> Far | None:
        found = [part.rotate_far(q, k, q_pos, k_pos) for part in self.schemes() if part.has_far]
        return found[0] if found else None

    def read(self, x: Tensor) -> Tensor:
        return torch.cat([part.read(x) for part in self.schemes() if part.reads], dim=-1)

    def sides(self, tokens: Tokens) -> Sides:
        total, start = Sides(), 0
        for part in self.schemes():
            own = slice(start, start + part.read_width)
            read_q, read_k = (None if x is None else x[..., own] for x in (tokens.read_q, tokens.read_k))
            total = total + part.sides(replace(tokens, read_q=read_q, read_k=read_k))
            start = own.stop
        return total

    @property
    def reach(self) -> int | None:
        reaches = [part.reach for part in self.schemes() if part.has_terms]
        known = [reach for reach in reaches if reach is not None]
        return None if len(known) < len(reaches) else max([0, *known])

    def terms(self, r: Tensor) -> Terms:
        total = Terms()
        for part in self.schemes():
            total = total + part.terms(r)
        return total

    def scale(self, head_dim: int) -> float:
        usual = super().scale(head_dim)
        own = {part.scale(head_dim) for part in self.schemes()} - {usual}
        if len(own) > 1:
            raise ValueError(f"{self}: the parts declare different logit scales {sorted(own)}; pass scale= to attend")
        return own.pop() if own else usual

    def parameter_count(self) -> int:
        return sum(part.parameter_count() for part in set(self.schemes()))  # a part that occurs twice is shared

    def _curved(self) -> list[Scheme]:
        return [part for part in dict.fromkeys(self.schemes()) if part.can_start_from_curve]

    @property
    def can_start_from_curve(self) -> bool:
        """Whether exactly one part can: with two such parts, the split of the curve would be ambiguous."""
        return len(self._curved()) == 1

    def start_from_curve(self, offsets: Tensor, bias: Tensor, weight: Tensor) -> None:
        (part,) = self._curved()
        part.start_from_curve(offsets, bias, weight)

    def start_from_table(self, first: Tensor, rest: Tensor) -> None:
        for part in self.schemes():
            part.start_from_table(first, rest)

    def clear_values(self) -> None:
        for part in self.schemes():
            part.clear_values()

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))


def _has_vector_gain(scheme: Scheme) -> bool:
    with torch.no_grad():
        gain = scheme.terms(torch.zeros(1, dtype=torch.long)).gain
    return gain is not None and gain.ndim == 3
