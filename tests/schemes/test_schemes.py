"""Facts about single schemes that the oracles and laws do not state."""

import copy
import math

import pytest
import torch

import locant
from locant import schemes
from locant.schemes import SCHEMES, Rope, Scheme, Sum
from locant.schemes.base import exporting
from tests import cases


def test_names_in_specs_are_those_of_the_classes():
    assert all(cls.name() == name for name, cls in SCHEMES.items())


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        ("tisa:kernels=1", 36),
        ("tisa:kernels=3", 108),
        ("tisa:kernels=5", 180),
        ("learned:length=512", 393_216),
        ("huang1:clip=511", 512 * 12),
        ("huang2:clip=511", 1023 * 12),
        ("huang3:clip=511", 65_472),
        ("huang4:clip=511", 65_472),
        ("huang4:clip=511,heads=own", 65_472 * 12),
        ("shaw:clip=16", 2 * 33 * 64),
        ("t5", 384),
        ("kerple", 24),
        ("alibi", 0),
        ("rope", 0),
        ("tisa+learned", 180 + 393_216),
    ],
)
def test_parameter_counts_of_the_papers(spec, count):
    """BERT-base; the numbers are those of the papers (TISA 36/108/180, method 4 in Hugging Face 65,472)."""
    scheme = locant.scheme(spec, n_heads=12, head_dim=64, d_model=768)
    assert sum(p.numel() for p in scheme.parameters()) == scheme.parameter_count() == count


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("shaw:clip=5", (1, 11, 8)),
        ("shaw:clip=5,heads=own", (4, 11, 8)),
        ("huang1:clip=5", (4, 6)),
        ("huang1:clip=5,heads=shared", (1, 6)),
        ("huang2:clip=5", (4, 11)),
        ("huang3:clip=5", (1, 11, 8)),
        ("huang4:clip=5,heads=own", (4, 11, 8)),
    ],
)
def test_tables_are_ordered_by_offset_and_clipped(spec, shape):
    scheme = locant.scheme(spec, n_heads=4, head_dim=8, d_model=32)
    assert scheme.table.shape == shape
    with torch.no_grad():  # each row holds its own number
        numbers = torch.arange(shape[1], dtype=torch.float32).view(1, -1, *[1] * (len(shape) - 2))
        scheme.table.copy_(numbers.expand(shape))
    terms = scheme.terms(torch.tensor([-100, -6, -5, -1, 0, 1, 5, 6, 100]))
    rows = next(iter(terms.tables().values()))
    first = rows[0] if rows.ndim == 2 else rows[0, :, 0]
    expected = [5, 5, 5, 1, 0, 1, 5, 5, 5] if spec.startswith("huang1") else [0, 0, 0, 4, 5, 6, 10, 10, 10]
    assert first.tolist() == expected


@pytest.mark.parametrize("spec", ["huang1", "huang2", "huang3", "cope"])
def test_initial_values_have_no_effect(spec):
    q, k, v = cases.tensors()
    scheme = locant.scheme(spec, n_heads=4, head_dim=8, d_model=32).double()
    torch.testing.assert_close(locant.attend(q, k, v, scheme), locant.attend(q, k, v))


@pytest.mark.parametrize("spec", ["huang4", "shaw", "xl", "t5", "deberta:buckets=8,max_distance=20"])
def test_initial_values_have_a_small_effect(spec):
    q, k, v = cases.tensors()
    scheme = locant.scheme(spec, n_heads=4, head_dim=8, d_model=32).double()
    plain = locant.attend(q, k, v, scale=scheme.scale(8))
    change = (locant.attend(q, k, v, scheme) - plain).abs().max()
    assert 0 < change < 0.15


def test_sum_adds_and_multiplies():
    r = torch.arange(-4, 5)
    a, b, c = cases.build("tisa"), cases.build("alibi"), cases.build("huang1:clip=3")
    d, e = cases.build("huang3:clip=3"), cases.build("huang4:clip=3")
    terms = Sum(a, b, c, d, e).terms(r)
    torch.testing.assert_close(terms.bias, a.terms(r).bias + b.terms(r).bias)
    torch.testing.assert_close(terms.gain, c.terms(r).gain[..., None] * d.terms(r).gain)
    torch.testing.assert_close(terms.query, e.terms(r).query)
    embedded = Sum(cases.build("learned:length=9"), a, cases.build("sinusoidal"))
    pos = torch.arange(9)
    expected = embedded.parts[0].embed(pos) + embedded.parts[2].embed(pos)
    torch.testing.assert_close(embedded.embed(pos), expected)
    assert embedded.max_length == 9


def test_rotations_of_a_sum_chain():
    q, k, _ = cases.tensors()
    pos = torch.arange(9)[None]
    first, second = cases.build("rope"), cases.build("rope:theta=50,layout=interleaved")
    chained = second.rotate(*first.rotate(q, k, pos, pos), pos, pos)
    for ours, expected in zip(Sum(first, second).rotate(q, k, pos, pos), chained, strict=True):
        torch.testing.assert_close(ours, expected)


def test_a_sum_of_a_vector_gain_and_a_rotation_is_not_shift_invariant():
    assert cases.build("huang1:clip=3+rope").shift_invariant
    assert not cases.build("huang3:clip=3+rope").shift_invariant
    assert not cases.build("tisa+learned").shift_invariant


def test_rotations_of_the_same_planes_commute():
    """Planes of "half" are t and t + d/2, so they depend on the rotated size d; those of "interleaved" do not."""
    assert cases.build("rope:layout=interleaved+rope:layout=interleaved,partial=0.5").shift_invariant
    assert cases.build("rope+rope:theta=50").shift_invariant
    assert not cases.build("rope+rope:partial=0.5").shift_invariant
    assert not cases.build("rope+rope:layout=interleaved").shift_invariant


def test_a_scheme_is_spelled_as_it_was_given():
    for spec in ("shaw:clip=3,values=false", "xpos:gamma=0.3,base=600", "tisa", "t5:bidirectional=true"):
        assert str(locant.scheme(spec, n_heads=2, head_dim=4)) == spec
    assert str(locant.scheme("rope:theta=500000.0", head_dim=4)) == "rope:theta=500000"
    assert repr(locant.scheme("tisa:kernels=2", n_heads=2)) == "Tisa(kernels=2, n_heads=2)"


def test_a_sum_takes_the_scale_of_the_part_that_has_one():
    assert cases.build("deberta:buckets=8,max_distance=20+tisa").scale(8) == pytest.approx((3 * 8) ** -0.5)

    class Odd(Scheme):
        def scale(self, head_dim):
            return 1.0

    both = Sum(cases.build("deberta:buckets=8,max_distance=20"), Odd())
    with pytest.raises(ValueError, match="different logit scales"):
        both.scale(8)


def test_a_scale_passed_to_attend_overrides_that_of_the_scheme():
    q, k, v = cases.tensors()
    scheme = cases.build("deberta:buckets=8,max_distance=20")
    torch.testing.assert_close(locant.attend(q, k, v, scheme), locant.attend(q, k, v, scheme, scale=(3 * 8) ** -0.5))
    assert not torch.allclose(locant.attend(q, k, v, scheme), locant.attend(q, k, v, scheme, scale=8**-0.5))


def test_xl_score_follows_the_scale():
    """(q + v)·a is inside the scale; a bias computed with 1/√D would be wrong for any other."""
    q, k, v = cases.tensors()
    pos = torch.arange(9)
    scheme = cases.build("xl")
    expected, _ = cases.by_oracle(scheme, q, k, v, pos, pos, scale=1.0)
    torch.testing.assert_close(locant.attend(q, k, v, scheme, scale=1.0), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_xpos_survives_long_spans(dtype):
    """Factors of ζ^(p/512) overflow float16 near 9,000 positions and float32 near 72,000."""
    scheme = locant.scheme("xpos", head_dim=8)
    q, k, v = cases.tensors(dtype=dtype)
    for start in (0, 10_000, 100_000):
        pos = torch.cat([torch.zeros(1, dtype=torch.long), torch.arange(8) + start])
        for impl in ("eager", "sdpa"):
            out = locant.attend(q, k, v, scheme, q_pos=pos, k_pos=pos, causal=True, impl=impl)
            assert out.isfinite().all()
            assert out.dtype == dtype
    with pytest.raises(ValueError, match="overflows float64"):
        locant.attend(q, k, v, scheme, q_pos=pos, k_pos=pos * 100)


def test_xpos_is_as_exact_far_from_zero():
    """Each sequence has its own middle, from which the factors grow: far positions, and far rows, cost nothing."""
    scheme = locant.scheme("xpos", head_dim=8)
    q, k, v = cases.tensors(dtype=torch.float32)
    pos = torch.arange(9).expand(2, 9)
    near = locant.attend(q, k, v, scheme, q_pos=pos, k_pos=pos)
    for start in (torch.tensor([[10**6], [10**6]]), torch.tensor([[0], [10**6]]), torch.tensor([[10**6], [0]])):
        request = locant.attention.request.prepare(q, k, v, scheme, q_pos=pos + start, k_pos=pos + start)
        assert request.content_dtype == torch.float32
        torch.testing.assert_close(
            locant.attend(q, k, v, scheme, q_pos=pos + start, k_pos=pos + start), near, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("spec", ["xpos:base=4", "xpos:base=4+huang1:clip=3", "xpos:base=4+huang4:clip=3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_xpos_keeps_float64_over_wide_spans(spec, dtype):
    """Output and gradients over 600 positions, where the factors of q and k overflow float32."""
    scheme = cases.build(spec, n_heads=2).to(torch.float32)
    inputs = [x.to(dtype) for x in cases.tensors(b=1, h=2, kv=2, lq=90, lk=90)]
    pos = torch.arange(90) * 7
    grad = torch.randn(1, 2, 90, 8)

    def run(dtype, scheme, impl):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = locant.attend(*leaves, scheme, q_pos=pos, k_pos=pos, causal=True, impl=impl)
        return [out, *torch.autograd.grad((out * grad).sum(), [*leaves, *scheme.parameters()])]

    truth = run(torch.float64, copy.deepcopy(scheme).double(), "eager")
    for got, expected in zip(run(dtype, scheme, "auto"), truth, strict=True):
        error = (got.double() - expected).abs().max() / expected.abs().max()
        assert error < 4 * torch.finfo(dtype).eps * (1 if dtype == torch.bfloat16 else 100)
    with pytest.raises(ValueError, match=r"impl='fused' cannot do this: .*xpos.* needs float64 at these positions"):
        run(dtype, scheme, "fused")


@pytest.mark.parametrize("impl", ["auto", "eager", "sdpa"])
@pytest.mark.parametrize("heads", ["shared", "own"])
def test_cope_takes_parameters_of_another_dtype(impl, heads):
    for dtype, other in [
        (torch.float32, torch.float64),
        (torch.float64, torch.bfloat16),
        (torch.float16, torch.float32),
    ]:
        scheme = cases.build(f"cope:positions=4,heads={heads}").to(other)
        q, k, v = cases.tensors(dtype=dtype)
        with torch.no_grad():
            out = locant.attend(q, k, v, scheme, impl=impl)
            truth = locant.attend(q.double(), k.double(), v.double(), copy.deepcopy(scheme).double(), impl="eager")
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), truth, rtol=0, atol=20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", ["log", "power"])
def test_kerple_parameters_pushed_out_of_their_domain_come_back(kind):
    scheme = locant.scheme(f"kerple:kind={kind}", n_heads=2)
    with torch.no_grad():
        scheme.a.copy_(torch.tensor([-0.5, 0.005]))
        scheme.p.copy_(torch.tensor([2.5, 0.005]))
    scheme.terms(torch.arange(1, 9)).bias.sum().backward()
    assert (scheme.a.grad != 0).all()
    assert (scheme.p.grad != 0).all()
    assert (scheme.terms(torch.arange(1, 9)).bias <= 0).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: locant.schemes.T5(bidirectional="false", n_heads=2),
        lambda: locant.schemes.Shaw(values=0, n_heads=2, head_dim=4),
    ],
)
def test_flags_must_be_flags(make):
    with pytest.raises(ValueError, match="must be True or False"):
        make()


def test_buckets_do_not_depend_on_the_default_dtype():
    scheme = locant.scheme("deberta", n_heads=1, head_dim=2)
    r = torch.arange(-600, 601)
    usual = scheme.bucket(r)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(scheme.bucket(r), usual)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_buckets_of_deberta_end_within_its_reach():
    """Attention asks for no offsets beyond the reach, so every one there must have the same row."""
    with pytest.raises(ValueError, match="buckets must be even"):
        locant.scheme("deberta:buckets=5,max_distance=9", n_heads=1, head_dim=2)
    for buckets, longest in ((4, 4), (6, 5), (8, 20), (256, 512), (4, 10**6), (256, 10**7)):
        scheme = locant.scheme(f"deberta:buckets={buckets},max_distance={longest}", n_heads=1, head_dim=2)
        beyond = scheme.reach + torch.tensor([0, 1, 2, 10, 1000, 10**9])
        assert scheme.bucket(beyond).unique().tolist() == [0]
        assert scheme.bucket(-beyond).unique().tolist() == [2 * buckets - 1]


def test_deepcopy_and_pickle_keep_the_spec():
    import copy
    import pickle

    for spec in ("huang4:clip=3,heads=own", "tisa:kernels=2+learned:length=7"):
        scheme = cases.build(spec)
        assert str(copy.deepcopy(scheme)) == str(pickle.loads(pickle.dumps(scheme))) == spec


ROTATING = ("rope", "rope:layout=interleaved", "rope:partial=0.5", "rope:layout=interleaved,partial=0.5", "xpos",
            "xpos:layout=half", "rope:partial=0.5,first=2", "rope:partial=0.5,first=2,layout=interleaved",
            "rope:partial=0.5,first=3,layout=interleaved")  # fmt: skip


@pytest.mark.parametrize("other", [*ROTATING, "tisa", "huang1:clip=3", "huang3:clip=3", "cope:positions=4"])
@pytest.mark.parametrize("spec", ROTATING)
def test_a_sum_with_a_rotation_declares_what_it_does(spec, other):
    """Rotations of the same pairs of coordinates commute, so their sum depends on offsets alone; others do not."""
    scheme, tensors, pos = cases.build(f"{spec}+{other}"), cases.tensors(), torch.arange(9)
    here, there = (locant.attend(*tensors, scheme, q_pos=p, k_pos=p, causal=True) for p in (pos, pos + 11))
    assert scheme.shift_invariant is torch.allclose(here, there)
    commuting = scheme.shift_invariant or other == "huang3:clip=3"
    assert scheme.pairwise is (commuting and other != "cope:positions=4")
    assert scheme.incremental is commuting


@pytest.mark.parametrize("spec", cases.SPECS)
def test_a_saved_scheme_is_its_parameters_and_tables(spec):
    scheme = cases.build(spec)
    tables = {"speeds"} if "scaling=table" in spec or "scaling=longrope" in spec else set()
    assert set(scheme.state_dict()) == {name for name, _ in scheme.named_parameters()} | tables


def test_a_table_of_speeds_starts_as_rope_and_survives_half_precision_and_saving():
    q, k, _ = cases.tensors(lq=5, lk=5)
    pos = torch.tensor([[0, 1, 2, 3, 400]])
    table, plain = locant.scheme("rope:scaling=table", head_dim=8), locant.scheme("rope", head_dim=8)
    assert isinstance(table, Rope)
    for ours, expected in zip(table.rotate(q, k, pos, pos), plain.rotate(q, k, pos, pos), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    speeds = torch.tensor([[1.0, -0.25, 3e-7, 0.0]], dtype=torch.float64)
    table.set_speeds(speeds)
    again = locant.scheme(str(table), head_dim=8).half()
    again.load_state_dict(table.half().state_dict())
    assert isinstance(again, Rope)
    torch.testing.assert_close(again.frequencies(torch.ones(1))[None], speeds, rtol=1e-11, atol=0)
    assert not list(table.parameters())


@pytest.mark.parametrize("bad", [[1.0, 2.0], [[1.0, 2.0, 3.0, 8.0]], [[1.0, 2.0, 3.0, math.nan]]])
def test_speeds_that_do_not_fit_the_table(bad):
    with pytest.raises(ValueError, match="speeds must be finite numbers between -8 and 8 of shape"):
        locant.scheme("rope:scaling=table", head_dim=8).set_speeds(torch.tensor(bad))
    with pytest.raises(ValueError, match="has no table of speeds; build it with scaling=table"):
        locant.scheme("rope", head_dim=8).set_speeds(torch.ones(1, 4))


def test_names_before_and_after_the_classes_are_imported(monkeypatch):
    monkeypatch.delitem(vars(schemes), "SCHEMES", raising=False)
    assert schemes.names() == list(schemes.CLASSES)
    monkeypatch.setitem(vars(schemes), "SCHEMES", {"mine": None})
    assert schemes.names() == ["mine"]
    monkeypatch.setitem(vars(schemes), "MAPS", {"mine": None})
    assert schemes.map_names() == ["mine"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_longest_span_of_xpos_in_each_dtype(dtype):
    """One position further, powers are computed in float64, or, in float64, refused: they could be infinite."""
    scheme = locant.scheme("xpos:base=64,gamma=0.3", head_dim=8)
    longest = int(math.log(torch.finfo(dtype).max) / 2 * 64 / math.log(1.3 / 0.3))
    q, k, _ = cases.tensors(lq=2, lk=2, dtype=dtype)

    def rotate(span):
        return scheme.rotate(q, k, torch.tensor([[0, span]]), torch.tensor([[span, 0]]))

    within = rotate(longest)
    assert {x.dtype for x in within} == {dtype}
    assert all(x.isfinite().all() for x in within)
    if dtype == torch.float64:
        with pytest.raises(ValueError, match="overflows float64"):
            rotate(longest + 1)
    else:
        assert {x.dtype for x in rotate(longest + 1)} == {torch.float64}


def test_a_rotation_that_declares_no_planes_commutes_only_with_none():
    class Turn(Scheme):
        def rotate(self, q, k, q_pos, k_pos):
            return q.flip(-1), k.flip(-1)

    alone, beside, twice = Sum(Turn()), Sum(Turn(), cases.build("tisa")), Sum(Turn(), Turn())
    for scheme, commutes in ((alone, True), (beside, True), (twice, False)):
        assert scheme.shift_invariant is scheme.pairwise is scheme.incremental is commutes


def test_what_a_scheme_declares_by_default():
    class Own(Scheme):
        pass

    for scheme in (Scheme(), Own()):
        assert scheme.shift_invariant is scheme.pairwise is scheme.incremental is scheme.parallel is True
        assert scheme.max_length is scheme.planes is scheme.reach is None
        assert scheme.grows is scheme.cacheable is False


def test_dir_lists_classes_that_are_imported_when_they_are_used():
    assert {"Tisa", "Rope", "SCHEMES"} <= set(dir(schemes))
    assert dir(schemes) == sorted(dir(schemes))


def test_what_a_scheme_does_without_terms():
    """`silent` is what nothing depends on: analyses and pages leave such a scheme out."""
    assert {spec for spec in ("nope", "rope", "learned", "tisa", "nope+nope") if cases.build(spec).silent} == {
        "nope",
        "nope+nope",
    }
    assert cases.build("learned+rope").embeds is True
    assert cases.build("alibi+rope").embeds is False
    assert cases.build("alibi+rope").has_terms is True
    assert cases.build("learned+rope").has_terms is False


@pytest.mark.parametrize("spec", ["learned", "sinusoidal", "first"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex64])
def test_positions_of_an_embedding_are_integers(spec, dtype):
    with pytest.raises(TypeError, match="positions must be integers"):
        cases.build(spec).embed(torch.ones(1, 3, dtype=dtype))


def test_second_derivatives_of_kerple_at_distance_0():
    """torch's second derivative of 0^p in p is NaN."""
    scheme = cases.build("kerple:kind=power")
    total = scheme.terms(torch.arange(-2, 3)).bias.sum()
    (first,) = torch.autograd.grad(total, scheme.p, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), scheme.p)
    assert first.isfinite().all()
    assert second.isfinite().all()


@pytest.mark.parametrize("spec", ["learned", "sinusoidal", "first"])
def test_an_embedding_of_no_positions(spec):
    assert cases.build(spec).embed(torch.zeros(1, 0, dtype=torch.long)).shape[:2] == (1, 0)


def test_a_torch_that_cannot_say_whether_it_exports_does_not(monkeypatch):
    """Older releases have no `torch.compiler.is_exporting`, and compiled code runs there too."""
    monkeypatch.delattr(torch.compiler, "is_exporting", raising=False)
    assert not exporting()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert exporting() is False


def test_rotated_coordinates_fit_into_a_head():
    assert locant.scheme("rope:partial=0.5,first=4", head_dim=8).rotary_dim == 4
    with pytest.raises(ValueError, match="4 rotated coordinates from coordinate 6 on do not fit into head_dim = 8"):
        locant.scheme("rope:partial=0.5,first=6", head_dim=8)


def test_cope_counts_alike_in_exported_programs(monkeypatch):
    """Without searchsorted, which ONNX lacks; keys in any order, two at one position."""
    scheme = locant.scheme("cope:positions=5", n_heads=2, head_dim=8)
    torch.nn.init.normal_(scheme.table)
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
    pos = torch.tensor([[0, 1, 2, 3, 4, 5], [4, 0, 9, 2, 2, 7]])
    expected = locant.attend(q, k, v, scheme, q_pos=pos, k_pos=pos, causal=True)
    monkeypatch.setattr("locant.schemes.cope.exporting", lambda: True)
    torch.testing.assert_close(locant.attend(q, k, v, scheme, q_pos=pos, k_pos=pos, causal=True), expected)
