"""What an attribution returns: the relevance of an output by token, by offset and by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from locant.analysis.attribution.attending import KINDS, Flow

TABLE = "table"
"""Name of the relevance of absolute positions, beside the kinds of terms in attention (KINDS)."""


@dataclass(frozen=True)
class Attribution:
    """The relevance of one output. `relevance`, `position`, `values` and `biases` sum to `value`.

    Tokens are those of the text; the tokens of a decoder follow those of its encoder.
    """

    output: str  # what is explained, in words
    value: float
    tokens: tuple[str, ...]
    relevance: Tensor  # [L]: R_t, of the token at each place
    content: Tensor  # [L]: C_t, the part of R_t that passes through no positional term of attention
    position: Tensor  # [L]: T_t, of the row of a position table at each place; 0 without a table
    values: float  # of vectors u_r that a scheme adds to the values of attention
    biases: float  # of biases and other constants
    layers: tuple[Flow, ...]
    error: float  # |sum − value|, relative to the value

    @property
    def through_position(self) -> Tensor:
        """[L]: P_t = R_t − C_t, the relevance of each token that passes through a positional term at least once."""
        return self.relevance - self.content

    @property
    def share(self) -> float:
        """The share of position: Σ_t (|P_t| + |T_t|) / Σ_t (|C_t| + |P_t| + |T_t|), with |Σ T| of the value vectors."""
        position = float(self.through_position.abs().sum() + self.position.abs().sum()) + abs(self.values)
        whole = position + float(self.content.abs().sum())
        return position / whole if whole else 0.0

    @property
    def bias_share(self) -> float:
        """The share of the output that biases and other constants make: biases / value."""
        return self.biases / self.value if self.value else 0.0

    @property
    def parts(self) -> dict[str, float]:
        """How relevance passes through position: by kind, Σ |P_ij| over all layers and heads; |T| for a table."""
        found = {
            kind: sum(float(flow.kinds[kind].sum()) for flow in self.layers if kind in flow.kinds) for kind in KINDS
        }
        return {
            name: size for name, size in {TABLE: float(self.position.abs().sum()), **found}.items() if size > 0
        }  # fmt: skip

    def by_offset(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns offsets [R], and Σ |R_ij| and Σ |P_ij| over all layers and heads, each [R]."""
        if not self.layers:
            return torch.zeros(0, dtype=torch.long), torch.zeros(0), torch.zeros(0)
        offsets = torch.cat([flow.offsets for flow in self.layers]).unique()
        gross, position = (torch.zeros(len(offsets), dtype=torch.float64) for _ in range(2))
        for flow in self.layers:
            at = torch.searchsorted(offsets, flow.offsets)
            gross.index_add_(0, at, flow.gross.sum(0))
            position.index_add_(0, at, flow.position.sum(0))
        return offsets, gross, position

    def half(self) -> tuple[int, int] | None:
        """Returns the shortest range of offsets with half of the relevance through position in attention; or None."""
        offsets, _, position = self.by_offset()
        total = float(position.sum())
        if total <= 0:
            return None
        sums = torch.cat([position.new_zeros(1), position.cumsum(0)])
        last = torch.searchsorted(sums, sums + total / 2)  # of a range that starts at each offset, its end
        starts = [at for at in range(len(offsets)) if int(last[at]) <= len(offsets)]
        best = min(starts, key=lambda at: (int(last[at]) - at, abs(int(offsets[at]))))
        return int(offsets[best]), int(offsets[int(last[best]) - 1])

    def sentences(self) -> list[str]:
        """Returns the findings in words."""
        order = self.relevance.argsort(descending=True)[:3].tolist()
        top = ", ".join(f"{self.tokens[at].strip()!r} ({float(self.relevance[at]):+.3g})" for at in order)
        found = [
            f"The {self.output} is {self.value:.4g}. The tokens with most relevance: {top}.",
            f"{100 * self.share:.0f} % of the relevance passes through position{self._through()}.",
            f"Biases and other constants make {self.biases:+.3g} of it ({100 * self.bias_share:.0f} %).",
        ]
        half = self.half()
        if half is not None:
            first, last = (str(each).replace("-", "−") for each in half)
            where = f"offset {first}" if half[0] == half[1] else f"offsets {first} … {last}"
            found[1] += f" Half of what passes through positions in attention is at {where}."
        return found

    def _through(self) -> str:
        parts = self.parts
        total = sum(parts.values())
        return f" ({', '.join(f'{name} {100 * size / total:.0f} %' for name, size in parts.items())})" if total else ""


@dataclass(frozen=True)
class Similarity:
    """Why the embeddings of two texts are similar: their cosine as a sum over pairs of tokens.

    The tokens of either text explain the whole cosine, given the other text.
    """

    value: float
    first: Attribution
    second: Attribution
    pairs: Tensor  # [L1 + 1, L2 + 1]: sums to `value`. The last row and column are positions and constants
