"""Side vectors, levels, temperatures and far rotations in the fused kernel, against `eager` in float64.

As in `test_fused.py`: output and every gradient, for all kinds of tiles and any shapes.
"""

import pytest
import torch

import locant
from locant.attention import build
from locant.terms import Sides
from tests.attention.test_fused import check, tensors

pytestmark = pytest.mark.skipif(
    build.build().library is None, reason=f"no kernel here: {build.build().why}; returns with a C compiler"
)


class Vectors(locant.Scheme):
    """Vectors of their own widths for queries, keys or both, with tables over −reach … reach. None: no such vectors.

    They are products of q and k with parameters, so that gradients of the vectors reach q, k and parameters.
    """

    def __init__(self, of_queries=None, of_keys=None, reach=5, heads=1, head_dim=8, own=False):
        super().__init__()
        self.clip, self.own = reach, own
        for name, width in (("query", of_queries), ("key", of_keys)):
            if width is not None:
                self.register_parameter(f"{name}_map", torch.nn.Parameter(torch.randn(head_dim, width) / 3))
                self.register_parameter(f"{name}_table", torch.nn.Parameter(torch.randn(heads, 2 * reach + 1, width)))
        if own:  # tables for q and k themselves, beside those for the vectors
            self.own_table = torch.nn.Parameter(torch.randn(heads, 2 * reach + 1, head_dim))

    @property
    def reach(self):
        return self.clip

    def terms(self, r):
        column = r.clamp(-self.clip, self.clip) + self.clip
        found = {f"{name}_side": table[:, column] for name in ("query", "key")
                 if (table := getattr(self, f"{name}_table", None)) is not None}  # fmt: skip
        if self.own:
            found |= {"query": self.own_table[:, column], "key": 2 * self.own_table[:, column]}
        return locant.Terms(**found)

    def sides(self, tokens):
        found = {}
        for name, x in (("query", tokens.q), ("key", tokens.k)):
            if hasattr(self, f"{name}_map"):
                x, weight = x.repeat_interleave(tokens.q.shape[1] // x.shape[1], dim=1), getattr(self, f"{name}_map")
                found[name] = x.to(weight.dtype) @ weight
        return Sides(**found)


KINDS = {
    "band": {},
    "causal": {"causal": True},
    "far": {"q_pos": torch.arange(150), "k_pos": torch.arange(160) + 200},
    "scatter": {"q_pos": torch.arange(150).flip(0), "k_pos": torch.arange(160) // 2},
    "window": {"window": (20, 3)},
    "masked": {"mask": torch.arange(160)[None, None, None] % 7 != 3},
}
"""150 queries and 160 keys: two tiles each way, the last of them partial."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("of_queries", "of_keys"), [(3, None), (16, None), (17, None), (None, 1), (None, 16), (None, 40), (5, 16), (40, 3)]
)
def test_side_vectors(of_queries, of_keys, kind):
    torch.manual_seed(1)
    check(Vectors(of_queries, of_keys, heads=4), tensors(2, 4, 2, 150, 160, 8), **KINDS[kind])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("other", ["rope", "huang1:clip=7", "huang2:clip=7", "shaw:clip=7", "own tables"])
def test_side_vectors_beside_other_terms(other, dtype):
    torch.manual_seed(1)
    scheme = Vectors(5, 16, heads=4, own=other == "own tables")
    if other != "own tables":
        scheme = locant.schemes.Sum(locant.scheme(other, n_heads=4, head_dim=8), scheme)
    how = {"softcap": 3.0, "sinks": torch.randn(4), "causal": True}
    check(scheme, tensors(2, 4, 2, 140, 140, 8, dtype=dtype), **how)
