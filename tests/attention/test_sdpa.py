"""The sdpa back end: where a bias is a view, no [L, L] tensor is made; results and gradients equal those of eager."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import locant
from locant.attention import sdpa
from locant.attention.request import prepare
from tests import cases

BIASES = ["tisa", "t5", "alibi", "kerple", "sandwich:width=16", "tisa2:kernels=4", "tisa+alibi"]


class Largest(TorchDispatchMode):
    """Records the size of the largest storage that was allocated."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // max(x.element_size(), 1))
        return out


@pytest.fixture
def called(monkeypatch):
    """The names of the functions that computed, in order."""
    names = []
    for name in ("_attend_band", "_attend_dense"):
        original = getattr(sdpa, name)
        monkeypatch.setattr(sdpa, name, lambda *a, f=original, n=name: names.append(n) or f(*a))
    return names


def frozen(spec, **sizes):
    return cases.build(spec, **sizes).requires_grad_(False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", BIASES)
def test_equal_to_eager_by_a_view(spec, causal, called):
    scheme = frozen(spec)
    for kv, lq, lk in ((4, 9, 9), (2, 3, 9), (4, 2, 9), (4, 1, 9)):
        q, k, v = cases.tensors(kv=kv, lq=lq, lk=lk)
        for where in ({}, {"q_pos": torch.arange(lk - lq, lk) + 50, "k_pos": torch.arange(lk) + 50}):
            out = locant.attend(q, k, v, scheme, causal=causal, impl="sdpa", **where)
            torch.testing.assert_close(out, locant.attend(q, k, v, scheme, causal=causal, impl="eager", **where))
    assert set(called) == {"_attend_band"}


@pytest.mark.parametrize("apart", [-40, -16, -15, -12, -5, 0, 5, 12, 15, 16, 40])
def test_keys_at_any_distance_from_the_queries(apart, called):
    """The view over a range of which some, all or no offsets are beyond the reach of 12, at either end."""
    scheme = frozen("t5:buckets=8,max_distance=12")
    for lq, lk in ((5, 9), (9, 5), (1, 9)):
        q, k, v = cases.tensors(lq=lq, lk=lk)
        where = {"q_pos": torch.arange(lq), "k_pos": torch.arange(lk) + apart}
        out = locant.attend(q, k, v, scheme, impl="sdpa", **where)
        torch.testing.assert_close(out, locant.attend(q, k, v, scheme, impl="eager", **where))
    assert set(called) == {"_attend_band"}


@pytest.mark.parametrize("side", ["left", "right", "both", "all"])
def test_padding_removes_keys(side, called):
    scheme = frozen("tisa+alibi")
    q, k, v = cases.tensors(b=3)
    mask = torch.ones(3, 9, dtype=torch.bool)
    if side in ("left", "both"):
        mask[0, :3] = False
    if side in ("right", "both"):
        mask[1, 7:] = False
    if side == "all":
        mask[2] = False
    for shaped in (mask, mask[:, None, None, :].expand(3, 1, 9, 9)):
        out = locant.attend(q, k, v, scheme, mask=shaped, impl="sdpa")
        torch.testing.assert_close(out, locant.attend(q, k, v, scheme, mask=shaped, impl="eager"))
    assert set(called) == {"_attend_dense" if side == "all" else "_attend_band"}
    called.clear()
    out = locant.attend(q, k, v, scheme, mask=mask, causal=True, impl="sdpa")
    torch.testing.assert_close(out, locant.attend(q, k, v, scheme, mask=mask, causal=True, impl="eager"))
    assert called == ["_attend_band" if side == "right" else "_attend_dense"]


def test_a_batch_of_padding_has_gradients_of_zero():
    q, k, v = (x.requires_grad_() for x in cases.tensors())
    scheme = cases.build("tisa")
    out = locant.attend(q, k, v, scheme, mask=torch.zeros(2, 9, dtype=torch.bool))
    for grad in torch.autograd.grad(out.sum(), [q, k, v, *scheme.parameters()]):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_a_bias_that_is_not_a_view_is_a_dense_mask(called):
    q, k, v = cases.tensors()
    scheme = frozen("tisa")
    holes = torch.rand(2, 9) < 0.5
    holes[:, 0] = holes[:, -1] = True
    holes[:, 4] = False
    packed = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4])
    for where in (
        {"mask": holes},
        {"mask": torch.rand(2, 1, 9, 9) < 0.7},
        {"q_pos": packed, "k_pos": packed},
        {"q_pos": torch.arange(9) * 2, "k_pos": torch.arange(9) * 2},
        {"q_pos": torch.stack([torch.arange(9), torch.arange(9) + 1]), "k_pos": torch.arange(9)},
        {"q_pos": torch.arange(9) - 4, "k_pos": torch.arange(9), "causal": True},  # the first queries see no key
    ):
        out = locant.attend(q, k, v, scheme, impl="sdpa", **where)
        torch.testing.assert_close(out, locant.attend(q, k, v, scheme, impl="eager", **where))
    locant.attend(q, k, v, frozen("huang4:clip=3"), impl="sdpa")
    locant.attend(q, k, v, cases.build("tisa"), dropout=0.5, impl="sdpa")  # its gradient would need the dropped weights
    assert set(called) == {"_attend_dense"}
    called.clear()
    locant.attend(q, k, v, scheme, dropout=0.5, impl="sdpa")  # without a gradient a view will do
    assert called == ["_attend_band"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_table_in_float32(dtype, called):
    scheme = frozen("alibi").to(dtype)
    q, k, v = cases.tensors(lq=300, lk=300, dtype=dtype)
    out = locant.attend(q, k, v, scheme, impl="sdpa")
    truth = locant.attend(q.double(), k.double(), v.double(), scheme, impl="eager")
    assert (out.double() - truth).abs().max() < 8 * torch.finfo(dtype).eps
    assert called == ["_attend_band"]


@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_linear_in_the_length(causal):
    scheme = frozen("tisa", n_heads=2).float()
    q, k, v = cases.tensors(b=1, h=2, kv=2, lq=1024, lk=1024, dtype=torch.float32)
    with Largest() as largest:
        locant.attend(q, k, v, scheme, causal=causal)
    assert largest.elements <= 2 * 2048 * 5  # tisa's own [H, R, kernels]; [H, L, L] would be 2,097,152


@pytest.mark.parametrize("rows", [2**22, 100, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", BIASES)
def test_gradients_by_a_view(spec, causal, rows, called, monkeypatch):
    """Of q, k, v and every parameter, in slices of any size; grouped heads, a cache, padding."""
    monkeypatch.setattr(sdpa, "ROWS", rows)
    scheme = cases.build(spec)
    mask = torch.arange(9) < torch.tensor([[9], [6]])
    for kv, lq, where in ((4, 9, {}), (2, 9, {"mask": mask}), (2, 4, {}), (4, 1, {})):
        inputs = [x.requires_grad_() for x in cases.tensors(kv=kv, lq=lq, lk=9)]
        leaves = [*inputs, *scheme.parameters()]
        target = torch.randn(2, 4, lq, 8, dtype=torch.float64)
        truth, ours = (
            torch.autograd.grad(
                (locant.attend(*inputs, scheme, causal=causal, impl=impl, **where) * target).sum(), leaves
            )
            for impl in ("eager", "sdpa")
        )
        for mine, true in zip(ours, truth, strict=True):
            torch.testing.assert_close(mine, true)
    assert set(called) == {"_attend_band"}


def test_training_a_bias_needs_memory_linear_in_the_length(monkeypatch):
    monkeypatch.setattr(sdpa, "ROWS", 2**16)
    scheme = cases.build("tisa", n_heads=2).float()
    q, k, v = (x.requires_grad_() for x in cases.tensors(b=1, h=2, kv=2, lq=1024, lk=1024, dtype=torch.float32))
    with Largest() as largest:
        locant.attend(q, k, v, scheme, causal=True).sum().backward()
    assert largest.elements <= 2**17  # a slice, with its padding; [H, L, L] would be 2,097,152
    assert scheme.offset.grad.abs().max() > 0


def test_half_precision_training():
    scheme = cases.build("tisa").float()
    q, k, v = cases.tensors(lq=64, lk=64, dtype=torch.bfloat16)
    truth = cases.build("tisa").float()
    truth.load_state_dict(scheme.state_dict())
    locant.attend(q, k, v, scheme, impl="sdpa").float().square().sum().backward()
    locant.attend(q.double(), k.double(), v.double(), truth.double(), impl="eager").square().sum().backward()
    for ours, true in zip(scheme.parameters(), truth.parameters(), strict=True):
        assert ours.grad.dtype == torch.float32
        assert (ours.grad - true.grad).abs().max() < 0.03 * true.grad.abs().max()


@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("impl", ["sdpa", "auto"])
def test_causal_with_a_scale_that_is_not_positive(impl, scale):
    """PyTorch's own causal mask is −∞ before the scale, and −∞ · 0 or −∞ · −1 is no mask."""
    q, k, v = cases.tensors()
    out = locant.attend(q, k, v, causal=True, scale=scale, impl=impl)
    torch.testing.assert_close(out, locant.attend(q, k, v, causal=True, scale=scale, impl="eager"))


@pytest.mark.parametrize("spec", ["nope", "alibi"])
def test_a_query_without_keys_and_with_large_logits_has_no_nan_gradient(spec):
    """The kernel's backward pass computes exp(logit − log-sum) again; logits of 1e12 make that infinite."""
    q, k, v = cases.tensors(lq=11, lk=20, dtype=torch.float32)
    q[:, :, 1] *= 1e12
    mask = torch.ones(11, 20, dtype=torch.bool)
    mask[1] = False
    scheme = cases.build(spec).float()
    grads = {}
    for impl in ("sdpa", "eager"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = locant.attend(*leaves, scheme, mask=mask[None, None], impl=impl)
        grads[impl] = torch.autograd.grad(out.square().sum(), leaves)
    for ours, truth in zip(grads["sdpa"], grads["eager"], strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-4)


def test_sequences_with_the_same_padding_are_computed_together():
    """Groups of sequences, and the keys that they see."""

    def spans(mask, **how):
        return sdpa._spans(prepare(*cases.tensors(b=3), None, mask=mask, **how))

    rows = torch.ones(3, 9, dtype=torch.bool)
    together = slice(0, 3)
    assert spans(None) == spans(rows) == [(together, 0, 9)]
    rows[:, 7:] = False
    assert spans(rows) == spans(rows, causal=True) == [(together, 0, 7)]
    rows[:, 0] = False
    assert spans(rows) == [(together, 1, 7)]
    assert spans(rows, causal=True) is None  # the first query sees no key
    rows[1, 1:3] = False
    assert spans(rows) == [(slice(0, 1), 1, 7), (slice(1, 2), 3, 7), (slice(2, 3), 1, 7)]
    rows[2, 4] = False
    assert spans(rows) is None  # a gap
    rows[2] = False
    assert spans(rows) is None  # only padding
    by_query = torch.ones(3, 1, 9, 9, dtype=torch.bool)
    assert spans(by_query) == [(together, 0, 9)]
    by_query[0, 0, 3, 8] = False
    assert spans(by_query) is None
    assert spans(torch.ones(3, 4, 9, 9, dtype=torch.bool)) is None  # by head


def gradients(impl, scheme, tensors, **how):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = locant.attend(*leaves, scheme, impl=impl, **how)
    found = torch.autograd.grad(out.double().sin().sum(), [*leaves, *scheme.parameters()], allow_unused=True)
    return [out, *(x for x in found if x is not None)]


@pytest.mark.parametrize("spec", ["nope", "toeplitz:clip=3", "huang4:clip=3", "cope:positions=4"])
@pytest.mark.parametrize("causal", [False, True])
def test_sizes_that_coincide(spec, causal):
    """No size may be taken for another: batch, heads, queries, keys and head size that are equal."""
    for b, h, kv, lq, lk, d in ((2, 4, 2, 2, 4, 4), (4, 4, 1, 4, 4, 8), (2, 2, 2, 2, 2, 2), (1, 2, 1, 1, 2, 8)):
        scheme = cases.build(spec, n_heads=h, head_dim=d, d_model=h * d)
        tensors = cases.tensors(b=b, h=h, kv=kv, lq=lq, lk=lk, d=d)
        for ours, truth in zip(*(gradients(x, scheme, tensors, causal=causal) for x in ("sdpa", "eager")), strict=True):
            torch.testing.assert_close(ours, truth)


@pytest.mark.parametrize("shared", [False, True])
def test_a_bias_for_one_head_or_all(shared, called):
    """The gradient of a bias that all heads share is the sum of theirs."""

    class Bias(locant.Scheme):
        def __init__(self, heads):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(heads, 17, dtype=torch.float64))

        def terms(self, r):
            return locant.Terms(bias=self.table)

    for h in (1, 2, 4):
        scheme, tensors = Bias(1 if shared else h), cases.tensors(h=h, kv=h)
        for ours, truth in zip(*(gradients(x, scheme, tensors) for x in ("sdpa", "eager")), strict=True):
            torch.testing.assert_close(ours, truth)
    assert set(called) == {"_attend_band"}


@pytest.mark.parametrize("kv", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_half_precision_have_its_dtype_and_that_of_the_tables(dtype, kv, called):
    scheme, tensors = cases.build("toeplitz:clip=8").float(), cases.tensors(kv=kv, dtype=dtype)
    found, truth = (
        gradients(impl, scheme, [x.to(kind) for x in tensors])
        for impl, kind in (("sdpa", dtype), ("eager", torch.float32))
    )
    assert [x.dtype for x in found] == [dtype] * 4 + [torch.float32]
    for ours, true in zip(found, truth, strict=True):
        assert (ours - true).abs().max() < 8 * torch.finfo(dtype).eps * true.abs().max()
    assert called == ["_attend_band"]


@pytest.mark.parametrize("spec", ["xpos", "xpos+alibi", "xpos+huang4:clip=3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotations_that_widen_to_float64(spec, dtype):
    """The result has the dtype of the queries."""
    scheme = cases.build(spec).float().requires_grad_(False)
    tensors, pos = cases.tensors(dtype=dtype), torch.arange(9) * 5000
    out, truth = (
        locant.attend(*tensors, scheme, q_pos=pos, k_pos=pos, causal=True, impl=impl) for impl in ("sdpa", "eager")
    )
    assert out.dtype == truth.dtype == dtype
    torch.testing.assert_close(out, truth)


@pytest.mark.parametrize("apart", [-3, -2, -1, 0, 1, 2, 3])
@pytest.mark.parametrize(("lq", "lk"), [(5, 5), (3, 6), (6, 3)])
def test_gradients_of_causal_calls_at_any_distance(apart, lq, lk, called):
    """A view serves as long as the first query sees a key. A row of −∞ alone would have a gradient of NaN."""
    scheme, tensors = cases.build("toeplitz:clip=20"), cases.tensors(lq=lq, lk=lk)
    how = {"q_pos": torch.arange(lq), "k_pos": torch.arange(lk) + apart, "causal": True}
    for ours, truth in zip(*(gradients(impl, scheme, tensors, **how) for impl in ("sdpa", "eager")), strict=True):
        torch.testing.assert_close(ours, truth)
    assert called == ["_attend_band" if apart <= 0 else "_attend_dense"]


def test_sequences_whose_keys_and_queries_are_not_equally_far_apart():
    """The sums of their first positions are equal, the differences are not: one band would be wrong for the second."""
    q, k, v = cases.tensors(lq=9, lk=9)
    first = torch.tensor([[0], [4]])
    pos = {"q_pos": first + torch.arange(9), "k_pos": 4 - first + torch.arange(9)}
    scheme = cases.build("tisa")
    found = locant.attend(q, k, v, scheme, impl="sdpa", **pos)
    torch.testing.assert_close(found, locant.attend(q, k, v, scheme, impl="eager", **pos))


def test_a_band_beside_a_rotation_that_widens():
    """`xpos` computes this span in float64; the output has the dtype of the query."""
    q, k, v = cases.tensors(lq=1, lk=1, dtype=torch.float32)
    scheme = locant.scheme("xpos:base=4+alibi", n_heads=4, head_dim=8)
    far = {"q_pos": torch.tensor([700]), "k_pos": torch.tensor([0]), "causal": True}
    assert scheme.rotate(q, k, far["q_pos"][None], far["k_pos"][None])[0].dtype == torch.float64
    found = locant.attend(q, k, v, scheme, impl="sdpa", **far)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, locant.attend(q, k, v, scheme, impl="eager", **far))


@pytest.mark.parametrize("masked", [False, True])
def test_float64_queries_with_a_float32_scheme(masked):
    q, k, v = cases.tensors(dtype=torch.float64)
    mask = torch.rand(2, 1, q.shape[2], k.shape[2]) < 0.7 if masked else None
    scheme = locant.scheme("tisa", n_heads=4)
    found = locant.attend(q, k, v, scheme, impl="sdpa", mask=mask)
    torch.testing.assert_close(found, locant.attend(q, k, v, scheme, impl="eager", mask=mask))


def test_one_query_that_may_attend_to_nothing():
    q, k, v = cases.tensors(dtype=torch.float32)
    mask = torch.ones(2, 1, q.shape[2], k.shape[2], dtype=torch.bool)
    mask[0, :, 3] = False
    scheme = cases.build("tisa").float()
    found = locant.attend(q, k, v, scheme, impl="sdpa", mask=mask)
    assert not found[0, :, 3].any()
    assert found[1, :, 3].any()
    torch.testing.assert_close(found, locant.attend(q, k, v, scheme, impl="eager", mask=mask))


LAYOUTS = {
    "heads first": lambda x: x,
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a longer cache": lambda x: torch.cat([x, x], dim=2)[:, :, : x.shape[2]],
}


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "padding"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kv", [1, 2, 4])
def test_one_query_over_caches_in_any_layout(kv, rows, layout, masked):
    q = torch.randn(rows, 4, 1, 8)
    k, v = (LAYOUTS[layout](torch.randn(rows, kv, 50, 8)) for _ in range(2))
    how = {"mask": torch.arange(50) < torch.tensor([[50], [30], [50]][:rows])} if masked else {}
    scheme = locant.scheme("tisa", n_heads=4)
    with torch.no_grad():
        out = locant.attend(q, k, v, scheme, causal=True, impl="sdpa", **how)
        truth = locant.attend(*(x.double() for x in (q, k, v)), scheme.double(), causal=True, impl="eager", **how)
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-6)


def test_one_query_whose_bias_hides_every_key_gets_zeros():
    class OneHead(locant.Scheme):
        def terms(self, r):
            return locant.Terms(bias=torch.stack([torch.full((len(r),), -torch.inf), torch.zeros(len(r))]))

    q, k, v = cases.tensors(b=2, h=2, kv=2, lq=1, lk=9, dtype=torch.float32)
    with torch.no_grad():
        out = locant.attend(q, k, v, OneHead(), impl="sdpa")
        torch.testing.assert_close(out, locant.attend(q, k, v, OneHead(), impl="eager"))
    assert (out[:, 0] == 0).all()


@pytest.mark.parametrize("spec", ["rope", "nope"])
def test_a_second_derivative_raises_in_words(spec):
    scheme = locant.scheme(spec, n_heads=2, head_dim=8)
    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    out = locant.attend(q, k, v, scheme, impl="sdpa")
    first = torch.autograd.grad(out.square().sum(), [q, k, v], create_graph=True)
    plain = torch.autograd.grad(locant.attend(q, k, v, scheme, impl="sdpa").square().sum(), [q, k, v])
    assert all(torch.equal(x, y) for x, y in zip(first, plain, strict=True))  # the first one works
    with pytest.raises(NotImplementedError, match="impl='fused' or impl='eager'"):
        sum(x.square().sum() for x in first).backward()


def test_a_first_derivative_that_may_be_differentiated_again_works_for_frozen_queries():
    """The kernel then has a gradient of the keys and values alone."""
    q = torch.randn(1, 2, 5, 8)
    k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(2))

    def gradients(impl):
        out = locant.attend(q, k, v, causal=True, impl=impl)
        return torch.autograd.grad(out.square().sum(), [k, v], create_graph=True)

    for ours, truth in zip(gradients("sdpa"), gradients("eager"), strict=True):
        torch.testing.assert_close(ours, truth)
