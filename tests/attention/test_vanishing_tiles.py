"""Tiles whose weights are all 0 in float32 are left out by the fused kernel; nothing else may be.

256 tokens and more are two tiles and more. Biases fall by 1 or more per token, so the weights of far tiles are below
10⁻⁴⁵ unless a long query meets a long key.
"""

import pytest
import torch

import locant
from locant.attention import build
from locant.schemes.base import wide
from locant.terms import Sides
from tests.attention.test_fused import check, results, tensors

pytestmark = pytest.mark.skipif(
    build.build().library is None, reason=f"no kernel here: {build.build().why}; returns with a C compiler"
)
LENGTH = 420
"""Four tiles, the last one with 36 tokens."""


class Falling(locant.Scheme):
    """A bias of −slope·|r| per head, a gain and levels: whatever the bound of a tile is made of."""

    def __init__(self, slopes, gain=None, levels=None, reach=None):
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor(slopes))
        self.gain, self.levels, self._reach = gain, levels, reach
        self.has_levels = levels is not None

    @property
    def reach(self):
        return self._reach

    def terms(self, r):
        far = wide(r.abs().float())
        return locant.Terms(
            bias=-wide(self.slopes)[:, None] * far,
            gain=None if self.gain is None else self.gain * torch.cos(far / 40)[None],
            level=None if self.levels is None else (1 + far / 400)[None],
        )

    def sides(self, tokens):
        if self.levels is None:
            return Sides()
        e, d = (self.levels * pos.double()[:, None] for pos in (tokens.q_pos, tokens.k_pos))
        return Sides(query_level=-e, key_level=d)


def packed():
    pos = torch.cat([torch.arange(300), torch.arange(120)])
    same = torch.arange(LENGTH) < 300
    return {"q_pos": pos, "k_pos": pos, "mask": same == same[:, None]}


HOW = {
    "plain": dict,
    "causal": lambda: {"causal": True},
    "a window": lambda: {"window": (200, 30)},
    "left padded": lambda: {"mask": torch.arange(LENGTH) >= torch.tensor([[0], [270]]), "causal": True},
    "near keys hidden": lambda: {
        "mask": ((torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]).abs() > 250)[None, None]
    },
    "packed": packed,
    "shuffled": lambda: dict.fromkeys(("q_pos", "k_pos"), torch.randperm(LENGTH)),
    "reversed": lambda: dict.fromkeys(("q_pos", "k_pos"), torch.arange(LENGTH).flip(0)),
    "sinks": lambda: {"sinks": torch.tensor([0.5, -torch.inf, 40.0, -40.0])},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("scheme", ["bias", "gain", "levels", "rising levels", "negative levels"])
def test_equal_to_eager(scheme, how):
    slopes = [1.0, 3.0, 0.2, 0.0]
    built = {
        "bias": lambda: Falling(slopes),
        "gain": lambda: Falling(slopes, gain=-2.0),
        "levels": lambda: Falling(slopes, levels=0.3),
        "rising levels": lambda: Falling([0.0] * 4, levels=1.5),
        "negative levels": lambda: Falling([0.0] * 4, levels=-1.5),
    }
    check(built[scheme](), tensors(2, 4, 2, LENGTH, LENGTH, 8), **HOW[how]())


@pytest.mark.parametrize("spec", ["local:window=30", "local:window=30,first=false", "tisa+local:window=130", "alibi",
                                  "rope+local:window=130"])  # fmt: skip
def test_schemes_that_fall(spec):
    check(locant.scheme(spec, n_heads=2, head_dim=8, d_model=16), tensors(1, 2, 2, LENGTH, LENGTH, 8))


def test_small_weights_are_not_left_out():
    """A bias of −11 at the nearest pair of tiles that are not neighbours: weights of 10⁻⁵, and the bound is close."""
    q, k, v = tensors(1, 1, 1, LENGTH, LENGTH, 8)
    check(Falling([0.085]), [q * 0.001, k, v])


@pytest.mark.parametrize("place", [0, 127, 128, LENGTH - 1])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("part", ["query", "key"])
def test_a_long_vector_far_away(part, place, sign):
    """A content product of 4,000 outweighs a bias of −3 per token over all 420 tokens. Only one query, or only one key,
    has it."""
    q, k, v = tensors(1, 1, 1, LENGTH, LENGTH, 8)
    q[..., 0], k[..., 0] = 1.0, 1.0
    (q if part == "query" else k)[:, :, place, 0] = sign * 4000.0 * 8**0.5
    check(Falling([3.0]), [q, k, v])


def test_a_gain_that_is_large_far_away():
    """The content product of far tokens is multiplied by −30, that of near ones by 0."""

    class Gain(locant.Scheme):
        def terms(self, r):
            return locant.Terms(bias=-r.abs().float()[None], gain=torch.where(r.abs() > 300, -30.0, 0.0)[None])

    q, k, v = tensors(1, 1, 1, LENGTH, LENGTH, 8)
    check(Gain(), [q * 8, k * 8, v])


def test_a_key_level_that_is_large_far_away():
    """One key has a level that outweighs the bias, once at either end of its tile."""

    class Level(locant.Scheme):
        has_levels = True

        def __init__(self, place):
            super().__init__()
            self.place = place

        def terms(self, r):
            return locant.Terms(bias=-2.0 * r.abs().float()[None])

        def sides(self, tokens):
            return Sides(key_level=2000.0 * (tokens.k_pos[:, None] == self.place).double())

    for place in (0, 127, 128, LENGTH - 1):
        check(Level(place), tensors(1, 1, 1, LENGTH, LENGTH, 8))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_numbers_that_are_not_finite_reach_the_output(part, bad):
    """Far from every query: 0 · ∞ is NaN, as in eager."""
    given = dict(zip("qkv", tensors(1, 1, 1, LENGTH, LENGTH, 8), strict=True))
    given[part][:, :, 3, 2] = bad
    out = locant.attend(**given, scheme=Falling([3.0]), impl="fused")
    expected = locant.attend(**given, scheme=Falling([3.0]), impl="eager")
    assert torch.equal(out.isfinite(), expected.isfinite())


@pytest.mark.parametrize("sinks", [None, torch.tensor([150.0])], ids=["no sinks", "a sink above all logits"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("part", ["gradient", "value"])
def test_numbers_that_are_not_finite_reach_the_gradients(part, bad, sinks):
    """A weight of 0 times a gradient that is not finite, or times that of an output that is not, is NaN. With the sink
    all weights are 0."""
    q, k, v = tensors(1, 1, 1, LENGTH, LENGTH, 8)
    grad = torch.randn_like(q)
    (grad if part == "gradient" else v)[0, 0, 5, 0] = bad
    found, expected = (results(impl, Falling([3.0]), [q, k, v], grad, sinks=sinks) for impl in ("fused", "eager"))
    for x, exact in zip(found, expected, strict=True):
        assert torch.equal(x.isfinite(), exact.isfinite())


def test_tiny_queries_and_huge_keys():
    """The squares of these queries underflow in float32, those of the keys overflow; the products are 300."""
    q, k, v = tensors(1, 1, 1, LENGTH, LENGTH, 8)
    q, k = torch.full_like(q, 1e-25), torch.full_like(k, 0.0)
    k[:, :, 0] = 3e27 / 8**0.5
    assert (q[0, 0, -1] * k[0, 0, 0]).sum() * 8**-0.5 > 200
    out = locant.attend(q, k, v, Falling([0.5]), impl="fused")
    expected = locant.attend(q, k, v, Falling([0.5]), impl="eager")
    assert (out - expected).abs().max() < 1e-5


def test_dropout():
    """Dropout drops the same weights whichever tiles are computed. Head 0 sees nothing beyond 130 tokens: the mask
    hides weights that are 0 anyway."""
    scheme, (q, k, v) = Falling([3.0, 0.0]), tensors(1, 2, 2, LENGTH, LENGTH, 8)
    grad = torch.randn_like(q)
    torch.manual_seed(5)
    whole = results("fused", scheme, [q, k, v], grad, dropout=0.4)
    torch.manual_seed(5)
    far = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
    hidden = torch.stack([far.abs() <= 130, torch.ones_like(far, dtype=torch.bool)])[None]
    masked = results("fused", scheme, [q, k, v], grad, dropout=0.4, mask=hidden)
    assert all(torch.equal(a, b) for a, b in zip(whole, masked, strict=True))


def test_bfloat16():
    check(Falling([3.0, 0.0]), tensors(1, 2, 2, LENGTH, LENGTH, 8, dtype=torch.bfloat16))


class Far(locant.Scheme):
    """A bias that falls, and another term that is larger beyond 300 tokens."""

    def __init__(self, term):
        super().__init__()
        self.term = term
        self.has_temperature = term == "temperature"

    def terms(self, r):
        far = (r.abs() > 300).float()[None, :, None].expand(1, -1, 8)
        given = {
            "query": {"query": 500 * far},
            "key": {"key": 500 * far},
            "gain": {"gain": 1 + 200 * far},
            "value": {"value": 3 * far},
        }
        return locant.Terms(bias=-1.0 * r.abs().float()[None], **given.get(self.term, {}))

    def sides(self, tokens):
        if self.term != "temperature":
            return Sides()
        return Sides(temperature=torch.where(tokens.q_pos[:, None] % 2 == 0, 1.0, -1.0))


@pytest.mark.parametrize("term", ["query", "key", "gain", "value", "temperature"])
def test_terms_without_a_bound(term):
    """With a negative temperature the bias rises with the distance."""
    check(Far(term), tensors(1, 2, 2, LENGTH, LENGTH, 8))


def test_a_softcap():
    """A capped logit falls no further."""
    check(Falling([3.0]), tensors(1, 1, 1, LENGTH, LENGTH, 8), softcap=5.0)
