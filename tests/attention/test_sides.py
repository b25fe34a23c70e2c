"""Side vectors, levels and temperatures: the general form against loops over pairs, forms of x, and bad input."""

import numpy as np
import pytest
import torch

import locant
from locant import Scheme, attend
from locant.attention import eager
from locant.attention.request import prepare
from locant.attention.sides import NotCausal, Remembered
from locant.schemes import Sum
from locant.terms import Sides, Terms
from tests import frontier_oracles as oracles

B, H, L, D, W, CLIP, SCALE = 2, 4, 7, 6, 5, 3, 0.4


class Everything(Scheme):
    """Every part that a scheme can compute for each token."""

    reads_queries = reads_keys = has_levels = True
    pairwise, read_width, reach = False, 3, CLIP

    def __init__(self, *, n_heads: int, d_model: int) -> None:
        super().__init__()
        self.n_heads, self.d_model = n_heads, d_model
        self.weight = torch.nn.Parameter(torch.randn(n_heads, 3, d_model, dtype=torch.float64))
        self.table = torch.nn.Parameter(torch.randn(n_heads, 2 * CLIP + 1, 2, dtype=torch.float64))

    def read(self, x):
        return torch.einsum("hwd,bld->bhlw", self.weight, x.to(self.weight))

    def terms(self, r):
        table = self.table[:, r.clamp(-CLIP, CLIP) + CLIP]
        return Terms(query_side=table, key_side=-table, level=table[..., 0])

    def sides(self, tokens):
        return Sides(
            query=tokens.read_q[..., :2],
            key=tokens.read_k[..., 1:],
            query_level=tokens.read_q[..., 2].double(),
            key_level=tokens.read_k[..., 0].double(),
            temperature=1 + tokens.q_pos[:, None].double() / 10,
        )


class ReadsQueries(Everything):
    """A scheme without side vectors of keys."""

    reads_keys = has_levels = False

    def terms(self, r):
        return Terms(query_side=self.table[:, r.clamp(-CLIP, CLIP) + CLIP])

    def sides(self, tokens):
        return Sides(query=tokens.read_q[..., :2])


@pytest.fixture
def given():
    torch.manual_seed(0)
    tensors = [torch.randn(B, H, L, D, dtype=torch.float64) for _ in range(3)]
    return (*tensors, torch.randn(B, L, W, dtype=torch.float64), Everything(n_heads=H, d_model=W))


def by_loops(q, k, x, scheme, positions):
    """The general form, one pair at a time."""
    read, table = scheme.read(x).detach().numpy(), scheme.table.detach().numpy()

    def at(h, r):
        return table[h, max(-CLIP, min(CLIP, r)) + CLIP]

    found = oracles.logits(
        q.numpy(), k.numpy(), positions, positions, SCALE, p=read[..., :2], a=at, t=read[..., 1:],
        c=lambda h, r: -at(h, r),
    )  # fmt: skip
    for b, h, i, j in np.ndindex(found.shape):
        level = at(h, positions[j] - positions[i])[0] * (read[b, h, i, 2] + read[b, h, j, 0])
        found[b, h, i, j] = (1 + positions[i] / 10) * (found[b, h, i, j] + level)
    return found


@pytest.mark.parametrize("positions", [list(range(L)), [5, 0, 9, 2, 2, 30, 4]])
def test_the_general_form_is_the_sum_over_its_parts(given, positions):
    q, k, v, x, scheme = given
    where = {"q_pos": torch.tensor(positions), "k_pos": torch.tensor(positions)}
    wanted = by_loops(q, k, x, scheme, positions)
    got = eager.logits(prepare(q, k, v, scheme, x=x, scale=SCALE, **where))
    np.testing.assert_allclose(got.detach().numpy(), wanted, atol=1e-12)
    out = oracles.attention(wanted, v.numpy())[0]
    for impl in ("eager", "sdpa"):
        got = locant.attend(q, k, v, scheme, x=x, scale=SCALE, impl=impl, **where)
        np.testing.assert_allclose(got.detach().numpy(), out, atol=1e-12)


def test_flex_computes_the_same(given):
    q, k, v, x, scheme = given
    truth = locant.attend(q, k, v, scheme, x=x, scale=SCALE, impl="eager", causal=True)
    with torch.no_grad():
        narrow = [each.float() for each in (q, k, v)]
        got = locant.attend(*narrow, scheme.float(), x=x.float(), scale=SCALE, impl="flex", causal=True)
    torch.testing.assert_close(got.double(), truth, atol=1e-5, rtol=1e-5)


def test_a_sum_with_vectors_of_the_queries_themselves(given):
    """shaw multiplies q, the other scheme side vectors: one table of longer vectors."""
    q, k, v, x, scheme = given
    shaw = locant.scheme("shaw:clip=2,values=false", n_heads=H, head_dim=D).double()
    tisa = locant.scheme("tisa:kernels=2", n_heads=H).double()
    temperature = 1 + torch.arange(L, dtype=torch.float64)[:, None] / 10
    alone = eager.logits(prepare(q, k, v, scheme, x=x, scale=SCALE))
    others = eager.logits(prepare(q, k, v, Sum(shaw, tisa), scale=SCALE)) - SCALE * q @ k.mT
    for both in (Sum(scheme, shaw, tisa), Sum(tisa, shaw, scheme)):
        got = eager.logits(prepare(q, k, v, both, x=x, scale=SCALE))
        torch.testing.assert_close(got, alone + temperature * others)


def test_forms_of_x(given):
    q, k, v, x, scheme = given
    want = locant.attend(q, k, v, scheme, x=x)
    read = scheme.read(x)
    for form in ((x, x), Remembered(read, read)):
        assert torch.equal(locant.attend(q, k, v, scheme, x=form), want)
    last = slice(L - 2, L)
    got = locant.attend(q[:, :, last], k, v, scheme, x=x)  # the queries are the last of the keys
    torch.testing.assert_close(got, want[:, :, last])
    of_queries = ReadsQueries(n_heads=H, d_model=W)
    want = locant.attend(q, k, v, of_queries, x=x)[:, :, last]
    for form in (x, x[:, last], (x[:, last], None)):
        torch.testing.assert_close(locant.attend(q[:, :, last], k, v, of_queries, x=form), want)
    assert torch.equal(locant.attend(q, k, v, None, x=x), locant.attend(q, k, v))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda x: None, "reads hidden states: pass x="),
        (lambda x: x[:, :3], r"x must be \[2, 7, 5\], the hidden states of the tokens; got \[2, 3, 5\]"),
        (lambda x: x[..., :4], r"x must be \[2, 7, 5\].*got \[2, 7, 4\]"),
        (lambda x: x[:1], r"x must be \[2, 7, 5\]"),
        (lambda x: x[0], r"x must be \[2, 7, 5\]"),
        (lambda x: (x, None), "reads the hidden states of the keys, which are None"),
        (lambda x: (x, x, x), "got a tuple of 3"),
    ],
)
def test_bad_hidden_states(given, change, problem):
    q, k, v, x, scheme = given
    with pytest.raises(ValueError, match=problem):
        locant.attend(q, k, v, scheme, x=change(x))
    with pytest.raises(TypeError, match="x must be a tensor of floating-point numbers"):
        locant.attend(q, k, v, scheme, x=x.long())


def test_bad_memories(given):
    q, k, v, x, scheme = given
    read = scheme.read(x)
    for keys, got in ((None, "got nothing"), (read[0], r"got \[4, 7"), (read[:, :, :3], r"got \[2, 4, 3")):
        with pytest.raises(ValueError, match=f"what it read of the keys.*{got}"):
            locant.attend(q, k, v, scheme, x=Remembered(read, keys))


@pytest.mark.parametrize(
    ("sides", "terms", "problem"),
    [
        (Sides(query=torch.ones(1, 1, L, 2)), Terms(), "Terms.query_side is missing"),
        (Sides(), Terms(key_side=torch.ones(1, 1, 2)), "Sides.key is missing"),
        (Sides(query=torch.ones(1, 1, L, 3)), Terms(query_side=torch.ones(1, 1, 2)), "vectors of 2 numbers .* of 3"),
        (Sides(), Terms(level=torch.ones(1, 1)), "no levels in Sides"),
        (Sides(temperature=torch.ones(1, 1, L + 1)), Terms(), "Sides.temperature must be"),
        (Sides(key_level=torch.ones(1, 3, L)), Terms(), "Sides.key_level must be"),
    ],
)
def test_what_a_scheme_returns_must_fit(given, sides, terms, problem):
    class Wrong(Scheme):
        def sides(self, tokens):
            return sides

        def terms(self, r):
            return Terms(**{name: table.expand(1, len(r), *table.shape[2:]) for name, table in terms.tables().items()})

    with pytest.raises(ValueError, match=problem):
        locant.attend(*given[:3], Wrong())


def test_a_causal_scheme_refuses_later_keys(given):
    class Causal(Scheme):
        causal_only = True

    q, k, v = given[:3]
    future = torch.ones(L, L, dtype=torch.bool).tril(1)[None, None]
    for how in ({}, {"mask": future}, {"window": (3, 1)}):
        with pytest.raises(NotCausal, match="is for causal attention"):
            locant.attend(q, k, v, Causal(), **how)
    want = locant.attend(q, k, v, causal=True)
    for how in ({"causal": True}, {"mask": future.tril()}, {"window": (None, 0)}):
        torch.testing.assert_close(locant.attend(q, k, v, Causal(), **how), want)
    locant.attend(q[:, :, -1:], k, v, Causal())  # one query: the last token


def test_one_tensor_x_is_refused_for_queries_that_are_not_the_last_keys(given):
    q, k, v, x, _ = given
    scheme = ReadsQueries(n_heads=H, d_model=W)
    some, where = slice(2, 4), {"q_pos": torch.tensor([2, 3]), "k_pos": torch.arange(L)}
    with pytest.raises(ValueError, match="q_pos has other positions than the last of k_pos"):
        locant.attend(q[:, :, some], k, v, scheme, x=x, **where)
    got = locant.attend(q[:, :, some], k, v, scheme, x=(x[:, some], None), **where)
    torch.testing.assert_close(got, locant.attend(q, k, v, scheme, x=x)[:, :, some])


def fox(**options):
    torch.manual_seed(0)
    scheme = locant.schemes.Fox(n_heads=H, d_model=W, **options).double()
    torch.nn.init.normal_(scheme.gate)
    return scheme


def test_padding_between_two_tokens_has_no_forget_gate(given):
    """A right-padded prompt, and tokens after it."""
    q, k, v, x, _ = given
    kept = torch.tensor([0, 1, 4, 5, 6])
    pos = torch.tensor([0, 1, 1, 1, 2, 3, 4])
    mask = torch.ones(B, L, dtype=torch.bool)
    mask[:, 2:4] = False
    for how in ({"causal": True}, {}):
        scheme = fox(two_sided=not how)
        got = locant.attend(q, k, v, scheme, x=x, q_pos=pos, k_pos=pos, mask=mask[:, None, None], **how)[:, :, kept]
        tensors = (y[:, :, kept] for y in (q, k, v))
        torch.testing.assert_close(got, locant.attend(*tensors, scheme, x=x[:, kept], **how))


@pytest.mark.parametrize("two_sided", [False, True])
def test_compiled_forget_gates_follow_positions(given, two_sided):
    q, k, v, x, _ = given
    scheme, how = fox(two_sided=two_sided), {"causal": not two_sided}
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    packed = torch.tensor([0, 1, 2, 0, 1, 2, 3])
    apart = (packed.cumsum(0) >= 3) | (torch.arange(L) > 3)
    mask = (apart[:, None] == apart)[None, None]

    def run(q, k, v, x, pos, mask):
        return locant.attend(q, k, v, scheme, x=x, q_pos=pos, k_pos=pos, mask=mask, impl="eager", **how)

    compiled = torch.compile(run, backend="eager")
    shuffled = [y[:, :, order] for y in (q, k, v)]
    for arguments in ((*shuffled, x[:, order], order, None), (q, k, v, x, packed, mask)):
        torch.testing.assert_close(compiled(*arguments), run(*arguments))
    torch.testing.assert_close(
        run(*shuffled, x[:, order], order, None), run(q, k, v, x, torch.arange(L), None)[:, :, order]
    )


def test_forget_gates_of_queries_with_positions_of_their_own_rows(given):
    q, k, v, x, _ = given
    scheme, q_pos = fox(two_sided=True), torch.arange(L).expand(B, -1)
    got = locant.attend(q, k, v, scheme, x=(x, x), q_pos=q_pos, k_pos=torch.arange(L))
    torch.testing.assert_close(got, locant.attend(q, k, v, scheme, x=x))
    order = torch.randperm(L)
    got = locant.attend(q, k[:, :, order], v[:, :, order], scheme, x=(x, x[:, order]), q_pos=q_pos, k_pos=order)
    torch.testing.assert_close(got, locant.attend(q, k, v, scheme, x=x))


@pytest.mark.parametrize("spec", ["inkling:extent=4", "fox"])
def test_one_x_of_the_keys_is_refused_for_more_queries_than_keys(spec):
    scheme = locant.scheme(spec, n_heads=2, head_dim=8, d_model=16)
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"x has 3 keys, and there are 5 queries; pass x=\(states of queries"):
        attend(q, k, k, scheme, causal=True, x=torch.randn(1, 3, 16), q_pos=torch.arange(5), k_pos=torch.arange(3))


def test_a_temperature_does_not_narrow_queries_that_a_rotation_has_widened():
    """xPos grows beyond float32 here and goes on in float64; sdpa once multiplied its queries in float32."""
    scheme = locant.scheme("logn:n0=2+xpos:base=4.0", n_heads=1, head_dim=4, d_model=4)
    q, k, v = torch.randn(3, 1, 1, 3, 4, generator=torch.Generator().manual_seed(0))
    pos = torch.tensor([[0, 700, 701]])
    wanted = attend(q.double(), k.double(), v.double(), scheme, q_pos=pos, impl="eager")
    for impl in ("sdpa", "eager"):
        torch.testing.assert_close(attend(q, k, v, scheme, q_pos=pos, impl=impl).double(), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("batch", "queries"), [(1, 0), (0, 3)])
def test_far_rotations_without_queries(batch, queries):
    scheme = locant.scheme("rope@selfextend:window=8,size=4", n_heads=2, head_dim=8, d_model=16)
    q, k = torch.randn(batch, 2, queries, 8), torch.randn(batch, 2, 5, 8)
    assert attend(q, k, k, scheme).shape == q.shape


class Spread(Scheme):
    """Side vectors that sequences or heads share, or the same ones in full."""

    pairwise, reach = False, CLIP

    def __init__(self, rows: int, heads: int, *, full: bool) -> None:
        super().__init__()
        self.rows, self.heads, self.full = rows, heads, full
        generator = torch.Generator().manual_seed(1)
        self.table = torch.randn(H, 2 * CLIP + 1, 2, dtype=torch.float64, generator=generator)

    def terms(self, r):
        table = self.table[:, r.clamp(-CLIP, CLIP) + CLIP]
        return Terms(query_side=table, key_side=-table)

    def sides(self, tokens):
        def vectors(length):
            found = torch.randn(B, H, length, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
            found = found[: self.rows, : self.heads]
            return found.expand(B, H, -1, -1).contiguous() if self.full else found

        return Sides(query=vectors(tokens.q.shape[2]), key=vectors(tokens.k.shape[2]))


@pytest.mark.parametrize("beside", [None, "shaw:clip=2,values=false"])
@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (B, 1), (1, H)])
def test_side_vectors_may_be_the_same_for_all_sequences_or_heads(given, rows, heads, beside):
    """Also next to a scheme that multiplies the queries themselves, and for fewer queries than keys."""
    q, k, v = given[:3]
    q = q[:, :, -3:]
    torch.manual_seed(0)
    other = None if beside is None else locant.scheme(beside, n_heads=H, head_dim=D).double()
    shared, full = (Spread(rows, heads, full=full) for full in (False, True))
    if other is not None:
        shared, full = Sum(shared, other), Sum(full, other)
    wanted = locant.attend(q, k, v, full, impl="eager")
    assert not torch.allclose(wanted, locant.attend(q, k, v, other, impl="eager"))
    for impl in ("eager", "sdpa"):
        torch.testing.assert_close(locant.attend(q, k, v, shared, impl=impl), wanted)


def test_hidden_states_of_any_width_for_a_scheme_that_reads_none(given):
    q, k, v, x, _ = given
    assert torch.equal(locant.attend(q, k, v, None, x=x[..., :2]), locant.attend(q, k, v))
    with pytest.raises(ValueError, match=r"x must be \[2, 7, d_model\], .*; got \[2, 3, 5\]"):
        locant.attend(q, k, v, None, x=x[:, :3])


def test_vmap_over_positions_with_one_tensor_x(given):
    """Under vmap nobody can read whether the queries are the last of the keys."""
    q, k, v, x, _ = given
    scheme, pos = ReadsQueries(n_heads=H, d_model=W), torch.stack([torch.arange(L), torch.arange(L) * 2])

    def run(pos):
        return locant.attend(q, k, v, scheme, x=x, q_pos=pos, k_pos=pos, impl="eager")

    torch.testing.assert_close(torch.func.vmap(run)(pos), torch.stack([run(each) for each in pos]))
