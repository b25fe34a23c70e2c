"""DeBERTa's disentangled attention. He et al. 2021, arXiv 2006.03654; log buckets from DeBERTa-v3, arXiv 2111.09543.

    logit_ij = scale · ( q_i·k_j + q_i·K_b + k_j·Q_b )        b = bucket(i − j) = bucket(−r),  scale = 1/√(3·head_dim)

K and Q are the position vectors after the layer's key and query projections. DeBERTa projects one table in every layer;
here the projected vectors are the parameters. `spacing=linear` is the first DeBERTa, without logarithms: b is i − j,
clipped to the buckets. `products=c2p` leaves out k_j·Q_b and `products=p2c` leaves out q_i·K_b; the scale is then
1/√(2·head_dim). The paper writes Q_{δ(j,i)}, but the published code, with which all
checkpoints were trained, uses bucket(i − j) on both sides.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from locant.schemes.base import Scheme, check_choice, check_int, wide
from locant.terms import Terms


class Deberta(Scheme):
    """Disentangled tables. Parameters: n_heads · 2·buckets · head_dim for each of the (by default two) products."""

    def __init__(
        self, *, buckets: int = 256, max_distance: int = 512, spacing: str = "log", products: str = "both",
        n_heads: int, head_dim: int,
    ) -> None:  # fmt: skip
        super().__init__()
        check_choice(self, "spacing", spacing, ("log", "linear"))
        check_choice(self, "products", products, ("both", "c2p", "p2c"))
        check_int(self, "buckets", buckets, at_least=4 if spacing == "log" else 1)
        if spacing == "log":
            if buckets % 2:  # with 2m + 1 the logarithm would not end at max_distance
                raise ValueError(f"deberta: buckets must be even, one half for near and one for far; got {buckets}")
            check_int(self, "max_distance", max_distance, at_least=buckets // 2 + 2)
        elif max_distance != 512:
            raise ValueError(
                f"deberta: max_distance={max_distance} does nothing with spacing=linear, where buckets is the largest "
                f"distance; leave it out"
            )
        check_int(self, "n_heads", n_heads, at_least=1)
        check_int(self, "head_dim", head_dim, at_least=1)
        self.buckets, self.max_distance, self.spacing, self.products = buckets, max_distance, spacing, products
        self.n_heads, self.head_dim = n_heads, head_dim
        self.key_table: nn.Parameter | None = None
        self.query_table: nn.Parameter | None = None
        if products != "p2c":
            self.key_table = nn.Parameter(torch.randn(n_heads, 2 * buckets, head_dim) * 0.02)  # K
        if products != "c2p":
            self.query_table = nn.Parameter(torch.randn(n_heads, 2 * buckets, head_dim) * 0.02)  # Q

    def bucket(self, r: Tensor) -> Tensor:
        """Returns the table row of each offset: i − j up to buckets/2, logarithmic beyond, shifted to start at 0."""
        distance, middle = -r, self.buckets // 2
        if self.spacing == "linear":
            return (distance + self.buckets).clamp(0, 2 * self.buckets - 1)
        # Both logarithms in float32, as in the published code: the edges of the buckets depend on the rounding.
        far = distance.abs().clamp(min=middle).float()
        octaves = torch.log(far / middle) / torch.log(
            torch.tensor((self.max_distance - 1) / middle, dtype=torch.float32)
        )
        grouped = (torch.ceil(octaves * (middle - 1)) + middle).long() * distance.sign()
        signed = torch.where(distance.abs() <= middle, distance, grouped)
        return (signed + self.buckets).clamp(0, 2 * self.buckets - 1)

    @property
    def reach(self) -> int:
        if self.spacing == "linear":
            return self.buckets
        return self.max_distance + self.max_distance // 10_000  # float32 may reach the last bucket a little later

    def terms(self, r: Tensor) -> Terms:
        row = self.bucket(r)
        return Terms(
            query=None if self.key_table is None else wide(self.key_table)[:, row],
            key=None if self.query_table is None else wide(self.query_table)[:, row],
        )

    @property
    def tables(self) -> int:
        """The number of products with positions, and of tables."""
        return 2 if self.products == "both" else 1

    def scale(self, head_dim: int) -> float:
        return 1 / math.sqrt((1 + self.tables) * head_dim)

    def parameter_count(self) -> int:
        return self.tables * self.n_heads * 2 * self.buckets * self.head_dim
