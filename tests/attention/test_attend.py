"""attend: back ends, positions, masks, dtypes and gradients."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import locant
from locant.attention import eager
from tests import cases

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FOLDABLE = [spec for spec in cases.SPECS if not spec.startswith("huang") or spec.startswith("huang4")]
FOLDABLE = [spec for spec in FOLDABLE if not spec.startswith("shaw") or "values=false" in spec]


@pytest.mark.parametrize("causal", [False, True])
def test_without_a_scheme_it_is_plain_attention(causal):
    q, k, v = cases.tensors()
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    for impl in ("auto", "eager", "sdpa"):
        torch.testing.assert_close(locant.attend(q, k, v, causal=causal, impl=impl), theirs)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_property_back_ends_agree(data):
    """Output and every gradient of sdpa equal eager's, for random shapes, positions, masks and dropout 0."""
    spec = data.draw(st.sampled_from(FOLDABLE))
    kv, groups = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    lq, lk = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    if "free=2" in spec:
        kv = 2
    scheme = cases.build(spec, n_heads=kv * groups)
    inputs = [x.requires_grad_() for x in cases.tensors(h=kv * groups, kv=kv, lq=lq, lk=lk)]
    causal = data.draw(st.booleans())
    mask = torch.rand(2, 1, lq, lk) < 0.6 if data.draw(st.booleans()) else None
    q_pos, k_pos = torch.randint(0, 40, (2, lq)), torch.randint(0, 40, (1, lk))
    if data.draw(st.booleans()) and lq <= lk:
        q_pos = k_pos = None
    target = torch.randn(2, kv * groups, lq, 8, dtype=torch.float64)
    results = []
    for impl in ("eager", "sdpa"):
        out = locant.attend(*inputs, scheme, q_pos=q_pos, k_pos=k_pos, mask=mask, causal=causal, impl=impl)
        leaves = [*inputs, *scheme.parameters()]
        results.append((out, *torch.autograd.grad((out * target).sum(), leaves, allow_unused=True)))
    for ours, truth in zip(results[1], results[0], strict=True):
        assert (ours is None) == (truth is None)
        if ours is not None:
            torch.testing.assert_close(ours, truth, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", cases.SPECS)
def test_dtypes(spec, dtype):
    """The error against float64 on the same rounded inputs is no larger than that of plain attention in this dtype."""
    scheme = cases.build(spec).to(dtype)
    q, k, v = cases.tensors(dtype=dtype)
    pos = torch.arange(9) + 50
    wide = [x.double() for x in (q, k, v)]
    scheme64 = locant.scheme(str(scheme), n_heads=4, head_dim=8, d_model=32).double()
    scheme64.load_state_dict(scheme.state_dict())
    truth = locant.attend(*wide, scheme64, q_pos=pos, k_pos=pos, causal=True, impl="eager")
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True).double()
    allowed = 3 * (plain - F.scaled_dot_product_attention(*wide, is_causal=True)).abs().max()
    allowed = allowed + 30 * torch.finfo(dtype).eps  # the rotated q and k, and the output, round as well
    for impl in ("auto", "eager"):
        out = locant.attend(q, k, v, scheme, q_pos=pos, k_pos=pos, causal=True, impl=impl)
        assert out.dtype == dtype
        assert (out.double() - truth).abs().max() < allowed


@pytest.mark.parametrize("impl", ["eager", "sdpa"])
def test_tables_are_not_rounded_to_half_precision(impl):
    """−m·|r| at r = 1001 is not a bfloat16 number; with q = 0 the weights are the softmax of the table alone."""
    scheme = locant.scheme("alibi", n_heads=8)
    q = torch.zeros(1, 8, 1, 4, dtype=torch.bfloat16)
    k, v = torch.zeros(1, 8, 2, 4, dtype=torch.bfloat16), torch.tensor([0.0, 1.0]).view(1, 1, 2, 1).expand(1, 8, 2, 4)
    pos = torch.tensor([1001, 1000])
    out = locant.attend(q, k, v.bfloat16(), scheme, q_pos=torch.tensor([2002]), k_pos=pos, impl=impl)
    slope = 2.0**-1
    expected = torch.tensor([math.exp(-slope) / (1 + math.exp(-slope))]).bfloat16()
    assert out[0, 0, 0, 0] == expected  # in bfloat16 both biases would be −500


@pytest.mark.parametrize("impl", ["eager", "sdpa"])
@pytest.mark.parametrize("spec", ["nope", "tisa", "huang4:clip=3", "rope", "cope:positions=4"])
def test_a_query_that_sees_no_key_gets_zeros_and_no_nan_gradient(spec, impl):
    scheme = cases.build(spec)
    q, k, v = (x.requires_grad_() for x in cases.tensors())
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    mask[0, :, 4] = False
    mask[1] = False
    out = locant.attend(q, k, v, scheme, mask=mask, impl=impl)
    assert torch.equal(out[0, :, 4], torch.zeros_like(out[0, :, 4]))
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert (out[0, :, 3] != 0).all()
    grads = torch.autograd.grad(out.square().sum(), [q, k, v, *scheme.parameters()], allow_unused=True)
    assert all(grad.isfinite().all() for grad in grads if grad is not None)
    assert torch.equal(grads[0][1], torch.zeros_like(grads[0][1]))


def test_positions_by_default_are_those_of_decoding():
    scheme = cases.build("tisa+huang4:clip=3+rope")
    q, k, v = cases.tensors(lq=3, lk=9)
    for impl in ("eager", "sdpa"):
        default = locant.attend(q, k, v, scheme, causal=True, impl=impl)
        spelled = locant.attend(
            q, k, v, scheme, q_pos=torch.arange(6, 9), k_pos=torch.arange(9), causal=True, impl=impl
        )
        torch.testing.assert_close(default, spelled)
        keys_only = locant.attend(q, k, v, scheme, k_pos=torch.arange(9) + 4, causal=True, impl=impl)
        torch.testing.assert_close(default, keys_only)


def test_packed_sequences_equal_separate_ones():
    scheme = cases.build("tisa+huang4:clip=3+rope")
    q, k, v = cases.tensors(b=1, lq=9, lk=9)
    pos = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4])
    block = torch.zeros(9, 9, dtype=torch.bool)
    block[:4, :4] = block[4:, 4:] = True
    for impl in ("eager", "sdpa"):
        packed = locant.attend(q, k, v, scheme, q_pos=pos, k_pos=pos, mask=block, causal=True, impl=impl)
        for part in (slice(0, 4), slice(4, 9)):
            alone = locant.attend(*(x[:, :, part] for x in (q, k, v)), scheme, causal=True, impl=impl)
            torch.testing.assert_close(packed[:, :, part], alone)


def test_left_padding_equals_the_unpadded_row():
    scheme = cases.build("shaw:clip=3+xl")
    q, k, v = cases.tensors(b=2)
    pos = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4, 5], list(range(9))])
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = False
    padded = locant.attend(q, k, v, scheme, q_pos=pos, k_pos=pos, mask=mask, causal=True)
    alone = locant.attend(*(x[:1, :, 3:] for x in (q, k, v)), scheme, causal=True)
    torch.testing.assert_close(padded[:1, :, 3:], alone)
    torch.testing.assert_close(padded[1:], locant.attend(*(x[1:] for x in (q, k, v)), scheme, causal=True))


def test_masks_of_every_shape_give_the_same():
    q, k, v = cases.tensors(b=2, lq=4, lk=6)
    keys = torch.rand(2, 6) < 0.7
    keys[:, 0] = True
    one = locant.attend(q, k, v, mask=keys)
    torch.testing.assert_close(locant.attend(q, k, v, mask=keys[:, None, None, :]), one)
    torch.testing.assert_close(locant.attend(q, k, v, mask=keys[:, None, None, :].expand(2, 4, 4, 6)), one)
    queries = torch.rand(4, 6) < 0.7
    torch.testing.assert_close(locant.attend(q, k, v, mask=queries), locant.attend(q, k, v, mask=queries[None, None]))


def test_grouped_heads_equal_repeated_ones():
    q, k, v = cases.tensors(h=4, kv=2)
    repeated = [x.repeat_interleave(2, dim=1) for x in (k, v)]
    for spec in ("huang4:clip=3,heads=own", "tisa", "rope", "xl"):
        scheme = cases.build(spec)
        for impl in ("eager", "sdpa"):
            torch.testing.assert_close(
                locant.attend(q, k, v, scheme, impl=impl), locant.attend(q, *repeated, scheme, impl=impl)
            )


def test_head_size_of_values_may_differ():
    q, k, _ = cases.tensors()
    v = torch.randn(2, 4, 9, 5, dtype=torch.float64)
    scheme = cases.build("tisa")
    out, weights = locant.attend(q, k, v, scheme, need_weights=True)
    torch.testing.assert_close(out, weights @ v)


@pytest.mark.parametrize("spec", ["huang3:clip=3", "shaw:clip=3", "tisa", "fire:width=6", "huang4:clip=3+rope", "cope"])
def test_eager_in_slices_equals_eager_at_once(spec, monkeypatch):
    scheme = cases.build(spec)
    inputs = [x.requires_grad_() for x in cases.tensors()]
    mask = torch.rand(2, 1, 9, 9) < 0.7
    results = []
    for chunk in (2**24, 1500):
        monkeypatch.setattr(eager, "CHUNK", chunk)
        out, weights = locant.attend(*inputs, scheme, mask=mask, causal=True, need_weights=True)
        grads = torch.autograd.grad(out.square().sum(), [*inputs, *scheme.parameters()], allow_unused=True)
        results.append((out, weights, *grads))
    for once, sliced in zip(*results, strict=True):
        torch.testing.assert_close(once, sliced)


@pytest.mark.parametrize("spec", ["huang3:clip=3", "tisa", "cope:positions=4"])
def test_slices_under_a_transform(spec, monkeypatch):
    """torch.func allows no checkpoints, so nothing is recomputed there."""
    scheme = cases.build(spec)
    inputs = cases.tensors()

    def gradients():
        return torch.func.grad(lambda *x: locant.attend(*x, scheme).square().sum(), argnums=(0, 1, 2))(*inputs)

    once = gradients()
    monkeypatch.setattr(eager, "CHUNK", 300)
    for x, y in zip(gradients(), once, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("spec", ["cope:positions=4", "fire:width=6", "huang3:clip=3", "tisa"])
def test_slices_are_recomputed_from_the_same_inputs(spec, monkeypatch):
    """Between the passes, functional parameters are removed, and masks and positions are overwritten."""
    scheme = cases.build(spec)
    q, k, v = cases.tensors()
    other = {f"scheme.{name}": (x.detach() + 1).requires_grad_() for name, x in scheme.named_parameters()}

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scheme = scheme

        def forward(self, pos, mask):
            return locant.attend(q, k, v, self.scheme, q_pos=pos, k_pos=pos, mask=mask, impl="eager")

    results = []
    for chunk in (2**24, 64):
        monkeypatch.setattr(eager, "CHUNK", chunk)
        torch.manual_seed(0)
        pos, mask = torch.arange(9), torch.rand(2, 1, 9, 9) < 0.7
        out = torch.func.functional_call(Model(), other, (pos, mask))
        if chunk == 64:
            pos.zero_()
            mask.fill_(True)
        results.append(torch.autograd.grad(out.square().sum(), list(other.values()), allow_unused=True))
    for whole, sliced in zip(*results, strict=True):
        torch.testing.assert_close(whole, sliced)


def test_a_parameter_changed_before_the_backward_pass_raises(monkeypatch):
    monkeypatch.setattr(eager, "CHUNK", 64)
    scheme = cases.build("fire:width=6")
    out = locant.attend(*cases.tensors(), scheme, impl="eager").sum()
    with torch.no_grad():
        scheme.out.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place between the forward and the backward pass"):
        out.backward()


def test_eager_never_allocates_a_tensor_of_l_l_d():
    """huang3 at L = 512, forward and backward: no tensor has the size of [H, L, L, D]."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple) else (out,):
                if isinstance(x, torch.Tensor):
                    self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
            return out

    scheme = locant.scheme("huang3", n_heads=2, head_dim=64)
    q, k, v = (x.requires_grad_() for x in cases.tensors(b=1, h=2, kv=2, lq=512, lk=512, d=64, dtype=torch.float32))
    whole = 2 * 512 * 512 * 64
    with Largest() as largest:
        locant.attend(q, k, v, scheme, impl="eager").sum().backward()
    assert whole > eager.CHUNK
    assert largest.elements <= eager.CHUNK


def test_weights_sum_to_one_and_dropout_has_an_effect():
    q, k, v = cases.tensors()
    scheme = cases.build("tisa").requires_grad_(False)
    _, weights = locant.attend(q, k, v, scheme, causal=True, need_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert (weights.triu(1) == 0).all()
    for impl in ("eager", "sdpa"):
        torch.manual_seed(1)
        outs = [locant.attend(q, k, torch.ones_like(v), scheme, dropout=0.5, impl=impl) for _ in range(200)]
        mean = torch.stack(outs).mean(0)
        assert outs[0].std() > 0.1
        assert float(mean.mean()) == pytest.approx(1.0, abs=0.02)


def test_autocast_does_not_lower_the_tables():
    scheme = cases.build("xl").float()
    q, k, v = cases.tensors(dtype=torch.float32)
    plain = locant.attend(q, k, v, scheme, impl="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(locant.attend(q, k, v, scheme, impl="eager"), plain)


@pytest.mark.parametrize("spec", ["tisa", "t5", "alibi", "huang4", "rope", "xl", "kerple", "shaw", "huang3", "fire"])
def test_torch_compile_makes_one_graph(spec):
    scheme = cases.build(spec).float()
    q, k, v = cases.tensors(dtype=torch.float32)

    def run(q, k, v):
        return locant.attend(q, k, v, scheme, causal=True)

    torch.compiler.reset()
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), run(q, k, v))


def test_a_range_of_offsets_larger_than_memory():
    """Two tokens ten million apart: a table over all offsets between them would be gigabytes."""
    scheme = cases.build("huang4:clip=3").float()
    q, k, v = cases.tensors(lq=2, lk=2, dtype=torch.float32)
    pos = torch.tensor([0, 10_000_000])
    far = locant.attend(q, k, v, scheme, q_pos=pos, k_pos=pos)
    near = locant.attend(q, k, v, scheme, q_pos=pos.clamp(max=3), k_pos=pos.clamp(max=3))
    torch.testing.assert_close(far, near)


@pytest.mark.parametrize("spec", ["tisa", "rope", "huang3:clip=3", "shaw:clip=3"])
def test_no_queries(spec):
    scheme = cases.build(spec)
    for sizes in ({"lq": 0}, {"b": 0}):
        q, k, v = cases.tensors(**sizes)
        out, weights = locant.attend(q, k, v, scheme, need_weights=True)
        assert out.shape == q.shape
        assert weights.shape == (*q.shape[:3], 9)
    q, k, v = cases.tensors(lq=0)
    empty = torch.zeros(0, dtype=torch.long)
    assert locant.attend(q, k, v, scheme, q_pos=empty, k_pos=torch.arange(9)).shape == q.shape
    q, k, v = cases.tensors(b=0)
    rows = torch.zeros(0, 9, dtype=torch.long)
    assert locant.attend(q, k, v, scheme, q_pos=rows, k_pos=rows).shape == q.shape
    assert locant.attend(q, k, v, scheme, q_pos=rows, k_pos=torch.arange(9)).shape == q.shape


def test_compiled_once_for_all_lengths():
    scheme = cases.build("tisa").float()
    torch.compiler.reset()
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda q, k, v: locant.attend(q, k, v, scheme, causal=True), backend=count, fullgraph=True, dynamic=True
    )
    for length in range(5, 15):
        q, k, v = cases.tensors(lq=length, lk=length, dtype=torch.float32)
        torch.testing.assert_close(compiled(q, k, v), locant.attend(q, k, v, scheme, causal=True))
    assert len(graphs) <= 2


def test_compiled_with_positions_as_inputs():
    torch.compiler.reset()
    q, k, v = cases.tensors(dtype=torch.float32)
    pos = torch.stack([torch.arange(9), torch.arange(9) * 3])
    for spec in ("tisa", "huang4:clip=3", "rope", "shaw:clip=3"):
        scheme = cases.build(spec).float()
        run = lambda q, k, v, pos, scheme=scheme: locant.attend(q, k, v, scheme, q_pos=pos, k_pos=pos, causal=True)  # noqa: E731
        compiled = torch.compile(run, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(q, k, v, pos), run(q, k, v, pos))


@pytest.mark.parametrize("spec", ["huang4:clip=3", "shaw:clip=3"])
def test_scattered_positions_cost_no_more_than_pairs(spec):
    """Random positions: as many offsets as pairs. A product for each offset would be L³."""
    scheme = cases.build(spec).float()
    q, k, v = cases.tensors(b=1, lq=300, lk=300, dtype=torch.float32)
    pos = torch.randint(0, 10_000_000, (300,))
    out = locant.attend(q, k, v, scheme, q_pos=pos, k_pos=pos, impl="eager")
    one = locant.attend(q[:, :, 7:8], k, v, scheme, q_pos=pos[7:8], k_pos=pos, impl="eager")
    torch.testing.assert_close(out[:, :, 7:8], one)


class EveryTable(locant.Scheme):
    """All tables, without a reach: each a wave of the offset."""

    def __init__(self, *tables):
        super().__init__()
        self.names = tables

    def terms(self, r):
        wave = torch.sin(r.double()[:, None] * torch.linspace(0.1, 2.0, 8, dtype=torch.float64) + 1)  # [R, 8]
        shapes = {"bias": wave[:, 0], "score": wave[:, 1], "gain": 2 + wave, "query": wave, "key": wave.flip(1)}
        shapes["value"] = wave.roll(3, 1)
        return locant.Terms(**{name: shapes[name][None] for name in self.names})


@pytest.mark.parametrize("positions", [[0, 1, 2, 3], [0, 5, 1000, 100_000], [[3, 90_000, 4, 7], [0, 0, 5, -2000]]])
@pytest.mark.parametrize("names", [("bias", "score", "gain", "query", "key", "value"), ("value",), ("query", "key")])
def test_every_table_pair_by_pair(names, positions):
    """The equation as a loop, over consecutive offsets and over a list of them."""
    scheme, (q, k, v) = EveryTable(*names), cases.tensors(h=2, kv=1, lq=4, lk=4)
    pos = torch.tensor(positions).expand(2, 4)
    expected = torch.empty_like(q)
    neutral = {name: torch.zeros(8, dtype=torch.float64) for name in ("query", "key", "value")}
    neutral |= {"bias": torch.zeros(()), "score": torch.zeros(()), "gain": torch.ones(8, dtype=torch.float64)}
    for b, h, i in itertools.product(range(2), range(2), range(4)):
        logits, values = [], []
        for j in range(4):
            tables = {name: x[0, 0] for name, x in scheme.terms(pos[b, j : j + 1] - pos[b, i : i + 1]).tables().items()}
            t = {**neutral, **tables}
            x, y = q[b, h, i], k[b, 0, j]
            inside = (x * t["gain"] * y).sum() + (x * t["query"]).sum() + (y * t["key"]).sum() + t["score"]
            logits.append(0.3 * inside + t["bias"])
            values.append(v[b, 0, j] + t["value"])
        expected[b, h, i] = torch.stack(logits).softmax(0) @ torch.stack(values)
    out = locant.attend(q, k, v, scheme, q_pos=pos, k_pos=pos, scale=0.3, impl="eager")
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("spec", ["nope", "tisa", "rope", "huang3:clip=3"])
def test_devices_without_autocast(spec):
    """Tensors without values have shapes; torch.autocast does not know their device."""
    scheme = cases.build(spec).float().to("meta")
    out = locant.attend(*(x.to("meta") for x in cases.tensors(lq=3, dtype=torch.float32)), scheme, causal=True)
    assert (out.device.type, out.dtype, out.shape) == ("meta", torch.float32, (2, 4, 3, 8))
