"""Side vectors, levels, temperatures and far rotations in the fused kernel, against `eager` in float64.

As in `test_fused.py`: output and every gradient, for all kinds of tiles and any shapes.
"""

import pytest
import torch

import locant
from locant.attention import build
from locant.terms import Far, Sides
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


class Numbers(locant.Scheme):
    """Levels and temperatures from q and k, with a table of factors of the levels, and one of biases, if asked for."""

    def __init__(self, names, heads=1, reach=5, head_dim=8, shared=False):
        super().__init__()
        self.names, self.clip, self.shared = names, reach, shared
        self.weight = torch.nn.Parameter(torch.randn(head_dim))
        for name in ("level", "bias"):
            if name in names:
                self.register_parameter(name, torch.nn.Parameter(torch.randn(heads, 2 * reach + 1)))

    @property
    def reach(self):
        return self.clip

    def terms(self, r):
        column = r.clamp(-self.clip, self.clip) + self.clip
        return locant.Terms(
            **{name: getattr(self, name)[:, column] for name in ("level", "bias") if name in self.names}
        )

    def sides(self, tokens):
        weight = self.weight.double()
        e, d = (x.double() @ weight for x in (tokens.q, tokens.k))
        d = d.repeat_interleave(tokens.q.shape[1] // tokens.k.shape[1], dim=1)
        if self.shared:  # one number for all heads and sequences
            e, d = (x.mean((0, 1), keepdim=True) for x in (e, d))
        found = {"query_level": 3 * e, "key_level": 2 * d, "temperature": 1 + e.sin()}
        return Sides(**{name: x for name, x in found.items() if name in self.names})


NUMBERS = [
    ("query_level",), ("key_level",), ("query_level", "key_level"), ("temperature",), ("temperature", "bias"),
    ("key_level", "level"), ("query_level", "key_level", "level", "bias", "temperature"),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", NUMBERS, ids="+".join)
def test_levels_and_temperatures(names, kind):
    torch.manual_seed(1)
    check(Numbers(names, heads=4), tensors(2, 4, 2, 150, 160, 8), **KINDS[kind])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [False, True], ids=["of each head", "of all heads"])
@pytest.mark.parametrize("names", NUMBERS, ids="+".join)
def test_levels_and_temperatures_under_a_softcap_with_sinks(names, shared, dtype):
    torch.manual_seed(1)
    how = {"softcap": 2.5, "sinks": torch.randn(4), "causal": True}
    scheme = locant.schemes.Sum(locant.scheme("shaw:clip=7", n_heads=4, head_dim=8), Numbers(names, shared=shared))
    check(scheme, tensors(2, 4, 2, 140, 140, 8, dtype=dtype), **how)


@pytest.mark.parametrize("temperature", [0.0, -1.5])
def test_a_temperature_may_be_0_or_negative(temperature):
    class Constant(Numbers):
        def sides(self, tokens):
            e = tokens.q.double() @ self.weight.double()
            return Sides(temperature=torch.full_like(e, temperature) + 0 * e)

    check(Constant(("temperature", "bias")), tensors(1, 2, 2, 140, 140, 8), causal=True)


def test_a_key_level_of_minus_infinity_hides_a_key():
    class Hiding(Numbers):
        def sides(self, tokens):
            d = tokens.k.double() @ self.weight.double()
            return Sides(key_level=d.masked_fill(torch.arange(d.shape[-1]) % 3 == 1, -torch.inf))

    scheme = Hiding(("key_level",))
    leaves = [x.requires_grad_() for x in tensors(1, 2, 2, 140, 140, 8)]
    found = {}
    for impl in ("fused", "eager"):
        out = locant.attend(*leaves, scheme, impl=impl)
        found[impl] = [out, *torch.autograd.grad(out.square().sum(), [*leaves, scheme.weight])]
    for x, y in zip(found["fused"], found["eager"], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


class Decay(locant.Scheme):
    """FoX: e_i is the sum of the logarithms of forget gates up to i, d_j minus that up to j. Here given."""

    causal_only = True

    def __init__(self, decay):
        super().__init__()
        self.decay = torch.nn.Parameter(decay)  # [tokens], per token

    def sides(self, tokens):
        total = self.decay.double().cumsum(0)[None, None]
        return Sides(query_level=total[..., -tokens.q.shape[2] :], key_level=-total)


def test_levels_of_100000_tokens_lose_nothing():
    """Levels up to 1.5e6. In float32 their differences would be off by 0.1; here they have an error of 2^-23 of e + d.

    60 queries in two places: at the end, where e is largest, and nothing but the last keys has any weight. The bound is
    that of `read_numbers` in fused.c, and the rounding of a logit.
    """
    torch.manual_seed(0)
    n = 100_000
    scheme = Decay(-30 * torch.rand(n, dtype=torch.float64))
    q, k, v = torch.zeros(1, 1, 60, 8), torch.zeros(1, 1, n, 8), torch.randn(1, 1, n, 8)
    for parameter in (30.0, 0.03, 1e-4):  # the decay of each token, on average half of it
        with torch.no_grad():
            scheme.decay.copy_(-parameter * torch.rand(n, dtype=torch.float64))
        out = locant.attend(q, k, v, scheme, causal=True, impl="fused")
        truth = locant.attend(q.double(), k.double(), v.double(), scheme, causal=True, impl="eager")
        error = (out.double() - truth).abs().max()
        assert error < 2e-6, f"decay {parameter}: {error:.1e}"
        grads = [
            torch.autograd.grad(x.square().sum(), scheme.decay)[0]
            for x in (locant.attend(q, k, v, scheme, causal=True, impl="fused"), truth)
        ]
        assert (grads[0] - grads[1]).abs().max() < 1e-5 * grads[1].abs().max()


class Distant(locant.Scheme):
    """Other queries and keys beyond a distance: q and k in reverse order, times parameters."""

    def __init__(self, distance, head_dim=8):
        super().__init__()
        self.distance = distance
        self.left, self.right, self.keys = (torch.nn.Parameter(torch.randn(head_dim)) for _ in range(3))

    def rotate(self, q, k, q_pos, k_pos):
        return q * 2, k

    def rotate_far(self, q, k, q_pos, k_pos):
        q, k = q.flip(-1), k.flip(-1)
        return Far(self.distance, *((x * y).to(q.dtype) for x, y in ((q, self.left), (q, self.right), (k, self.keys))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("distance", [0, 3, 127, 128, 400])
def test_far_rotations(distance, kind):
    """Tiles of one part, of two and of three."""
    torch.manual_seed(1)
    check(Distant(distance), tensors(2, 4, 2, 150, 160, 8), **KINDS[kind])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("other", ["huang1:clip=7", "huang4:clip=7", "tisa", "shaw:clip=7"])
def test_far_rotations_beside_other_terms(other, dtype):
    torch.manual_seed(1)
    parts = [locant.scheme(other, n_heads=4, head_dim=8), Vectors(5, 3), Numbers(NUMBERS[-1]), Distant(20)]
    how = {"softcap": 3.0, "sinks": torch.randn(4), "window": (100, 70)}
    check(locant.schemes.Sum(*parts), tensors(2, 4, 2, 140, 140, 8, dtype=dtype), **how)


def test_far_rotations_do_not_fit_a_gain_per_coordinate():
    class Both(Distant):
        def terms(self, r):
            return locant.Terms(gain=torch.ones(1, len(r), 8))

    with pytest.raises(ValueError, match="rotates far keys differently, and its gain must be"):
        locant.attend(*tensors(1, 2, 2, 9, 9, 8), Both(3))


def everything():
    return locant.schemes.Sum(
        locant.scheme("huang1:clip=4", n_heads=2, head_dim=4), Vectors(3, 2, head_dim=4, own=True),
        Numbers(NUMBERS[-1], head_dim=4), Distant(2, head_dim=4),
    )  # fmt: skip


def test_second_gradients():
    torch.manual_seed(1)
    scheme = everything()
    leaves = [x.requires_grad_() for x in tensors(1, 2, 1, 7, 8, 4)]
    found = {}
    for impl in ("fused", "eager"):
        out = locant.attend(*leaves, scheme, softcap=3.0, impl=impl)
        inputs = [*leaves, *scheme.parameters()]
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        found[impl] = torch.autograd.grad(sum(x.square().sum() for x in first), inputs)
    for x, y in zip(found["fused"], found["eager"], strict=True):
        torch.testing.assert_close(x, y, rtol=2e-3, atol=2e-3)


def test_dropout_drops_the_same_weights_backwards():
    """The output is linear in the values, and its gradient holds the weights: equal to those of the output."""
    torch.manual_seed(1)
    scheme, (q, k, v) = everything(), tensors(1, 2, 2, 140, 140, 4)
    v.requires_grad_()
    out = locant.attend(q, k, v, scheme, dropout=0.4, impl="fused")
    grad = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, grad)
    torch.testing.assert_close((dv * v).sum(), (out * grad).sum(), rtol=1e-4, atol=1e-3)


def test_compiled():
    torch.compiler.reset()
    torch.manual_seed(1)
    scheme, (q, k, v) = everything(), tensors(1, 2, 2, 40, 40, 4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    compiled = torch.compile(
        lambda q, k, v: locant.attend(q, k, v, scheme, causal=True, impl="fused"), backend="aot_eager", fullgraph=True
    )
    ours = torch.autograd.grad(compiled(*leaves).square().sum(), [*leaves, *scheme.parameters()])
    plain = torch.autograd.grad(
        locant.attend(*leaves, scheme, causal=True, impl="eager").square().sum(), [*leaves, *scheme.parameters()]
    )
    for x, y in zip(ours, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)
