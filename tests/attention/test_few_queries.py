"""The path of the fused kernel for few queries and many keys, against `eager` in float64: output and every gradient.

Up to 4 queries take this path (FEW_QUERIES in fused.c), which reads keys in chunks of 512; 5 queries take tiles.
"""

import pytest
import torch

import locant
from locant.attention import build
from locant.attention.request import prepare
from locant.terms import Sides
from tests import cases
from tests.attention.test_fused import build_scheme, check, tensors
from tests.attention.test_fused_sides import Vectors

pytestmark = pytest.mark.skipif(
    build.build().library is None, reason=f"no kernel here: {build.build().why}; returns with a C compiler"
)
SPECS = [
    "nope", "toeplitz:clip=3", "tisa", "t5", "alibi:scaled=true", "huang1:clip=3,heads=shared", "huang2:clip=600",
    "huang3:clip=3", "huang4:clip=3,heads=own", "huang4:clip=600", "shaw:clip=3,heads=own", "shaw:clip=600", "xl",
    "deberta:buckets=4,max_distance=8", "rope+huang4:clip=3,heads=own", "huang1:clip=5+huang4:clip=3+tisa",
]  # fmt: skip
"""Every term: none, bias, gain, query, key and value; of one head and of all; clipped and not."""


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("spec", SPECS)
def test_every_term(spec, queries):
    torch.manual_seed(0)
    check(build_scheme(spec, 4, 16), tensors(2, 4, 2, queries, 530, 16), causal=True)


@pytest.mark.parametrize("keys", [1, 2, 15, 16, 17, 511, 512, 513, 1024, 1300])
@pytest.mark.parametrize("spec", ["tisa", "huang1:clip=5+huang4:clip=3", "shaw:clip=3"])
def test_numbers_of_keys(spec, keys):
    torch.manual_seed(1)
    check(build_scheme(spec, 2, 16), tensors(1, 2, 2, 1, keys, 16))


def _positions(kind):
    """Of 3 queries and 1300 keys, in two sequences."""
    k = torch.arange(1300)
    q = torch.arange(1297, 1300)
    if kind == "restart":  # within a chunk
        k = torch.where(k < 700, k, k - 700)
        q = k[-3:]
    elif kind == "gap":  # between two chunks, and one within
        k = k + 40 * (k >= 512) + 3 * (k >= 1100)
        q = k[-3:]
    elif kind == "reversed":
        k = k.flip(0)
    elif kind == "repeated":
        k, q = k // 2, q // 2
    elif kind == "random":
        k, q = torch.randint(0, 1300, (2, 1300)), torch.randint(600, 1300, (2, 3))
    elif kind == "queries first":
        q = torch.arange(3)
    elif kind == "far":
        q = q + 100_000
    elif kind == "far before":
        q = q - 100_000
    elif kind == "left padded":
        k = (k - torch.tensor([[0], [600]])).clamp(min=0)
        q = k[:, -3:]
    return {"q_pos": q, "k_pos": k}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "kind",
    ["restart", "gap", "reversed", "repeated", "random", "queries first", "far", "far before", "left padded"],
)
@pytest.mark.parametrize("spec", ["toeplitz:clip=90", "huang1:clip=9+huang4:clip=90", "shaw:clip=90"])
def test_positions(spec, kind, causal):
    torch.manual_seed(2)
    check(build_scheme(spec, 2, 16), tensors(2, 2, 1, 3, 1300, 16), causal=causal, **_positions(kind))


WINDOWS = [(0, 0), (3, None), (511, 0), (512, 0), (787, 2), (None, 0), (5000, None)]


@pytest.mark.parametrize("window", WINDOWS)
def test_windows(window):
    """Most windows leave whole chunks hidden; one ends at the edge of a chunk."""
    torch.manual_seed(3)
    check(build_scheme("tisa", 2, 16), tensors(1, 2, 2, 2, 1300, 16), window=window)


def _mask(kind):
    """For 2 sequences, 4 heads, 3 queries and 600 keys."""
    keep = torch.rand(2, 4, 3, 600) < 0.6
    keep[..., 0] = True
    return {
        "padding": torch.arange(600) < torch.tensor([[600], [90]]),
        "left": torch.arange(600) >= torch.tensor([[0], [550]]),
        "pairs": keep,
        "by query": keep[0, 0],
        "by head": keep[:1, :, :1],
        "by sequence": keep[:, :1, :1],
        "transposed": keep.mT.contiguous().mT,
        "every second": keep.repeat_interleave(2, -1)[..., ::2],
        "nothing": torch.zeros(2, 600, dtype=torch.bool),
        "no key of a query": keep & (torch.arange(3) != 1)[:, None],
        "no key of a chunk": keep & (torch.arange(600) >= 512),
    }[kind]


MASKS = ["padding", "left", "pairs", "by query", "by head", "by sequence", "transposed", "every second", "nothing",
         "no key of a query", "no key of a chunk"]  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_masks(kind, causal):
    torch.manual_seed(4)
    check(build_scheme("tisa", 4, 16), tensors(2, 4, 2, 3, 600, 16), mask=_mask(kind), causal=causal)


@pytest.mark.parametrize("sinks", [None, "finite", "large", "none of one head"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("hidden", [False, True])
def test_softcap_and_sinks(softcap, sinks, hidden):
    torch.manual_seed(5)
    how = {"softcap": softcap, "mask": torch.zeros(1, 600, dtype=torch.bool) if hidden else None}
    if sinks is not None:
        how["sinks"] = {
            "finite": torch.tensor([0.5, -1.0]), "large": torch.tensor([80.0, 0.0]),
            "none of one head": torch.tensor([-torch.inf, 1.0]),
        }[sinks]  # fmt: skip
    check(build_scheme("toeplitz:clip=30", 2, 16), tensors(1, 2, 2, 2, 600, 16), **how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("d", "dv"), [(1, 1), (7, 40), (16, 24), (24, 16), (64, 64), (80, 33), (40, 200)])
@pytest.mark.parametrize(("heads", "kv"), [(2, 2), (6, 2), (8, 1), (9, 1)])
def test_sizes_groups_and_dtypes(heads, kv, d, dv, dtype):
    """9 heads of 4 queries for one key/value head are 36 rows, more than FEW_ROWS."""
    torch.manual_seed(6)
    check(build_scheme("tisa", heads, d), tensors(1, heads, kv, 4, 520, d, dv, dtype=dtype), causal=True)


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.mT.contiguous().mT,
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
        lambda x: torch.cat([x, x], -1)[..., x.shape[-1] :],
        lambda x: torch.cat([x, x], 2)[:, :, 3 : 3 + x.shape[2]],
        lambda x: x[:1].expand(2, -1, -1, -1),
        lambda x: x[:, :, :1].expand_as(x),
    ],
    ids=["heads last", "transposed", "every second", "half a row", "part of a buffer", "one sequence", "one row"],
)
def test_layouts(layout):
    torch.manual_seed(7)
    scheme = build_scheme("tisa+huang4:clip=9", 2, 16)
    given = tensors(2, 2, 2, 2, 600, 16)
    with torch.no_grad():
        q, k, v = map(layout, given)
        found = locant.attend(q, k, v, scheme, impl="fused")
        truth = locant.attend(q.double(), k.double(), v.double(), scheme, impl="eager")
    torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [7, 16, 20])
def test_memory_beside_the_rows_is_not_read(size, dtype):
    """Rows are parts of longer ones, whose rest is NaN."""
    torch.manual_seed(7)
    q, k, v = (torch.nn.functional.pad(x, (0, 9), value=torch.nan) for x in tensors(1, 2, 2, 2, 600, size, dtype=dtype))
    q, k, v = (x[..., :size] for x in (q, k, v))
    with torch.no_grad():
        found = locant.attend(q, k, v, None, impl="fused")
        truth = locant.attend(q.double(), k.double(), v.double(), None, impl="eager")
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), truth, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["default", "random"])
@pytest.mark.parametrize(("of_queries", "of_keys"), [(3, None), (16, None), (None, 5), (5, 16), (40, 17)])
def test_side_vectors(of_queries, of_keys, kind):
    torch.manual_seed(8)
    how = {} if kind == "default" else _positions(kind)
    check(Vectors(of_queries, of_keys, reach=40, heads=4, head_dim=8), tensors(2, 4, 2, 3, 1300, 8), **how)


class Numbers(locant.Scheme):
    """Levels and temperatures from q and k, with a table of levels or without; `large` is added to one and taken off
    the other."""

    reach = 5

    def __init__(self, table, *, of_queries=True, of_keys=True, temperature=False, large=0.0):
        super().__init__()
        self.of_queries, self.of_keys, self.temperature, self.large = of_queries, of_keys, temperature, large
        self.table = torch.nn.Parameter(torch.randn(2, 11)) if table else None

    def terms(self, r):
        return locant.Terms(level=None if self.table is None else self.table[:, r.clamp(-5, 5) + 5])

    def sides(self, tokens):
        q, k = tokens.q.double(), tokens.k.double()
        return Sides(
            query_level=q.sum(-1) / 4 + self.large if self.of_queries else None,
            key_level=k.sum(-1) / 4 - self.large if self.of_keys else None,
            temperature=1 + q[..., 0] / 4 if self.temperature else None,
        )


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        {}, {"of_queries": False}, {"of_keys": False}, {"temperature": True}, {"large": 1e6},
        {"of_queries": False, "of_keys": False, "temperature": True},
    ],
    ids=lambda how: ",".join(how) or "both",
)  # fmt: skip
def test_levels_and_temperatures(table, how):
    if table and not (how.get("of_queries", True) or how.get("of_keys", True)):
        pytest.skip("a table of levels needs levels")
    torch.manual_seed(9)
    check(Numbers(table, **how), tensors(2, 2, 2, 3, 600, 8), causal=True)


def test_logits_that_are_far_apart():
    """Chunks whose largest logits differ by hundreds; exp overflows unless the larger one is subtracted."""
    torch.manual_seed(10)
    q, k, v = tensors(1, 2, 2, 2, 1300, 16)
    for first, factor in ((0, 1.0), (512, 60.0), (1024, -60.0)):
        k[:, :, first : first + 512] = k[:, :, first : first + 512].abs() * factor
    with torch.no_grad():
        found = locant.attend(q.abs(), k, v, None, impl="fused")
        truth = locant.attend(q.abs().double(), k.double(), v.double(), None, impl="eager")
    torch.testing.assert_close(found.double(), truth, rtol=1e-3, atol=1e-4)  # logits of hundreds, rounded to float32


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", [0, 300, 555])
def test_a_number_that_is_not_finite_is_not_lost(number, where):
    torch.manual_seed(11)
    q, k, v = tensors(1, 2, 2, 1, 600, 16)
    q = q.abs()
    k[0, 1, where] = number
    with torch.no_grad():
        found = locant.attend(q, k, v, None, impl="fused")
        hidden = locant.attend(q, k, v, None, impl="fused", mask=(torch.arange(600) != where)[None])
    assert found[0, 1].isnan().all()
    assert found[0, 0].isfinite().all()
    assert hidden.isfinite().all()


def test_keys_that_are_all_nan():
    q, k, v = tensors(1, 1, 1, 1, 1100, 16)
    k[:, :, :512] = torch.nan
    with torch.no_grad():
        assert locant.attend(q, k, v, None, impl="fused").isnan().all()
        assert locant.attend(q, k, v, None, impl="fused", mask=torch.arange(1100)[None] >= 512).isfinite().all()


def test_values_of_chunks_outside_the_window_are_not_read():
    """A window of 100 tokens needs the last two of three chunks at most; the first two may hold anything."""
    torch.manual_seed(12)
    q, k, v = tensors(1, 2, 2, 1, 1300, 16)
    with torch.no_grad():
        wanted = locant.attend(q, k, v, None, impl="fused", window=(100, 0))
        k[:, :, :1024], v[:, :, :1024] = torch.nan, torch.nan
        found = locant.attend(q, k, v, None, impl="fused", window=(100, 0))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_threads(dtype):
    torch.manual_seed(13)
    scheme, given = build_scheme("tisa", 4, 16), tensors(2, 4, 2, 2, 1300, 16, dtype=dtype)
    before, outs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            with torch.no_grad():
                outs.append(locant.attend(*given, scheme, impl="fused"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("spec", ["tisa", "huang4:clip=9", "shaw:clip=9"])
def test_equal_to_tiles(spec):
    """The rows of a call of 5 queries, which takes tiles, equal those of calls with 1 query each."""
    torch.manual_seed(14)
    scheme = build_scheme(spec, 2, 16)
    q, k, v = tensors(1, 2, 2, 5, 700, 16)
    q_pos, k_pos = torch.arange(695, 700), torch.arange(700)
    with torch.no_grad():
        together = locant.attend(q, k, v, scheme, impl="fused", q_pos=q_pos, k_pos=k_pos, causal=True)
        for i in range(5):
            alone = locant.attend(
                q[:, :, i : i + 1], k, v, scheme, impl="fused", q_pos=q_pos[i : i + 1], k_pos=k_pos, causal=True
            )
            torch.testing.assert_close(alone, together[:, :, i : i + 1], rtol=1e-4, atol=1e-5)


def test_the_log_sums_are_those_of_tiles():
    """The backward pass reads them: the largest logit and the logarithm of the sum, for every query."""
    from locant.attention import fused
    from locant.attention.fused_call import make_call

    torch.manual_seed(15)
    q, k, v = tensors(1, 2, 2, 4, 700, 16)
    mask = torch.ones(4, 700, dtype=torch.bool)
    mask[2] = False
    scheme = cases.build("tisa", n_heads=2, head_dim=16).float()
    with torch.no_grad():
        _, few = fused.forward(*make_call(prepare(q, k, v, scheme, mask=mask, sinks=torch.tensor([0.3, -torch.inf]))))
        q, mask = torch.cat([q, q[:, :, :1]], 2), torch.cat([mask, mask[:1]])
        pos = {"q_pos": torch.tensor([696, 697, 698, 699, 696]), "k_pos": torch.arange(700)}
        request = prepare(q, k, v, scheme, mask=mask, sinks=torch.tensor([0.3, -torch.inf]), **pos)
        _, tiles = fused.forward(*make_call(request))
    torch.testing.assert_close(few, tiles[:, :, :4], rtol=1e-5, atol=1e-5)
    assert few[0, 1, 2].tolist() == [torch.inf, 0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1e4, 1e6, 1e9])
def test_weights_of_large_logits_are_at_most_1_backwards(size, seed):
    """The forward pass adds the products of a row in another order than the backward pass, so it rounds large logits in
    another way. A query head gives the values of a key head weights that add up to at most 1; two share a key head."""
    torch.manual_seed(seed + 6)
    q, k, _ = tensors(2, 4, 2, 1, 40, 18)
    v = torch.ones(2, 2, 40, 1, requires_grad=True)
    out = locant.attend(q * size, k, v, None, impl="fused")
    out.sum().backward()
    assert (out - 1).abs().max() < 1e-6
    assert 0 <= v.grad.min() <= v.grad.max() <= 2
