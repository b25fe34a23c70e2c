"""The fused kernel against `eager` in float64: output and every gradient, for any shapes, masks and positions.

Tolerances are derived: a few times the error of `eager` in the same dtype, and the rounding of the sums in a result.
"""

import copy
import os
import resource
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import locant
from locant.attention import build, eager, fused
from locant.attention.request import prepare
from locant.schemes.base import wide
from tests import cases
from tests.attention.rounding import rounding

pytestmark = pytest.mark.skipif(
    build.build().library is None, reason=f"no kernel here: {build.build().why}; returns with a C compiler"
)
SPECS = [spec for spec in cases.SPECS if spec not in cases.PAIRS]


def build_scheme(spec, n_heads, head_dim):
    scheme = locant.scheme(spec, n_heads=n_heads, head_dim=head_dim, d_model=n_heads * head_dim)
    with torch.no_grad():
        for parameter in scheme.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return scheme


def results(impl, scheme, tensors, grad, **how):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = locant.attend(*leaves, scheme, impl=impl, **how)
    return [out, *torch.autograd.grad(out, [*leaves, *scheme.parameters()], grad, allow_unused=True)]


def expect(scheme, tensors, grad=None, weights=torch.float32, **how):
    """The results of eager in float64, each with the error that is allowed, and the gradient of the output.

    The error may be 4 times that of eager in the same dtype, and 20 times the rounding of the result and of the sums
    that lead to it (`tests.attention.rounding`). A kernel whose weights are rounded to half precision may also have 4
    times the rounding of that dtype in these sums.
    """
    q, _, v = tensors
    if grad is None:
        grad = torch.randn(*q.shape[:3], v.shape[3]).to(q.dtype)
    own = results("eager", scheme, tensors, grad, **how)
    truth = results("eager", copy.deepcopy(scheme).double(), [x.double() for x in tensors], grad.double(), **how)
    sums = rounding(scheme, [x.float() for x in tensors], grad.float(), **how)
    coarse = 0 if weights == torch.float32 else 4 * torch.finfo(weights).eps / torch.finfo(torch.float32).eps
    allowed = [
        None
        if exact is None
        else 4 * (x.double() - exact).abs().max()
        + 20 * torch.finfo(q.dtype).eps * exact.abs().max()
        + (20 + coarse) * of_sums.max()
        for x, exact, of_sums in zip(own, truth, sums, strict=True)
    ]
    return truth, allowed, grad


def compare(found, truth, allowed):
    for index, (x, exact, most) in enumerate(zip(found, truth, allowed, strict=True)):
        assert (x is None) == (exact is None)
        if x is not None:
            error = (x.double() - exact).abs().max()
            assert error <= most, f"tensor {index}: {error:.2e} from the truth, allowed {most:.2e}"


def check(scheme, tensors, grad=None, impl="fused", **how):
    """Compares a back end with eager in float64."""
    truth, allowed, grad = expect(scheme, tensors, grad, **how)
    compare(results(impl, scheme, tensors, grad, **how), truth, allowed)


def tensors(b, h, kv, lq, lk, d, dv=None, dtype=torch.float32):
    return [
        torch.randn(b, heads, length, size).to(dtype)
        for heads, length, size in ((h, lq, d), (kv, lk, d), (kv, lk, dv or d))
    ]


@pytest.mark.parametrize("kind", ["plain", "causal", "padded", "packed", "left padded", "scattered", "all masked"])
@pytest.mark.parametrize("spec", SPECS)
def test_equal_to_eager(spec, kind):
    """150 tokens are two tiles; with packed or random positions some are SCATTER. For FAR ones see below."""
    b, length = 2, 150
    pos = torch.arange(length)
    how = {}
    if kind == "causal":
        how = {"causal": True}
    elif kind == "padded":
        how = {"mask": torch.arange(length) < torch.tensor([[length], [90]])}
    elif kind == "packed":
        pos = torch.cat([torch.arange(100), torch.arange(50)])
        same = torch.arange(length) < 100
        how = {"mask": same == same[:, None], "causal": True}
    elif kind == "left padded":
        pad = torch.tensor([[0], [30]])
        how = {"mask": pos >= pad, "causal": True}
        pos = (pos - pad).clamp(min=0)
    elif kind == "scattered":
        pos = torch.randint(0, 60, (b, length))
        how = {"causal": True}
    elif kind == "all masked":
        how = {"mask": torch.zeros(b, length, dtype=torch.bool)}
    if kind not in ("plain", "causal"):
        how = {**how, "q_pos": pos, "k_pos": pos}
    check(build_scheme(spec, 4, 8), tensors(b, 4, 2, 150, 150, 8), **how)


@pytest.mark.parametrize("clip", [1, 2, 3])
@pytest.mark.parametrize("name", ["toeplitz", "huang1", "huang3", "huang4", "shaw"])
def test_tiles_at_either_end_of_the_tables(name, clip):
    """The tiles beside the diagonal hold offsets from 1 on. With a clip of 1 one column serves all their pairs; with
    a clip of 2 it serves all but the pair of the tokens 127 and 128."""
    check(build_scheme(f"{name}:clip={clip}", 2, 8), tensors(1, 2, 2, 256, 256, 8))


FAR = [
    "toeplitz:clip=3", "huang1:clip=3", "huang1:clip=3,heads=shared", "huang3:clip=3", "huang3:clip=3,heads=own",
    "huang4:clip=3", "huang4:clip=3,heads=own", "shaw:clip=3", "shaw:clip=3,heads=own", "huang1:clip=3+huang4:clip=3",
    "rope+huang4:clip=3,heads=own", "shaw:clip=3,heads=own+huang3:clip=2",
]  # fmt: skip


@pytest.mark.parametrize("spec", FAR)
def test_far_tiles(spec):
    """257 tokens are three tiles, the last of them with one token: the first and the last are far from each other."""
    check(build_scheme(spec, 4, 8), tensors(1, 4, 2, 257, 257, 8))


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_property_equal_to_eager(data):
    draw = data.draw
    spec = draw(
        st.sampled_from([*SPECS, "huang2:clip=3+shaw:clip=90,heads=own+tisa", "rope+huang4:clip=200", "xl+huang3"])
    )
    kv, groups = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    if "free=2" in spec:
        kv = 2
    lengths = st.sampled_from([1, 2, 9, 33, 127, 128, 129, 257])
    lq, lk = draw(lengths), draw(lengths)
    sizes = [32, 64, 80, 128] if "partial=" in spec else [4, 12, 32, 64, 80, 128]  # an even part must be left to rotate
    d = draw(st.sampled_from(sizes))
    dv = d if spec.startswith("shaw") or "+shaw" in spec else draw(st.sampled_from([1, 5, d]))
    torch.manual_seed(draw(st.integers(0, 1000)))
    scheme = build_scheme(spec, kv * groups, d)
    given_tensors = tensors(2, kv * groups, kv, lq, lk, d, dv)
    how = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        how["mask"] = torch.rand(draw(st.sampled_from([(2, 1, 1, lk), (1, 1, lq, lk), (2, kv * groups, lq, lk)]))) < 0.6
    if draw(st.booleans()) or lq > lk:
        how["q_pos"], how["k_pos"] = torch.randint(0, 60, (2, lq)), torch.randint(0, 60, (1, lk))
        span = int(max(how["k_pos"].max() - how["q_pos"].min(), how["q_pos"].max() - how["k_pos"].min()))
        assume(scheme.reach is not None or 2 * span < 4 * (lq + lk))  # `fused` does not support large gaps
    if draw(st.booleans()):
        how["scale"] = 0.3
    check(scheme, given_tensors, **how)


TABLES = {"bias": (), "gain": (), "vector gain": (8,), "query": (8,), "key": (8,), "value": (8,)}
"""The sizes of a column of each kind of table."""


class Clipped(locant.Scheme):
    """One table over the offsets −3 … 3, in which neighbouring columns differ by much."""

    reach = 3

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.table = torch.nn.Parameter(2 * torch.randn(1, 7, *TABLES[kind]))

    def terms(self, r):
        return locant.Terms(**{self.kind.split()[-1]: self.table[:, r.clamp(-3, 3) + 3]})


@pytest.mark.parametrize("inside", [0, 1, -1], ids="{} inside".format)
@pytest.mark.parametrize("side", [-1, 1], ids=["past", "future"])
@pytest.mark.parametrize("order", ["in order", "shuffled"])
@pytest.mark.parametrize("kind", TABLES)
def test_a_tile_at_the_end_of_the_tables(kind, order, side, inside):
    """128 queries at 0 … 127. The first tile of keys is so far away that its nearest offset is 3 − inside.

    With 0 and −1 every pair of the tile takes the last column, with 1 one pair takes another one. The second tile of
    keys is near, so that the tables have all columns.
    """
    torch.manual_seed(1)
    far = torch.arange(128) + side * (127 + 3 - inside)
    assert (side * (far[None] - torch.arange(128)[:, None])).min() == 3 - inside
    if order == "shuffled":
        far = far[torch.randperm(128)]
    how = {"q_pos": torch.arange(128), "k_pos": torch.cat([far, torch.arange(128)])}
    check(Clipped(kind), tensors(1, 2, 1, 128, 256, 8), **how)


@pytest.mark.parametrize("k_pos", [[3, 4, 5, 6], [0, 4, 2, 6]], ids=["in order", "scattered"])
def test_one_pair_hidden_by_causality(k_pos):
    """The first query may not attend to the last key; all other pairs are visible."""
    how = {"q_pos": torch.tensor([5, 6, 7]), "k_pos": torch.tensor(k_pos), "causal": True}
    check(build_scheme("huang4:clip=3", 2, 8), tensors(1, 2, 2, 3, 4, 8), **how)


@pytest.mark.parametrize("allowed", [False, True], ids=["one hidden", "one visible"])
@pytest.mark.parametrize("pair", [(0, 0), (127, 0), (0, 127), (127, 127), (128, 130), (139, 140)], ids=str)
def test_a_mask_with_one_pair_of_its_own(pair, allowed):
    """The first and the last pair of a tile, of 128 × 128 and of 12 × 13."""
    mask = torch.full((140, 141), not allowed)
    mask[pair] = allowed
    pos = torch.arange(141)
    check(
        build_scheme("huang4:clip=3", 1, 8), tensors(1, 1, 1, 140, 141, 8), mask=mask[None, None], q_pos=pos[:140],
        k_pos=pos,
    )  # fmt: skip


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize(("lq", "lk"), [(144, 144), (160, 132), (129, 192)])
def test_a_last_tile_of_whole_vectors(lq, lk, kind):
    """16, 32 and 64 are whole vectors on every CPU. What lies behind them is from the tile before, unless cleared."""
    how = {"q_pos": torch.arange(lq), "k_pos": torch.arange(lk)}
    torch.manual_seed(1)
    scheme = Clipped(kind)
    check(scheme, tensors(1, 2, 1, lq, lk, 8), **how)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_threads_that_begin_within_a_head(threads):
    """Three sequences of two heads are six tasks. The second of three threads ends one head and begins the next."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        check(build_scheme("huang4:clip=3,heads=own+tisa", 4, 8), tensors(3, 4, 2, 20, 20, 8))
    finally:
        torch.set_num_threads(before)


class Mistake(torch.autograd.Function):
    """Returns a table unchanged, and changes its gradient."""

    @staticmethod
    def forward(ctx, table, change):
        ctx.change = change
        return table.view_as(table)

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


MISTAKES = {
    "sign of r": lambda table: table.flip(1),
    "one column off": lambda table: table.roll(1, 1),
    "factor 1.001": lambda table: 1.001 * table,
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("spec", SPECS)
def test_a_mistake_is_noticed(spec, mistake):
    """A mistake in the tables of the forward pass, and one in their gradients alone."""
    change = MISTAKES[mistake]
    scheme, given_tensors = build_scheme(spec, 4, 8), tensors(2, 4, 2, 60, 60, 8)
    tables = scheme.terms(torch.arange(-59, 60)).tables()
    # a table that is the same at r and −r does not show the sign of r
    shows = bool(tables) and any(not torch.allclose(change(x), x, rtol=1e-5) for x in tables.values())
    trained = any(x.requires_grad for x in tables.values())
    truth, allowed, grad = expect(scheme, given_tensors)
    terms = scheme.terms
    for plant, noticed in ((change, shows), (lambda table: Mistake.apply(table, change), shows and trained)):
        scheme.terms = lambda r, plant=plant: replace(terms(r), **{n: plant(x) for n, x in terms(r).tables().items()})
        found = results("fused", scheme, given_tensors, grad)
        with pytest.raises(AssertionError, match="from the truth") if noticed else nullcontext():
            compare(found, truth, allowed)


@pytest.mark.parametrize("d", [32, 64, 80, 128])
@pytest.mark.parametrize("spec", ["tisa", "huang3:clip=20", "huang4:clip=200", "shaw:clip=20", "xl"])
def test_head_sizes_at_odd_lengths(spec, d):
    check(build_scheme(spec, 2, d), tensors(1, 2, 1, 131, 263, d), causal=True)


@pytest.mark.parametrize("spec", ["tisa", "huang1:clip=20", "huang4:clip=20", "shaw:clip=20", "rope+huang4:clip=20"])
def test_bfloat16(spec):
    check(build_scheme(spec, 4, 32), tensors(2, 4, 2, 150, 150, 32, dtype=torch.bfloat16), causal=True)


def test_tensors_of_any_layout():
    """As a model makes them: transposed from [B, L, H, D], one out of a stack of three, every second, expanded."""
    scheme = build_scheme("huang4:clip=20+shaw:clip=5", 3, 16)
    stack = torch.randn(2, 140, 3, 3, 16)
    q, k, v = (stack[:, :, i].transpose(1, 2) for i in range(3))
    check(scheme, (q, k, v), torch.randn(2, 140, 3, 16).transpose(1, 2))
    wide = torch.randn(2, 3, 280, 32)[:, :, ::2, ::2]
    check(
        scheme, (wide, wide.flip(2), wide[:, :1].expand(2, 3, 140, 16)), torch.randn(1, 1, 1, 1).expand(2, 3, 140, 16)
    )
    one = torch.randn(16, 140).T.expand(2, 3, 140, 16)
    check(scheme, (one, one, one), mask=torch.ones(1, 140, dtype=torch.bool).expand(2, 140))


def test_positions_of_any_layout():
    scheme = build_scheme("huang4:clip=20", 2, 8)
    pos = torch.arange(300, dtype=torch.int32)[::2]
    check(scheme, tensors(2, 2, 2, 150, 150, 8), q_pos=pos, k_pos=pos.flip(0).expand(2, -1), causal=True)
    check(scheme, tensors(2, 2, 2, 150, 150, 8), q_pos=pos - 10_000, k_pos=pos - 10_000)


def test_nan_reaches_the_output():
    scheme = build_scheme("tisa", 2, 8)
    for place in range(3):
        given_tensors = tensors(1, 2, 2, 140, 140, 8)
        given_tensors[place][0, 0, 5, 3] = float("nan")
        ours, truth = (locant.attend(*given_tensors, scheme, impl=impl) for impl in ("fused", "eager"))
        assert torch.equal(ours.isnan(), truth.isnan())
        assert ours.isnan().any()
    given_tensors[0][:] = float("nan")  # a row of NaN is not taken for one that sees no key
    assert locant.attend(*given_tensors, scheme, impl="fused").isnan().all()


@pytest.mark.parametrize("bits", [0x7FC00001, 0x7F800001, -1, 0x7FFFFFFF])
def test_nan_with_a_payload_reaches_the_output(bits):
    q, k, v = tensors(1, 2, 2, 140, 140, 8)
    k[0, 0, 1, 0] = torch.tensor([bits], dtype=torch.int32).view(torch.float32)[0]
    assert locant.attend(q, k, v, build_scheme("huang4:clip=8", 2, 8), impl="fused")[:, 0].isnan().all()


def test_nan_of_a_table_reaches_gradients_in_bfloat16():
    """Rounded as a number, a NaN of ones alone would become −0."""
    scheme = Clipped("query")
    with torch.no_grad():
        scheme.table.fill_(torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)[0])
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 2, 20, 20, 8, dtype=torch.bfloat16))
    out = locant.attend(q, k, v, scheme, impl="fused")
    for x in torch.autograd.grad(out, (q, k, v), torch.ones_like(out)):
        assert x.isnan().all()


def test_gradients_in_bfloat16_are_rounded_to_the_nearest_and_ties_to_even():
    """Of one key the weights are 1: the gradient of its value is the sum of the gradients, 1 + 2⁻⁸ · (1, 1.5, 3, 5)."""
    q, k, v = tensors(1, 1, 1, 2, 1, 4, dtype=torch.bfloat16)
    grad = torch.tensor([[1.0, 1, 1, 1], [2**-8, 1.5 * 2**-8, 3 * 2**-8, 5 * 2**-8]]).bfloat16()[None, None]
    how = {"q_pos": torch.arange(2), "k_pos": torch.arange(1)}
    dv = results("fused", build_scheme("huang4:clip=3", 1, 4), (q, k, v), grad, **how)[3]
    assert ((dv[0, 0, 0] - 1) * 2**7).tolist() == [0, 1, 2, 2]


def test_large_logits():
    scheme = build_scheme("huang4:clip=20", 2, 8)
    q, k, v = tensors(1, 2, 2, 140, 140, 8)
    check(scheme, (100 * q, 10 * k, v))


def test_ties_of_large_logits():
    """A float32 cannot hold the sum of a logit of 1e5 and log 2."""
    q, k, v = tensors(1, 2, 2, 140, 140, 8)
    k[:, :, 1::2] = k[:, :, ::2]
    check(build_scheme("nope", 2, 8), (1e5 * q, k, v))


def test_gradients_of_tables_are_not_rounded_to_bfloat16():
    scheme = build_scheme("tisa", 2, 16)
    q, k, v = tensors(1, 2, 2, 150, 150, 16, dtype=torch.bfloat16)
    v = v + 10
    grad = torch.randn(1, 2, 150, 16).bfloat16()
    ours = results("fused", scheme, (q, k, v), grad)[4:]
    truth = results("eager", copy.deepcopy(scheme).double(), [x.double() for x in (q, k, v)], grad.double())[4:]
    for x, y in zip(ours, truth, strict=True):
        assert (x - y).abs().max() < 1e-3 * y.abs().max()


class Turned(locant.Scheme):
    """A rotation that widens in dtype or in size, which is allowed."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.vectors = torch.nn.Parameter(torch.randn(1, 7, 8))

    def rotate(self, q, k, q_pos, k_pos):
        return self.how(q, k)

    def terms(self, r):
        return locant.Terms(query=self.vectors[:, r.clamp(-3, 3) + 3])


@pytest.mark.parametrize("how", [lambda q, k: (q.double() * 1e60, k.double() * 1e-60), lambda q, k: (q, k.double())])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotations_to_float64_are_refused(how, dtype):
    """In float32 such queries and keys may overflow. Other back ends follow into float64."""
    scheme = Turned(how)
    q, k, v = tensors(1, 2, 2, 60, 60, 8, dtype=dtype)
    with pytest.raises(ValueError, match="it computes in float32, and turned needs float64 at these positions"):
        locant.attend(q, k, v, scheme, impl="fused")
    truth_scheme = copy.deepcopy(scheme).double()
    truth_scheme.how = lambda q, k: (q, k)
    truth = locant.attend(q.double(), k.double(), v.double(), truth_scheme, impl="eager")
    for impl in ("auto", "sdpa", "eager"):
        out = locant.attend(q, k, v, scheme, impl=impl)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), truth, rtol=0, atol=40 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "how",
    [
        lambda q, k: (q, k.float()),
        lambda q, k: (q.float(), k),
        lambda q, k: (torch.cat([q, q], -1), torch.cat([k, -k], -1) * 0.5),
    ],
    ids=["keys wider", "queries wider", "larger"],
)
def test_rotations_may_widen(how, dtype):
    scheme = Turned(how)
    q, k, v = tensors(1, 2, 2, 60, 60, 8, dtype=dtype)
    truth_scheme = copy.deepcopy(scheme).double()
    truth_scheme.how = (lambda q, k: (q, k)) if how(q, k)[0].shape == q.shape else how
    truth = locant.attend(q.double(), k.double(), v.double(), truth_scheme, impl="eager")
    out = locant.attend(q, k, v, scheme, impl="fused")
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=40 * torch.finfo(dtype).eps)


@pytest.mark.slow
def test_fewer_threads_than_requested():
    """OMP_THREAD_LIMIT gives a region fewer threads than it requests; they must do all of the work."""
    code = """
import torch, locant
torch.set_num_threads(3)
scheme = locant.scheme("huang4:clip=8,heads=own", n_heads=4, head_dim=16)
q, k, v = (torch.randn(2, 4, 200, 16, requires_grad=True) for _ in range(3))
results = []
for impl in ("fused", "eager"):
    out = locant.attend(q, k, v, scheme, impl=impl)
    results.append((out, *torch.autograd.grad(out.square().sum(), [q, k, v, scheme.table])))
for a, b in zip(*results):
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
"""
    for limit in ("1", "2"):
        done = run_python(code, OMP_THREAD_LIMIT=limit)
        assert done.returncode == 0, done.stderr


def test_an_output_changed_in_place_raises():
    """The backward pass starts from it."""
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 2, 40, 40, 8))
    out = locant.attend(q, k, v, build_scheme("tisa", 2, 8), impl="fused")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.mul_(3).sum().backward()


def test_the_same_bits_every_time():
    scheme = build_scheme("huang4:clip=300,heads=own+tisa+shaw:clip=9", 4, 16)
    given_tensors = tensors(3, 4, 2, 260, 260, 16)
    grad = torch.randn(3, 4, 260, 16)
    truth, allowed, _ = expect(scheme, given_tensors, grad)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            first, second = (results("fused", scheme, given_tensors, grad) for _ in range(2))
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            compare(first, truth, allowed)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("spec", ["tisa", "huang4:clip=9", "shaw:clip=9", "huang3:clip=9"])
def test_dropout_drops_the_same_weights_backwards(spec, p):
    """With unit vectors as values the output is the weights, and zeros are those that were dropped."""
    h, length, d = 2, 140, 140
    q, k = torch.randn(2, h, length, 8), torch.randn(2, h, length, 8)
    scheme = build_scheme(spec.replace("shaw:", "shaw:values=false,"), h, 8)
    units = torch.eye(length).expand(2, h, length, d)
    torch.manual_seed(5)
    dropped = locant.attend(q, k, units, scheme, dropout=p, impl="fused")
    _, weights = locant.attend(q, k, units, scheme, need_weights=True)
    keep = (dropped != 0).float() / (1 - p)
    torch.testing.assert_close(dropped, weights * keep)
    kept = (dropped != 0).double().mean()
    assert abs(kept - (1 - p)) < 5 * (p * (1 - p) / dropped.numel()) ** 0.5
    assert abs((dropped != 0).double().mean((0, 1, 2)).std() - (p * (1 - p) / (4 * length)) ** 0.5) < 0.02  # no stripes

    scheme = build_scheme(spec, h, 8)
    v, grad = torch.randn(2, h, length, 8), torch.randn(2, h, length, 8)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    everything = [*leaves, *scheme.parameters()]
    torch.manual_seed(5)
    ours = torch.autograd.grad(locant.attend(*leaves, scheme, dropout=p, impl="fused"), everything, grad)
    # the same from the weights of eager and the factors of the dropout
    _, weights = locant.attend(*leaves, scheme, need_weights=True)
    by_hand = (weights * keep) @ leaves[2]
    if "value_table" in dict(scheme.named_parameters()):
        table = scheme.terms(torch.arange(1 - length, length)).value[0]
        r = torch.arange(length) - torch.arange(length)[:, None] + length - 1
        by_hand = by_hand + torch.einsum("bhij,ijd->bhid", weights * keep, table[r])
    for x, y in zip(ours, torch.autograd.grad(by_hand, everything, grad), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4 * max(1.0, float(y.abs().max())))


def test_dropout_differs_from_call_to_call_and_follows_the_seed():
    q, k, v = tensors(1, 2, 2, 40, 40, 8)
    torch.manual_seed(1)
    first, second = (locant.attend(q, k, v, dropout=0.5, impl="fused") for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(first, locant.attend(q, k, v, dropout=0.5, impl="fused"))


def test_operators_are_well_formed():
    scheme = build_scheme("huang4:clip=5+tisa", 2, 8)
    q, k, v = (x.requires_grad_() for x in tensors(2, 2, 1, 20, 20, 8))
    terms = scheme.terms(torch.arange(-19, 20))
    pos = torch.arange(20).expand(2, -1)
    call = fused.Call(
        q=q,
        k=k,
        v=v,
        raw_q=None,
        raw_k=None,
        left=torch.randn(2, 2, 20, 8, requires_grad=True),
        right=torch.randn(2, 2, 20, 8, requires_grad=True),
        distant=torch.randn(2, 1, 20, 8, requires_grad=True),
        query_level=torch.randn(2, 2, 20, dtype=torch.float64, requires_grad=True),
        key_level=torch.randn(2, 2, 20, dtype=torch.float64, requires_grad=True),
        temperature=torch.randn(2, 2, 20, dtype=torch.float64, requires_grad=True),
        bias=terms.bias.detach().requires_grad_(),
        gain=None,
        query=terms.query.detach().requires_grad_(),
        key=terms.key.detach().requires_grad_(),
        value=None,
        level=torch.randn(1, 39, requires_grad=True),
        sinks=torch.randn(2, requires_grad=True),
        q_pos=pos,
        k_pos=pos,
        mask=None,
        seed=torch.zeros(1, dtype=torch.int64),
        consecutive=True,
        first_offset=-19,
        distance=7,
        scale=0.3,
        softcap=2.0,
        lowest=None,
        highest=0,
        dropout=0.0,
    )
    torch.library.opcheck(fused.forward, tuple(call))


def test_a_change_between_forward_and_backward_raises():
    scheme = build_scheme("huang4:clip=5", 2, 8)
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 2, 20, 20, 8))
    out = locant.attend(q, k, v, scheme, impl="fused")
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("spec", ["tisa", "huang4:clip=9", "shaw:clip=9", "rope+huang3:clip=9"])
def test_compiled_training(spec):
    """One graph, one compilation for all lengths, and the same gradients."""
    torch.compiler.reset()
    scheme = build_scheme(spec, 2, 8)
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda q, k, v: locant.attend(q, k, v, scheme, causal=True), backend=count, fullgraph=True, dynamic=True
    )
    for length in (40, 50, 60):
        leaves = [x.requires_grad_() for x in tensors(1, 2, 2, length, length, 8)]
        everything = [*leaves, *scheme.parameters()]
        ours = torch.autograd.grad(compiled(*leaves).square().sum(), everything)
        plain = torch.autograd.grad(
            locant.attend(*leaves, scheme, causal=True, impl="eager").square().sum(), everything
        )
        for x, y in zip(ours, plain, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1
    assert any("locant.attend" in str(node.target) for node in graphs[0].graph.nodes)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_compiler_does_not_trace_the_kernel():
    """Not even where it is called from code between two graphs."""
    torch.compiler.reset()
    leaves = [x.requires_grad_() for x in tensors(1, 2, 2, 40, 40, 8)]
    call = fused.make_call(prepare(*leaves, build_scheme("huang4:clip=9", 2, 8), causal=True))
    graphs = []

    @torch.compiler.disable(recursive=False)
    def between(call):
        return fused.forward(*call)[0]

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda call: between(call).square().sum(), backend=count)
    ours = torch.autograd.grad(compiled(call), leaves, retain_graph=True)
    plain = torch.autograd.grad(fused.forward(*call)[0].square().sum(), leaves)
    for x, y in zip(ours, plain, strict=True):
        torch.testing.assert_close(x, y)
    assert graphs
    assert not any("new_empty" in str(node.target) for graph in graphs for node in graph.graph.nodes)


def test_the_first_call_does_not_import_the_compiler():
    code = """
import sys, torch, locant
q, k, v = (torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3))
locant.attend(q, k, v, locant.scheme("huang4:clip=8", n_heads=2, head_dim=8), impl="fused").sum().backward()
assert "torch._dynamo" not in sys.modules
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_exported():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scheme = build_scheme("huang4:clip=9", 2, 8)

        def forward(self, q, k, v):
            return locant.attend(q, k, v, self.scheme, causal=True, impl="fused")

    model, given_tensors = Model(), tuple(tensors(1, 2, 2, 40, 40, 8))
    length = torch.export.Dim("length", min=1, max=512)
    program = torch.export.export(model, given_tensors, dynamic_shapes=[{2: length}] * 3)
    for n in (1, 12, 40, 70):
        given_tensors = tensors(1, 2, 2, n, n, 8)
        torch.testing.assert_close(program.module()(*given_tensors), model(*given_tensors))


def peak(prepare, work):
    """Megabytes by which a new process grows while it does `work`."""
    code = f"""
import torch, locant
from locant.analysis.speed import peak_memory
torch.set_num_threads(2)
{prepare}
print(peak_memory(lambda: {work}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=500)
    return float(done.stdout.split()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc; returns on Linux")
@pytest.mark.parametrize(("spec", "impl"), [("tisa", "fused"), ("t5", "sdpa")])
def test_memory_of_a_bias_over_32768_tokens(spec, impl):
    """[H, L, L] would be 16 GB. A tenth of the queries is enough: memory grows with the keys."""
    prepare = f"""
q, k, v = (torch.randn(1, 4, n, 64) for n in (2000, 32768, 32768))
scheme = locant.scheme({spec!r}, n_heads=4, head_dim=64)
"""
    assert peak(prepare + "torch.set_grad_enabled(False)", f"locant.attend(q, k, v, scheme, impl={impl!r})") < 2000


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc; returns on Linux")
def test_memory_of_training_grows_with_the_length_alone():
    """Twice the length takes about twice the memory. By pairs, method 4 would need an [L, L, D] tensor."""
    grown = []
    for length in (4096, 8192):
        prepare = f"""
q, k, v = (torch.randn(1, 1, {length}, 64, requires_grad=True) for _ in range(3))
scheme = locant.scheme("huang4:clip=128", n_heads=1, head_dim=64)
locant.attend(q[:, :, :64], k[:, :, :64], v[:, :, :64], scheme).sum().backward()
"""
        grown.append(peak(prepare, "locant.attend(q, k, v, scheme).sum().backward()"))
    assert grown[0] > 1  # else the measurement failed
    assert grown[1] < 2.5 * grown[0] + 20
    assert grown[1] < 200


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env={**os.environ, **environment}
    )


def test_memory_is_freed():
    scheme = build_scheme("huang4:clip=20", 2, 16)
    given_tensors, grad = tensors(1, 2, 2, 600, 600, 16), torch.randn(1, 2, 600, 16)
    results("fused", scheme, given_tensors, grad)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(60):
        results("fused", scheme, given_tensors, grad)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KB; each call takes several MB


def test_the_sums_that_are_kept_for_the_backward_pass():
    """The largest logit of every query, and the logarithm of the sum of exp(logit − largest)."""
    scheme = cases.build("toeplitz:clip=3").float()
    for dtype in (torch.float32, torch.bfloat16):
        request = prepare(*cases.tensors(lq=7, dtype=dtype), scheme)
        out, lse = fused.forward(*fused.make_call(request))
        logits = eager.logits(request)
        assert (out.dtype, out.shape) == (torch.float32, (2, 4, 7, 8))
        assert (lse.dtype, lse.shape) == (torch.float32, (2, 4, 7, 2))
        torch.testing.assert_close(lse[..., 0], logits.amax(-1))
        torch.testing.assert_close(lse.sum(-1), logits.logsumexp(-1))


def test_seeds_of_dropout_are_drawn_from_a_wide_range():
    request = prepare(*cases.tensors(dtype=torch.float32), None, dropout=0.1)
    seeds = {int(fused.make_call(request).seed) for _ in range(50)}
    assert len(seeds) == 50
    assert min(seeds) >= 0
    assert max(seeds) > 2**60
    assert {int(fused.make_call(replace(request, dropout=0.0)).seed) for _ in range(3)} == {0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotation", ["nope", "rope", "wider"])
@pytest.mark.parametrize("names", [("query",), ("key",), ("query", "key"), ("value",), ("bias",), ("gain",)])
def test_each_table_beside_a_rotation(names, rotation, dtype):
    """Query and key terms belong to the vectors without the rotation, also if a scheme has one of them alone."""

    class Wider(locant.Scheme):
        def rotate(self, q, k, q_pos, k_pos):
            return wide(q.flip(-1)), wide(2 * k.flip(-1))

    class Own(locant.Scheme):
        def __init__(self):
            super().__init__()
            for name in names:
                shape = (4, 40) if name in ("bias", "gain") else (4, 40, 8)
                self.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))

        def terms(self, r):
            return locant.Terms(**{name: getattr(self, name)[:, r + 20] for name in names})

    turned = Wider() if rotation == "wider" else locant.scheme(rotation, head_dim=8)
    check(locant.schemes.Sum(turned, Own()), tensors(2, 4, 2, 20, 20, 8, dtype=dtype), causal=True)


def test_positions_that_are_not_contiguous():
    q, k, v = cases.tensors(lq=9, lk=9, dtype=torch.float32)
    pos = torch.stack([3 * torch.arange(9), torch.full((9,), 50)], dim=-1)[:, 0]
    assert pos.stride() == (2,)
    scheme = cases.build("tisa").float()
    found = locant.attend(q, k, v, scheme, impl="fused", q_pos=pos, k_pos=pos)
    torch.testing.assert_close(found, locant.attend(q, k, v, scheme, impl="eager", q_pos=pos, k_pos=pos))


def test_what_is_set_in_the_struct_of_a_call_is_a_field():
    """ctypes accepts any attribute; the kernel would read 0 from a field whose name is misspelt."""
    q, k, v = cases.tensors(dtype=torch.float32)
    call = fused.make_call(prepare(q, k, v, cases.build("tisa").float()))
    kernel = fused._Kernel(call, torch.empty_like(q), torch.empty(q.shape[:3]))
    assert vars(kernel.struct) == {}


def test_the_weight_of_a_key_that_is_not_visible_is_exactly_0():
    """The smallest number above 0, times the largest value, would be 4."""
    q, k, v = cases.tensors(lq=9, lk=9, dtype=torch.float32)
    v[:, :, 4] = 3e38
    mask = (torch.arange(9) != 4).expand(2, 9)
    scheme = cases.build("tisa").float()
    found = locant.attend(q, k, v, scheme, impl="fused", mask=mask)
    torch.testing.assert_close(found, locant.attend(q, k, v, scheme, impl="eager", mask=mask))


def test_heads_and_sequences_drop_other_weights():
    q, k, v = (x[:1, :1].expand(2, 4, -1, -1) for x in cases.tensors(lq=40, lk=40, dtype=torch.float32))
    scheme = locant.scheme("huang1:clip=4", n_heads=4)  # its gains start at 1, in every head
    same = locant.attend(q, k, v, scheme, impl="fused").flatten(0, 1)
    assert all(torch.equal(row, same[0]) for row in same)
    found = locant.attend(q, k, v, scheme, impl="fused", dropout=0.5).flatten(0, 1)
    assert len({tuple(row.flatten().tolist()) for row in found}) == 8
