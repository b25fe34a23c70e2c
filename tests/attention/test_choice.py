"""The choice of a back end: every rule of `locant.attention.choice`."""

import copy

import pytest
import torch
from torch.autograd import forward_ad

import locant
from locant.attention import choice, triton
from locant.attention.build import build
from locant.attention.choice import choose
from locant.attention.request import prepare
from tests import cases
from tests.attention.test_fused_sides import Distant, Numbers, Vectors

needs_kernel = pytest.mark.skipif(
    build().library is None, reason=f"no kernel here: {build().why}; returns with a C compiler"
)


def chosen(spec, lq=50, lk=50, rows=2, grad=False, impl="auto", dtype=torch.float32, **how):
    """The name of the back end for a call."""
    q, k, v = cases.tensors(b=rows, lq=lq, lk=lk, dtype=dtype)
    with torch.set_grad_enabled(grad):
        return choose(prepare(q, k, v, cases.build(spec).to(dtype), **how), impl).name


@pytest.mark.parametrize(("spec", "name"), [("tisa", "sdpa"), ("huang4:clip=3", "sdpa"), ("huang3:clip=3", "eager")])
def test_other_devices_have_torch_s_kernel_and_eager(spec, name):
    scheme = locant.scheme(spec, n_heads=4, head_dim=8).to("meta")
    q = torch.empty(2, 4, 50, 8, device="meta")
    assert choose(prepare(q, q, q, scheme, causal=True), "auto").name == name


@pytest.mark.parametrize(
    ("spec", "uses"),
    [("huang1", "gain"), ("huang2", "gain"), ("huang3", "gain"), ("shaw", "value"), ("shaw+huang1", "gain and value")],
)
def test_another_back_end_never_replaces_a_named_one(spec, uses):
    scheme = cases.build(spec)
    name = str(scheme).replace("+", r"\+")
    message = (
        rf"impl='sdpa' cannot do this: {name} uses {uses}, which do not fit into a mask; use impl='auto' or 'eager'"
    )
    with pytest.raises(ValueError, match=message):
        locant.attend(*cases.tensors(), scheme, impl="sdpa")
    assert locant.attend(*cases.tensors(), scheme).shape == (2, 4, 9, 8)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", [*cases.SPECS, "huang3:clip=3+rope", "cope:positions=4+xpos"])
def test_vmap_over_positions_masks_and_queries(spec, causal):
    """Under vmap no value can be read: offsets, spans and padding are found without."""
    scheme, (q, k, v) = cases.build(spec), cases.tensors(lq=5, lk=5)
    near = torch.stack([torch.randperm(20)[:5] for _ in range(3)])
    mask = torch.rand(3, 5, 5) < 0.7
    many = torch.randn(3, *q.shape, dtype=q.dtype)

    def by_position(pos):
        return locant.attend(q, k, v, scheme, q_pos=pos, k_pos=pos, causal=causal)

    def by_mask(mask):
        return locant.attend(q, k, v, scheme, mask=mask[None, None], causal=causal)

    def gradient(pos, x):
        def loss(x):
            return locant.attend(x, k, v, scheme, q_pos=pos, k_pos=pos, causal=causal).square().sum()

        return torch.func.grad(loss)(x)

    far = torch.randint(0, 3000, (3, 2, 5))
    for run, inputs in ((by_position, (near,)), (by_position, (far,)), (by_mask, (mask,)), (gradient, (near, many))):
        one_by_one = torch.stack([run(*(x[i] for x in inputs)) for i in range(3)])
        torch.testing.assert_close(torch.func.vmap(run)(*inputs), one_by_one)


@pytest.mark.parametrize("impl", ["fused", "sdpa", "flex"])
def test_named_back_ends_refuse_transforms(impl):
    scheme, (q, k, v) = cases.build("alibi").float(), cases.tensors(dtype=torch.float32)
    with pytest.raises(ValueError, match=rf"impl='{impl}' cannot do this: it has no rule for torch\.func"):
        torch.func.vmap(lambda x: locant.attend(x, k, v, scheme, impl=impl))(q[None])


@needs_kernel
def test_eager_computes_under_transforms():
    scheme = cases.build("huang4:clip=8", n_heads=2).float()
    q, k, v = cases.tensors(b=1, h=2, kv=2, lq=40, lk=40, dtype=torch.float32)
    _, tangent = torch.func.jvp(lambda x: locant.attend(x, k, v, scheme), (q,), (v,))
    _, truth = torch.func.jvp(lambda x: locant.attend(x, k, v, scheme, impl="eager"), (q,), (v,))
    torch.testing.assert_close(tangent, truth)
    with pytest.raises(ValueError, match=r"no rule for torch\.func"):
        torch.func.jvp(lambda x: locant.attend(x, k, v, scheme, impl="fused"), (q,), (v,))


def test_sdpa_computes_a_bias_for_one_sequence_without_gradients():
    assert chosen("tisa", rows=1) == "sdpa"
    if build().library is not None:
        assert "fused" == chosen("tisa") == chosen("tisa", rows=1, grad=True) == chosen("tisa", rows=1, causal=True)
        assert chosen("tisa", rows=1, mask=torch.ones(1, 50, dtype=torch.bool)) == "fused"
        assert chosen("tisa", rows=1, k_pos=torch.arange(50) * 2) == "fused"


@needs_kernel
def test_sdpa_computes_plain_calls():
    """No terms: also with a rotation, which changes q and k before the kernel."""
    for spec in ("nope", "rope"):
        assert "sdpa" == chosen(spec) == chosen(spec, grad=True) == chosen(spec, causal=True)
        assert chosen(spec, lq=40, causal=True) == "fused"
        assert chosen(spec, mask=torch.ones(2, 1, 1, 50, dtype=torch.bool)) == "fused"
        assert chosen(spec, k_pos=torch.arange(50) * 2, causal=True) == "fused"


@needs_kernel
def test_fused_computes_a_decoding_step():
    """Up to 4 queries without gradients, where its kernel reads keys in place."""
    for spec in ("tisa", "huang4:clip=3", "shaw:clip=3", "alibi:scaled=true", "logn"):
        assert "fused" == chosen(spec, lq=1, causal=True) == chosen(spec, lq=4, causal=True)
    own = {"q_pos": torch.tensor([90]), "k_pos": torch.arange(50) * 2}
    assert "fused" == chosen("tisa", lq=1, **own) == chosen("tisa", lq=1, mask=torch.ones(2, 50, dtype=torch.bool))
    assert chosen("tisa", lq=5, causal=True) == "sdpa"
    assert chosen("tisa", lq=1, dropout=0.1) == "sdpa"
    assert chosen("tisa", lq=1, dtype=torch.float64) == "sdpa"
    assert chosen("tisa", lq=1, additive_mask=torch.zeros(1, 50)) == "sdpa"


@needs_kernel
def test_sdpa_computes_decoding_with_a_bias_and_gradients():
    for spec in ("nope", "tisa"):
        assert "sdpa" == chosen(spec, lq=1, causal=True, grad=True) == chosen(spec, lq=32, causal=True, grad=True)
        assert chosen(spec, lq=32, causal=True) == "sdpa"
        assert chosen(spec, lq=33, causal=True, grad=True) == "fused"
    assert chosen("nope", lq=1, causal=True) == chosen("rope", lq=1, causal=True) == "sdpa"  # nothing to add
    assert chosen("tisa", lq=32, lk=32, grad=True) == "fused"
    assert chosen("huang4:clip=3", lq=1, causal=True, grad=True) == "fused"


@needs_kernel
@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        (Vectors(3), "sdpa"), (Vectors(None, 3), "fused"), (Numbers(("query_level", "key_level", "level")), "sdpa"),
        (Numbers(("temperature",)), "sdpa"), (Distant(3), "fused"),
    ],
)  # fmt: skip
def test_decoding_with_numbers_and_vectors_of_each_token(scheme, name):
    """A mask for a few queries costs `sdpa` little, except products with all keys."""
    for lq in (1, 5):
        q, k, v = cases.tensors(lq=lq, lk=50, dtype=torch.float32)
        with torch.no_grad():
            assert choose(prepare(q, k, v, scheme, causal=True), "auto").name == (name if lq > 4 else "fused")
        in_training = "sdpa" if isinstance(scheme, Numbers) and "temperature" in scheme.names else "fused"
        assert choose(prepare(q, k, v, scheme, causal=True), "auto").name == in_training


@needs_kernel
@pytest.mark.parametrize("spec", ["tisa", "huang4:clip=3", "huang3:clip=3", "shaw:clip=3"])
def test_the_order_on_cpus(spec):
    assert chosen(spec, grad=True) == "fused"
    reads_mask = "sdpa" if spec in ("tisa", "huang4:clip=3") else "eager"
    assert reads_mask == chosen(spec, grad=True, dtype=torch.float64) == chosen(spec, grad=True, dtype=torch.float16)
    assert chosen(spec, need_weights=True) == "eager"


def test_pairs_and_gaps():
    gaps = torch.arange(50) * 1000
    assert chosen("cope:positions=4", grad=True) == "sdpa"
    assert chosen("tisa", k_pos=gaps) == "sdpa"
    assert chosen("shaw", q_pos=gaps, k_pos=gaps) == (
        "fused" if build().library is not None else "eager"
    )  # has a reach
    for impl in ("fused", "flex"):
        with pytest.raises(ValueError, match=f"impl='{impl}' cannot do this: positions with large gaps"):
            chosen("tisa", k_pos=gaps, impl=impl)


@pytest.mark.parametrize("spec", ["xpos", "xpos+alibi"])
def test_auto_keeps_the_gradients_of_large_logits(spec):
    """Keys far in the future of a query have logits of 1e5 and more; torch's backward pass loses their differences."""
    scheme = cases.build(spec).float()
    pos = torch.cat([torch.arange(6), torch.arange(6) + 5000])
    inputs = cases.tensors(lq=12, lk=12, dtype=torch.float32)
    grads = {}
    for impl, dtype in (("auto", torch.float32), ("eager", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = locant.attend(*leaves, copy.deepcopy(scheme).to(dtype), q_pos=pos, k_pos=pos, impl=impl)
        grads[impl] = torch.autograd.grad(out.sin().sum(), leaves)
    for ours, truth in zip(grads["auto"], grads["eager"], strict=True):
        assert (ours.double() - truth).abs().max() < 1e-4 * truth.abs().max()


def test_auto_takes_sdpa_for_xpos_only_if_causal():
    assert chosen("xpos", causal=True) == "sdpa"
    assert chosen("xpos") != "sdpa"
    assert chosen("xpos", dtype=torch.float64) == "eager"
    assert chosen("xpos", lq=1, dtype=torch.float64) == "eager"


def test_every_back_end_has_its_own_name_and_functions():
    for name, backend in choice.BACKENDS.items():
        module = choice.fused_direct if name == "fused" else getattr(choice, name)
        assert (backend.name, backend.attend) == (name, module.attend)
        assert backend.unsupported is getattr(choice, f"{name}_unsupported")
    assert list(choice.BACKENDS) == ["fused", "triton", "sdpa", "flex", "eager"]
    assert choice.AUTO == {"cpu": ("fused", "sdpa", "eager"), "cuda": ("triton", "flex", "sdpa", "eager")}
    assert choice.AUTO_ELSEWHERE == ("sdpa", "eager")


@pytest.mark.skipif(not hasattr(torch.nn.attention, "flex_attention"), reason="this torch has no FlexAttention")
@pytest.mark.parametrize("who", ["q", "k", "v", "the table", "nobody"])
def test_flex_refuses_gradients_on_cpus(who):
    q, k, v = cases.tensors(dtype=torch.float32)
    scheme = cases.build("toeplitz:clip=3").float().requires_grad_(who == "the table")
    for name, x in zip("qkv", (q, k, v), strict=True):
        x.requires_grad_(name == who)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            reason = choice.flex_unsupported(prepare(q, k, v, scheme))
        assert (reason is not None) == (grad and who != "nobody")


@pytest.mark.parametrize("spec", ["nope", "tisa", "huang4:clip=3", "rope"])
def test_forward_mode_differentiation(spec):
    """Its first level has the number 0. A back end without a rule for it would lose the tangent without an error."""
    scheme = cases.build(spec).float()
    q, k, v = cases.tensors(lq=40, lk=40, dtype=torch.float32)
    with torch.no_grad(), forward_ad.dual_level():
        out = locant.attend(forward_ad.make_dual(q, v), k, v, scheme)
        tangent = forward_ad.unpack_dual(out).tangent
    _, expected = torch.func.jvp(lambda x: locant.attend(x, k, v, scheme, impl="eager"), (q,), (v,))
    torch.testing.assert_close(tangent, expected)


def test_why_flex_refuses_float64():
    with pytest.raises(ValueError, match="FlexAttention does not compute in float64; use impl="):
        chosen("tisa", dtype=torch.float64, impl="flex")
    message = "FlexAttention does not compute in float64, which xpos:base=1 needs at these positions; use impl="
    with pytest.raises(ValueError, match=message):
        chosen("xpos:base=1", impl="flex")


def test_orders_name_back_ends_and_back_ends_have_their_names():
    assert all(each.name == name for name, each in choice.BACKENDS.items())
    assert set(choice.AUTO) == {"cpu", "cuda"}
    for order in (*choice.AUTO.values(), choice.AUTO_ELSEWHERE):
        assert set(order) <= set(choice.BACKENDS)
        assert order[-1] == "eager"


def test_vmap_over_the_positions_of_queries_alone():
    q, k, v = cases.tensors(lq=3, lk=7)
    scheme, q_pos, k_pos = cases.build("tisa"), torch.tensor([[0, 1, 2], [9, 5, 700]]), torch.arange(7)

    def run(positions):
        return locant.attend(q, k, v, scheme, q_pos=positions, k_pos=k_pos, impl="eager")

    torch.testing.assert_close(torch.func.vmap(run)(q_pos), torch.stack([run(each) for each in q_pos]))


def test_why_back_ends_refuse_far_rotations(monkeypatch):
    monkeypatch.setattr(choice, "_missing_triton", lambda kind, index: None)
    for impl in ("triton", "sdpa", "flex"):
        with pytest.raises(ValueError, match=r"rope@selfextend:window=8,size=4 has far rotations"):
            chosen("rope@selfextend:window=8,size=4", impl=impl)


@pytest.mark.parametrize("name", ["triton", "fused"])
def test_our_kernels_compute_the_smallest_calls_and_refuse_empty_ones(name, monkeypatch):
    monkeypatch.setattr(choice, "_missing_triton", lambda kind, index: None)
    monkeypatch.setattr(choice, "_missing_kernel", lambda: None)
    for sizes in ({"lk": 1, "lq": 1}, {"kv": 1}, {"h": 1, "kv": 1}):
        q, k, v = cases.tensors(**sizes, dtype=torch.float32)
        assert choose(prepare(q, k, v, None), name).name == name
    for few in (slice(None), slice(1)):  # head sizes of 8, and of 1
        assert choose(prepare(q[..., few], k[..., few], v[..., :1], None), name).name == name
    with pytest.raises(ValueError, match="the head size of v is 0"):
        choose(prepare(q, k, v[..., :0], None), name)


def test_why_triton_refuses_wide_vectors(monkeypatch):
    """Tables of vectors in float32 have the lower limit; without them, or in bfloat16, the other one holds."""
    monkeypatch.setattr(choice, "_missing_triton", lambda kind, index: None)
    narrow, wide = triton.WIDEST_WITH_VECTORS, triton.WIDEST
    assert narrow < wide
    for spec, size, dtype, refused in (
        ("nope", wide, torch.float32, None), ("nope", wide + 1, torch.float32, f"up to {wide} numbers"),
        ("huang4", narrow, torch.float32, None), ("huang4", narrow + 1, torch.float32, f"up to {narrow} numbers"),
        ("huang4", narrow + 1, torch.bfloat16, None),
    ):  # fmt: skip
        q, k, v = (torch.zeros(1, 2, 3, size, dtype=dtype) for _ in range(3))
        found = choice.triton_unsupported(prepare(q, k, v, locant.scheme(spec, n_heads=2, head_dim=size)))
        assert found is None if refused is None else refused in found


def test_no_cuda_graph_is_captured_without_cuda():
    assert choice._capturing() == (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
