"""`softcap` and `sinks` of attend, in every back end: against the loops of the oracle, and against eager in float64."""

import copy
import importlib

import pytest
import torch

import locant
from locant.attention import flex
from locant.attention.build import build
from locant.attention.choice import choose
from locant.attention.request import prepare
from tests import cases
from tests.attention.rounding import EPS
from tests.attention.test_fused import build_scheme, compare, expect, results, tensors

needs_kernel = pytest.mark.skipif(build().library is None, reason="no kernel here; returns with a C compiler")
SINKS = torch.tensor([-2.0, 0.0, 1.0, 5.0])
BOTH = [(1.5, None), (None, SINKS), (1.5, SINKS)]
EVERY_TERM = ["nope", "rope", "tisa", "huang1:clip=3", "huang3:clip=3", "huang4:clip=3,heads=own", "shaw:clip=3", "xl"]
"""A bias, a scalar and a vector gain, query, key and value vectors, and vectors without a reach."""


def ids(x):
    return None if x is None else "sinks" if isinstance(x, torch.Tensor) else f"{x:g}" if isinstance(x, float) else None


# ------------------------------------------------------------------------------------------------- eager


@pytest.mark.parametrize(
    ("spec", "softcap", "sinks"),
    # after the scheme is done with the logit, all schemes are alike
    [(spec, *BOTH[number % len(BOTH)]) for number, spec in enumerate(cases.SPECS)],
    ids=ids,
)
def test_eager_equals_the_loops(spec, softcap, sinks):
    scheme = cases.build(spec)
    q, k, v = cases.tensors(kv=2, lq=5, lk=6)
    q_pos, k_pos = torch.tensor([[5, 0, 3, 9, 4], [2, 2, 3, 7, 1]]), torch.arange(6)
    mask = (torch.rand(2, 4, 5, 6) < 0.7) & (torch.arange(5) != 2)[:, None]  # query 2 may attend to no key
    how = {"mask": mask, "softcap": softcap, "sinks": sinks, "scale": 0.9}
    for causal in (False, True):
        found = locant.attend(
            q, k, v, scheme, q_pos=q_pos, k_pos=k_pos, causal=causal, impl="eager", need_weights=True, **how
        )
        expected = cases.by_oracle(scheme, q, k, v, q_pos, k_pos, causal=causal, **how)
        for got, truth in zip(found, expected, strict=True):
            torch.testing.assert_close(got, truth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("softcap", "sinks"), BOTH, ids=ids)
@pytest.mark.parametrize("spec", [*EVERY_TERM, "cope:positions=4"])
def test_gradients_of_eager(spec, softcap, sinks):
    scheme = cases.build(spec)
    mask = torch.ones(3, 3, dtype=torch.bool).tril() & (torch.arange(3) != 1)[:, None]
    leaves = [x.requires_grad_() for x in cases.tensors(b=1, kv=2, lq=3, lk=3)]
    if sinks is not None:
        leaves.append(sinks.double().requires_grad_())

    def attention(q, k, v, s=None):
        return locant.attend(q, k, v, scheme, mask=mask[None, None], softcap=softcap, sinks=s, impl="eager")

    assert torch.autograd.gradcheck(attention, leaves, fast_mode=True)


def test_the_rest_of_a_row_of_weights_is_that_of_the_sink():
    q, k, v = cases.tensors()
    logits = 0.5 * torch.tanh((q @ k.mT) * cases.HEAD_DIM**-0.5 / 0.5)
    _, weights = locant.attend(q, k, v, softcap=0.5, sinks=SINKS, need_weights=True)
    sink = SINKS[:, None].exp() / (SINKS[:, None].exp() + logits.exp().sum(-1))
    torch.testing.assert_close(1 - weights.sum(-1), sink)


def test_slices_of_eager(monkeypatch):
    scheme, given = cases.build("tisa"), [x.requires_grad_() for x in cases.tensors()]
    sinks = SINKS.double().requires_grad_()
    found = []
    for chunk in (2**24, 64):
        monkeypatch.setattr("locant.attention.eager.CHUNK", chunk)
        out = locant.attend(*given, scheme, softcap=1.5, sinks=sinks, impl="eager")
        found.append([out, *torch.autograd.grad(out.square().sum(), [*given, sinks, *scheme.parameters()])])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)
    out = locant.attend(*given, scheme, sinks=sinks, impl="eager")
    with torch.no_grad():
        sinks.add_(1)
    with pytest.raises(
        RuntimeError, match="the sinks, the additive mask or a parameter of the scheme was changed in place"
    ):
        out.sum().backward()


def test_transforms():
    q, k, v = cases.tensors()
    sinks = SINKS.double()

    def attention(q, sinks):
        return locant.attend(q, k, v, softcap=1.5, sinks=sinks)

    _, pull = torch.func.vjp(attention, q, sinks)
    assert torch.autograd.gradcheck(attention, (q.clone().requires_grad_(), sinks.clone().requires_grad_()))
    leaves = q.clone().requires_grad_(), sinks.clone().requires_grad_()
    truth = torch.autograd.grad(attention(*leaves), leaves, v)
    for x, y in zip(pull(v), truth, strict=True):
        torch.testing.assert_close(x, y)
    many = torch.stack([sinks, sinks + 1])
    by_vmap = torch.func.vmap(lambda s: attention(q, s))(many)
    torch.testing.assert_close(by_vmap, torch.stack([attention(q, s) for s in many]))


# ------------------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize(
    ("kind", "softcap", "sinks"),
    [("gemma2", 1.5, None), ("vaultgemma", 1.5, None), ("gpt_oss", None, SINKS), ("granite_swa", None, SINKS),
     ("granitemoe_swa", None, SINKS), ("mimo_v2_flash", None, SINKS), ("openai_privacy_filter", None, SINKS)],
)  # fmt: skip
def test_equal_to_transformers(kind, softcap, sinks):
    """The eager attention of the models that have them. Some compute the softmax in float32."""
    theirs = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}").eager_attention_forward
    q, k, v = cases.tensors(kv=2)
    mask = torch.rand(2, 1, 9, 9) < 0.7
    mask[..., 0] = True
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = 2, None if sinks is None else sinks.double()
    added = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    out, _ = theirs(module, q, k, v, added, scaling=0.7, softcap=softcap)
    ours = locant.attend(q, k, v, mask=mask, scale=0.7, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(ours.transpose(1, 2), out, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------- fused


def sink_results(impl, scheme, given, grad, sinks, **how):
    sinks = sinks.detach().clone().requires_grad_()
    out = locant.attend(*given, scheme, impl=impl, sinks=sinks, **how)
    return torch.autograd.grad(out, sinks, grad)[0]


def check(scheme, given, impl="fused", softcap=None, sinks=None, **how):
    """Output and all gradients of a back end against eager in float64, by the rule of `test_fused`.

    The gradient of a sink is −Σ_i p_i (g_i·o_i), with p its weight; the rounding of a product is that of ‖g_i ∘ o_i‖.
    """
    how = {"softcap": softcap, "sinks": sinks, **how}
    truth, allowed, grad = expect(scheme, given, **how)
    compare(results(impl, scheme, given, grad, **how), truth, allowed)
    if sinks is None:
        return
    wide = copy.deepcopy(scheme).double(), [x.double() for x in given], grad.double()
    exact, own = sink_results("eager", *wide, **how), sink_results("eager", scheme, given, grad, **how)
    out, weights = locant.attend(*given, scheme, need_weights=True, **how)
    products = (grad * out).float().square().sum(-1) * (1 - weights.float().sum(-1)).square()
    found = sink_results(impl, scheme, given, grad, **how)
    most = 4 * (own - exact).abs().max() + 20 * EPS * (exact.abs().max() + products.sum((0, 2)).sqrt().max())
    assert found.dtype == sinks.dtype
    assert (found - exact).abs().max() <= most


KINDS = ["plain", "causal", "padded", "packed", "scattered", "all masked", "dead rows"]


@needs_kernel
@pytest.mark.parametrize(
    ("spec", "kind", "softcap", "sinks"),
    [
        (spec, kind, *BOTH[(number + other) % len(BOTH)])  # the fuzzer draws all of them together
        for number, spec in enumerate(EVERY_TERM)
        for other, kind in enumerate(KINDS)
    ],
    ids=ids,
)
def test_fused_equals_eager(spec, kind, softcap, sinks):
    length = 150
    pos, how = torch.arange(length), {"causal": kind in ("causal", "packed", "scattered")}
    if kind == "padded":
        how["mask"] = torch.arange(length) < torch.tensor([[length], [90]])
    elif kind == "packed":
        pos = torch.cat([torch.arange(100), torch.arange(50)])
        how["mask"] = (torch.arange(length) < 100) == (torch.arange(length) < 100)[:, None]
    elif kind == "scattered":
        pos = torch.randint(0, 60, (2, length))
    elif kind == "all masked":
        how["mask"] = torch.zeros(2, length, dtype=torch.bool)
    elif kind == "dead rows":
        how["mask"] = ((torch.rand(length, length) < 0.5) & (torch.arange(length) % 3 > 0)[:, None])[None, None]
    if kind in ("packed", "scattered"):
        how |= {"q_pos": pos, "k_pos": pos}
    check(build_scheme(spec, 4, 8), tensors(2, 4, 2, length, length, 8), softcap=softcap, sinks=sinks, **how)


@needs_kernel
@pytest.mark.parametrize(("softcap", "sinks"), BOTH, ids=ids)
@pytest.mark.parametrize("spec", ["nope", "toeplitz:clip=3", "huang1:clip=3", "huang3:clip=3", "huang4:clip=3"])
def test_far_tiles(spec, softcap, sinks):
    check(build_scheme(spec, 4, 8), tensors(1, 4, 2, 257, 257, 8), softcap=softcap, sinks=sinks)


@needs_kernel
@pytest.mark.parametrize("cap", [1e-3, 0.1, 1.0, 10.0, 50.0, 1e6])
@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_caps_far_below_and_above_the_logits(cap, size):
    given = tensors(1, 2, 2, 40, 40, 8)
    given[0] *= size
    check(build_scheme("tisa", 2, 8), given, softcap=cap)


@needs_kernel
def test_gradients_where_the_cap_is_nearly_flat():
    gradients_under_a_flat_cap("fused")


def gradients_under_a_flat_cap(ours):
    """Compares a back end in float32 with `eager` in float64."""
    q, k, v = (x.float() for x in cases.tensors(b=1, lq=8, lk=8))
    q, k = q / 10 + 1, k / 10 + 0.6  # all logits are about 5 under a cap of 1: slopes of about 2e-4
    found = []
    for dtype, impl in ((torch.float64, "eager"), (torch.float32, ours)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = locant.attend(*leaves, locant.scheme("nope"), causal=True, softcap=1.0, scale=1.0, impl=impl)
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    for truth, got in zip(*found, strict=True):  # 1 − tanh² as a difference is off by 3e-4 there
        assert (got - truth).abs().max() < 1e-4 * truth.abs().max()


@needs_kernel
@pytest.mark.parametrize("value", [-100.0, -20.0, 20.0, 100.0, -torch.inf])
def test_sinks_far_below_and_above_the_logits(value):
    sinks = torch.tensor([value, 0.0])
    check(build_scheme("tisa", 2, 8), tensors(2, 2, 2, 140, 140, 8), sinks=sinks)
    check(build_scheme("tisa", 2, 8), tensors(2, 2, 2, 140, 140, 8), sinks=sinks, softcap=2.0, causal=True)


@needs_kernel
@pytest.mark.parametrize("lq", [1, 3, 40])
@pytest.mark.parametrize("spec", ["nope", "tisa", "huang4:clip=9"])
def test_a_step_with_a_cache_equals_the_last_rows(spec, lq):
    scheme, (q, k, v) = build_scheme(spec, 4, 8), tensors(2, 4, 2, 140, 140, 8)
    how = {"causal": True, "softcap": 1.5, "sinks": SINKS}
    check(scheme, [q[:, :, -lq:], k, v], **how)
    whole = locant.attend(q, k, v, scheme, **how)
    torch.testing.assert_close(locant.attend(q[:, :, -lq:], k, v, scheme, **how), whole[:, :, -lq:])


@needs_kernel
def test_any_layout():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(2, 4, 2, 70, 70, 8))
    strided = torch.stack([SINKS, torch.full((4,), torch.nan)], dim=1)[:, 0]
    for sinks in (strided, torch.ones(1).expand(4)):
        check(build_scheme("huang4:clip=3", 4, 8), [q, k, v], softcap=1.5, sinks=sinks)


@needs_kernel
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64, torch.float16])
def test_sinks_of_another_dtype_have_gradients_of_theirs(kind):
    given = tensors(2, 4, 2, 70, 70, 8, dtype=torch.bfloat16)
    found = {}
    for impl in ("eager", "fused"):
        sinks = SINKS.to(kind).requires_grad_()
        out = locant.attend(*given, softcap=1.5, sinks=sinks, impl=impl)
        (found[impl],) = torch.autograd.grad(out.float().square().sum(), sinks)
    assert found["fused"].dtype == kind
    torch.testing.assert_close(found["fused"].float(), found["eager"].float(), rtol=2e-2, atol=1e-2)


@needs_kernel
def test_bfloat16():
    check(build_scheme("huang4:clip=3", 4, 8), tensors(2, 4, 2, 150, 150, 8, dtype=torch.bfloat16), softcap=1.5)
    given = tensors(2, 4, 2, 150, 150, 8, dtype=torch.bfloat16)
    how = {"softcap": 1.5, "sinks": SINKS}
    truth, allowed, grad = expect(build_scheme("nope", 4, 8), given, **how)
    compare(results("fused", build_scheme("nope", 4, 8), given, grad, **how), truth, allowed)


@needs_kernel
def test_dropout_leaves_the_sink_alone():
    """With unit vectors as values the output is the weights, and zeros are those that were dropped."""
    q, k, v = (torch.randn(2, 4, 140, 8, requires_grad=True) for _ in range(3))
    sinks, grad, how = SINKS.clone().requires_grad_(), torch.randn(2, 4, 140, 8), {"softcap": 1.5}
    torch.manual_seed(5)
    dropped = locant.attend(q, k, torch.eye(140).expand(2, 4, -1, -1), sinks=sinks, dropout=0.5, impl="fused", **how)
    _, weights = locant.attend(q, k, v, sinks=sinks, need_weights=True, **how)
    keep = (dropped != 0).float() / 0.5
    torch.testing.assert_close(dropped, weights * keep)
    torch.manual_seed(5)
    out = locant.attend(q, k, v, sinks=sinks, dropout=0.5, impl="fused", **how)
    leaves = [q, k, v, sinks]
    expected = torch.autograd.grad((weights * keep) @ v, leaves, grad)
    for x, y in zip(torch.autograd.grad(out, leaves, grad), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_same_bits_every_time(threads):
    before = torch.get_num_threads()
    scheme, given, grad = build_scheme("tisa", 4, 8), tensors(3, 4, 2, 150, 150, 8), torch.randn(3, 4, 150, 8)
    try:
        torch.set_num_threads(threads)
        first, second = (sink_results("fused", scheme, given, grad, SINKS, softcap=1.5) for _ in range(2))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, sink_results("eager", scheme, given, grad, SINKS, softcap=1.5))


@needs_kernel
def test_a_sink_that_needs_no_gradient_gets_none():
    q, k, v = (x.requires_grad_() for x in tensors(1, 4, 4, 20, 20, 8))
    sinks = SINKS.clone()
    locant.attend(q, k, v, sinks=sinks, impl="fused").sum().backward()
    assert sinks.grad is None
    alone = SINKS.clone().requires_grad_()
    locant.attend(q.detach(), k.detach(), v.detach(), sinks=alone, impl="fused").sum().backward()
    assert alone.grad.abs().min() > 0


@needs_kernel
def test_compiled_training():
    torch.compiler.reset()
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    scheme, sinks = build_scheme("tisa", 4, 8), SINKS.clone().requires_grad_()

    def attention(q, k, v, impl="auto"):
        return locant.attend(q, k, v, scheme, causal=True, softcap=1.5, sinks=sinks, impl=impl)

    compiled = torch.compile(attention, backend=count, fullgraph=True, dynamic=True)
    for length in (40, 50, 60):
        leaves = [x.requires_grad_() for x in tensors(1, 4, 2, length, length, 8)]
        everything = [*leaves, sinks, *scheme.parameters()]
        ours = torch.autograd.grad(compiled(*leaves).square().sum(), everything)
        plain = torch.autograd.grad(attention(*leaves, impl="eager").square().sum(), everything)
        for x, y in zip(ours, plain, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1


# ------------------------------------------------------------------------------------------------- edges


@pytest.mark.parametrize("impl", ["eager", pytest.param("fused", marks=needs_kernel)])
@pytest.mark.parametrize("sinks", [SINKS, SINKS - torch.inf], ids=["sinks", "-inf"])
def test_a_query_that_may_attend_to_no_key_gets_zeros(impl, sinks):
    leaves = [*tensors(2, 4, 2, 9, 9, 8), sinks.clone()]
    q, k, v, sinks = (x.requires_grad_() for x in leaves)
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    mask[0] = False
    out = locant.attend(q, k, v, mask=mask, softcap=1.5, sinks=sinks, impl=impl)
    assert not out[0].any()
    assert out[1].any()
    grads = torch.autograd.grad(out.sum(), (q, k, v, sinks))
    assert all(x.isfinite().all() for x in grads)
    assert not grads[0][0].any()


@needs_kernel
def test_an_infinite_bias_is_capped_like_any_logit():
    """A mask hides a key; a bias of −∞ under a cap does not."""

    class Wall(locant.Scheme):
        def terms(self, r):
            return locant.Terms(bias=torch.where(r > 0, -torch.inf, 0.0)[None])

    q, k, v = tensors(1, 2, 2, 20, 20, 8)
    logits = 2.0 * torch.tanh(
        (q @ k.mT * 8**-0.5).masked_fill(~torch.ones(20, 20, dtype=torch.bool).tril(), -torch.inf) / 2
    )
    truth = logits.softmax(-1) @ v
    for impl in ("eager", "fused"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = locant.attend(*leaves, Wall(), softcap=2.0, impl=impl)
        torch.testing.assert_close(out, truth)
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))


@needs_kernel
def test_nan_reaches_the_output():
    q, k, v = tensors(1, 2, 2, 20, 20, 8)
    sinks = torch.tensor([torch.nan, 0.0])
    for impl in ("eager", "fused"):
        out = locant.attend(q, k, v, sinks=sinks, impl=impl)
        assert out[:, 0].isnan().all()
        assert out[:, 1].isfinite().all()
        broken = q.clone()
        broken[0, 0, 3] = torch.nan
        out = locant.attend(broken, k, v, softcap=1.5, sinks=sinks.nan_to_num(), impl=impl)
        assert out[0, 0, 3].isnan().all()
        assert out[0, 1].isfinite().all()


def test_without_queries():
    q, k, v = cases.tensors(lq=0)
    assert locant.attend(q, k, v, softcap=1.5, sinks=SINKS).shape == q.shape


# ------------------------------------------------------------------------------------------------- flex


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(flex, "_run_compiled", flex._run)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("spec", "length", "softcap", "sinks"),
    [("tisa", 127, *BOTH[0]), ("nope", 128, *BOTH[1]), ("huang1:clip=3+huang4:clip=3", 140, *BOTH[2])],
    ids=ids,
)
def test_flex_equals_eager(spec, length, softcap, sinks, uncompiled):
    """With 128 keys the sink is in a block of its own."""
    scheme, given = cases.build(spec), cases.tensors(kv=2, lq=length, lk=length)
    mask = torch.arange(length) < torch.tensor([[length], [5]])
    dead = (torch.arange(length) != 3)[:, None].expand(length, length)[None, None]
    for how in ({}, {"causal": True}, {"mask": mask[:, None, None]}, {"mask": dead, "causal": True}):
        how |= {"softcap": softcap, "sinks": sinks}
        with torch.no_grad():
            ours = locant.attend(*(x.float() for x in given), copy.deepcopy(scheme).float(), impl="flex", **how)
            truth = locant.attend(*given, scheme, impl="eager", **how).float()
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:The .grad attribute")
def test_gradients_of_flex(uncompiled, monkeypatch):
    """FlexAttention refuses gradients on CPUs, but what it computes without a compiler has them."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    scheme, sinks = cases.build("tisa").float(), SINKS.clone().requires_grad_()
    leaves = [x.requires_grad_() for x in cases.tensors(lq=140, lk=140, dtype=torch.float32)]
    how = {"causal": True, "softcap": 1.5, "sinks": sinks}
    found = [flex.attend(prepare(*leaves, scheme, **how))[0], locant.attend(*leaves, scheme, impl="eager", **how)]
    everything = [*leaves, sinks, *scheme.parameters()]
    ours, truth = (torch.autograd.grad(out.square().sum(), everything) for out in found)
    for x, y in zip(ours, truth, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)


def test_one_kernel_of_flex_for_all_lengths_of_a_bucket(monkeypatch):
    torch.compiler.reset()
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(flex, "_run_compiled", torch.compile(flex._run, backend=count, dynamic=False))
    for length in (130, 200, 255):
        given = cases.tensors(lq=length, lk=length, dtype=torch.float32)
        with torch.no_grad():
            locant.attend(*given, softcap=1.5, sinks=SINKS, impl="flex")
    assert len(graphs) == 1


def test_compiled_flex(monkeypatch):
    torch.compiler.reset()
    given = cases.tensors(lq=140, lk=140, dtype=torch.float32)
    how = {"causal": True, "softcap": 1.5, "sinks": SINKS}
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        monkeypatch.setattr(flex, "_run_compiled", torch.compile(flex._run, dynamic=False))
        try:
            with torch.no_grad():
                ours = locant.attend(*given, impl="flex", **how)
        except torch._inductor.exc.InvalidCxxCompiler:
            pytest.skip("Inductor found no C++ compiler; returns where there is one")
    torch.testing.assert_close(ours, locant.attend(*given, impl="eager", **how), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("how", "reason"),
    [({"softcap": 30.0}, "torch's kernel has no softcap"), ({"sinks": SINKS}, "torch's kernel has no sinks")],
)
def test_sdpa_refuses(how, reason):
    with pytest.raises(ValueError, match=rf"impl='sdpa' cannot do this: {reason}.*; use impl='auto' or .*'eager'"):
        locant.attend(*cases.tensors(), impl="sdpa", **how)


@needs_kernel
@pytest.mark.parametrize("how", [{"softcap": 30.0}, {"sinks": SINKS}])
@pytest.mark.parametrize("lq", [1, 50])
def test_auto(lq, how):
    """Without a cap and sinks, `auto` takes sdpa for these calls."""
    for kind, name in ((torch.float32, "fused"), (torch.bfloat16, "fused"), (torch.float64, "eager")):
        given = cases.tensors(lq=lq, lk=50, dtype=kind)
        assert choose(prepare(*given, None), "auto").name == "sdpa"
        assert choose(prepare(*given, None, **how), "auto").name == name


def test_flex_refuses_sinks_that_need_a_gradient_on_cpus():
    with pytest.raises(ValueError, match="no backward pass on CPUs"):
        locant.attend(*cases.tensors(dtype=torch.float32), sinks=SINKS.clone().requires_grad_(), impl="flex")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"softcap": 0.0}, ValueError, r"softcap must be from 1e-30 to 1e\+30, got 0.0; pass None for no cap"),
        ({"softcap": -5}, ValueError, r"softcap must be from .*, got -5"),
        ({"softcap": float("nan")}, ValueError, r"softcap must be from .*, got nan"),
        ({"softcap": float("inf")}, ValueError, r"softcap must be from .*, got inf"),
        ({"softcap": 1e31}, ValueError, r"softcap must be from .*, got 1e\+31"),
        ({"softcap": 1e-31}, ValueError, r"softcap must be from .*, got 1e-31"),
        ({"softcap": True}, TypeError, r"softcap must be a number or None, got True"),
        ({"softcap": torch.ones(())}, TypeError, r"softcap must be a number or None, got tensor"),
        ({"sinks": [0.0] * 4}, TypeError, r"sinks must be a tensor of floating-point numbers, .*; got list"),
        ({"sinks": torch.zeros(4, dtype=torch.long)}, TypeError, r"sinks must be a tensor .*; got torch.int64"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks must be \[4\], one number per query head; got \[3\]"),
        ({"sinks": torch.zeros(1, 4)}, ValueError, r"sinks must be \[4\], .*; got \[1, 4\]"),
        ({"sinks": torch.zeros(4, device="meta")}, ValueError, r"sinks must be on the device of q, cpu; got meta"),
    ],
)  # fmt: skip
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        locant.attend(*cases.tensors(kv=2), **arguments)


@pytest.mark.parametrize("softcap", [50, 1e-30, 1e30])
def test_the_smallest_and_the_largest_cap(softcap):
    q, k, v = cases.tensors(dtype=torch.float32)
    truth = locant.attend(*(x.double() for x in (q, k, v)), softcap=softcap, impl="eager").float()
    for impl in ("eager", "fused") if build().library is not None else ("eager",):
        torch.testing.assert_close(locant.attend(q, k, v, softcap=softcap, impl=impl), truth)
