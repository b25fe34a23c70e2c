"""The flex back end: forward against eager on this CPU; gradients where there is a GPU."""

import copy

import pytest
import torch

import locant
from locant.attention import flex
from locant.attention.request import prepare
from locant.terms import Sides
from tests import cases
from tests.attention.test_sides import Everything

pytest.importorskip("torch.nn.attention.flex_attention", reason="this torch has no FlexAttention; returns with ≥ 2.5")

run_compiled = flex._run_compiled


@pytest.fixture(scope="module", autouse=True)
def _uncompiled():
    """Compiling takes seconds per kernel, so that these tests run the function uncompiled. Two tests below compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_run_compiled", flex._run)
        # Older releases of torch do not have this switch, and trace every call.
        patch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
        yield


def call(scheme, lq, lk, **how):
    q, k, v = cases.tensors(kv=2, lq=lq, lk=lk, dtype=torch.float32)
    with torch.no_grad():
        ours = locant.attend(q, k, v, scheme.float(), impl="flex", **how)
        truth = locant.attend(
            *(x.double() for x in (q, k, v)), copy.deepcopy(scheme).double(), impl="eager", **how
        ).float()
    torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "spec", ["tisa", "huang1:clip=3", "huang4:clip=3,heads=own", "rope+t5", "huang2:clip=3+alibi", "nope"]
)
def test_equal_to_eager(spec):
    scheme = cases.build(spec)
    call(scheme, 9, 9)
    call(scheme, 140, 140, causal=True)
    call(scheme, 3, 140, causal=True)
    mask = torch.arange(140) < torch.tensor([[140], [50]])
    call(scheme, 140, 140, mask=mask)
    pos = torch.stack([torch.arange(140), torch.arange(140).clamp(min=7)])
    call(scheme, 140, 140, mask=mask, causal=True, q_pos=pos, k_pos=pos)
    call(scheme, 140, 140, mask=torch.rand(1, 4, 140, 140) < 0.5)
    gap = torch.arange(140) + 300 * (torch.arange(140) > 70)
    call(scheme, 140, 140, q_pos=gap, k_pos=gap)
    call(scheme, 20, 20, mask=torch.zeros(2, 20, dtype=torch.bool))  # zeros, because no key is visible


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("spec", ["t5:buckets=8,max_distance=3", "toeplitz:clip=2"])
def test_a_decoding_step_beyond_the_reach(spec):
    """The table of a decoding step has room for the next steps, so it has more columns than the reach."""
    call(cases.build(spec), 1, 40, causal=True)


def test_unsupported_calls_raise_with_the_reason():
    q, k, v = cases.tensors(dtype=torch.float32)
    for spec, reason in {
        "shaw": "value, which a score_mod cannot express",
        "huang3": "vector gain, which a score_mod cannot express",
        "xl": "without a reach",
        "cope": "pair, which a score_mod cannot express",
    }.items():
        with pytest.raises(ValueError, match=reason):
            locant.attend(q, k, v, cases.build(spec).float(), impl="flex")
    with pytest.raises(ValueError, match="no backward pass on CPUs"):
        locant.attend(q, k, v, cases.build("tisa").float(), impl="flex")
    with torch.no_grad(), pytest.raises(ValueError, match="no dropout"):
        locant.attend(q, k, v, dropout=0.1, impl="flex")


def test_buckets():
    assert [flex.bucket(n) for n in (1, 128, 129, 300, 384, 385, 600, 769, 1025, 1537)] == [
        128, 128, 256, 384, 384, 512, 768, 1024, 1536, 2048,
    ]  # fmt: skip


def test_one_compilation_within_a_bucket():
    """Lengths of one bucket give Dynamo the same graph: nothing in it depends on the length."""
    torch.compiler.reset()
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(flex._run, backend=count, dynamic=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_run_compiled", compiled)
        for spec in ("tisa", "huang4:clip=3"):
            graphs.clear()
            for length in (130, 200, 256):
                call(cases.build(spec), length, length, causal=True)
            assert len(graphs) == 1


def test_compiled():
    """The compiled kernel, once: Inductor needs a C++ compiler and some seconds."""
    scheme = cases.build("huang4:clip=3+t5")
    torch.compiler.reset()
    # Inductor would compile a test program for every vector extension of the CPU: 20 s without a cache.
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        compiled = torch.compile(flex._run, dynamic=False)
        patch.setattr(flex, "_run_compiled", compiled)
        try:
            call(scheme, 140, 140, causal=True)
        except torch._inductor.exc.InvalidCxxCompiler:
            pytest.skip("Inductor found no C++ compiler; returns where there is one")


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="FlexAttention has no CPU backward; returns with a CUDA device"
)
@pytest.mark.parametrize("spec", ["tisa", "huang1:clip=3", "huang4:clip=3,heads=own", "rope+t5"])
def test_gradients_on_a_gpu(spec):
    results = []
    scheme = cases.build(spec, head_dim=16).float().cuda()
    tensors = [x.cuda().requires_grad_() for x in cases.tensors(lq=140, lk=140, d=16, dtype=torch.float32)]
    for impl in ("eager", "flex"):
        out = locant.attend(*tensors, scheme, causal=True, impl=impl)
        results.append(torch.autograd.grad(out.square().sum(), [*tensors, *scheme.parameters()]))
    for truth, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-2, atol=1e-2)


def in_blocks(pairs):
    """[B, H, Lq, Lk] -> [B, H, blocks of queries, blocks of keys, pairs of a block]"""
    return pairs.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128)).movedim(-3, -2).flatten(-2)


@pytest.mark.parametrize(
    "kind", ["nothing", "causal", "positions", "padding", "heads", "both", "queries", "everything"]
)
def test_blocks_that_the_kernel_skips_or_does_not_mask(kind, monkeypatch):
    """Only the compiled kernel skips blocks, so the tests above cannot notice a block that is skipped wrongly."""
    b, h, n = 2, 2, 256
    padding = (torch.arange(n) < torch.tensor([[n], [100]]))[:, None, None]
    heads = (torch.arange(n) >= 128 * torch.tensor([[0], [1]]))[None, :, None]
    queries = (torch.arange(n)[:, None] < 128) | (torch.arange(n) < 128)
    pos = torch.stack([torch.arange(n), torch.arange(n).flip(0)])
    how = {
        "causal": {"causal": True},
        "positions": {"causal": True, "q_pos": pos, "k_pos": pos},
        "padding": {"mask": padding},
        "heads": {"mask": heads},
        "both": {"mask": padding & heads},
        "queries": {"mask": queries},
        "everything": {"mask": padding & heads & queries, "causal": True, "q_pos": pos, "k_pos": pos},
    }.get(kind, {})
    calls = []
    monkeypatch.setattr(flex, "_run_compiled", lambda *inputs: calls.append(inputs) or inputs[0])
    request = prepare(*cases.tensors(h=h, kv=h, lq=n, lk=n, dtype=torch.float32), None, **how)
    with torch.no_grad():
        flex.attend(request)
    ((*_, block_mask, scale, softcap, sinks, is_sink),) = calls
    assert softcap is sinks is is_sink is None
    assert scale == request.scale
    visible = request.visible()
    pairs = in_blocks((torch.ones(1, 1, n, n, dtype=torch.bool) if visible is None else visible).expand(b, h, n, n))
    listed = torch.arange(2) < block_mask.full_kv_num_blocks[..., None]  # a list of blocks begins with those that count
    full = torch.zeros_like(listed).scatter(-1, block_mask.full_kv_indices.long(), listed)
    assert torch.equal(block_mask.to_dense().bool().expand(b, h, 2, 2), pairs.any(-1))
    assert torch.equal(full.expand(b, h, 2, 2), pairs.all(-1))
    # One mask serves all sequences or heads where it can: making it takes time.
    by_row, by_head = kind in ("positions", "padding", "both", "everything"), kind in ("heads", "both", "everything")
    assert block_mask.shape[:2] == (b if by_row else 1, h if by_head else 1)


class Shared(locant.Scheme):
    """A bias and a gain that all heads share."""

    def terms(self, r):
        return locant.Terms(bias=r[None] * 0.01, gain=r[None] * 0.1 + 1)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("heads", [1, 2])
def test_tables_of_one_or_two_heads(heads):
    q, k, v = cases.tensors(h=heads, kv=heads, dtype=torch.float32)
    for scheme in (
        Shared(),
        *(cases.build(spec, n_heads=heads).float() for spec in ("toeplitz:clip=3", "huang1:clip=3")),
    ):
        with torch.no_grad():
            found, truth = (locant.attend(q, k, v, scheme, impl=impl) for impl in ("flex", "eager"))
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_rotations_may_widen():
    class Wider(locant.Scheme):
        def rotate(self, q, k, q_pos, k_pos):
            return q.float() * 2, k.float()

    q, k, v = cases.tensors(dtype=torch.bfloat16)
    with torch.no_grad():
        found, truth = (locant.attend(q, k, v, Wider(), impl=impl) for impl in ("flex", "eager"))
    assert found.dtype == truth.dtype == torch.bfloat16
    torch.testing.assert_close(found, truth)


def test_torch_may_compile_a_kernel_for_each_kind_and_bucket(monkeypatch):
    limits = []
    name = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    monkeypatch.setattr(
        flex, "_compiled", lambda: lambda *inputs: limits.append(getattr(torch._dynamo.config, name)) or inputs
    )
    before = getattr(torch._dynamo.config, name)
    assert run_compiled(1, 2) == (1, 2)
    assert limits == [flex.KERNELS] == [64]
    assert getattr(torch._dynamo.config, name) == before


def test_sizes_of_buckets_are_whole_numbers():
    assert all(type(flex.bucket(length)) is int for length in (1, 128, 300, 700, 3000))


def test_what_is_compiled():
    assert flex._compiled()._torchdynamo_orig_callable is flex._run


class Queries(locant.Scheme):
    """A vector for queries alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(1, 7, 8, dtype=torch.float64))

    @property
    def reach(self):
        return 3

    def terms(self, r):
        return locant.Terms(query=self.table[:, r.clamp(-3, 3) + 3])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_one_product_and_no_table():
    call(Queries(), 9, 9)


def test_a_vector_without_a_reach_is_refused(monkeypatch):
    monkeypatch.setattr(Queries, "reach", None)
    with pytest.raises(ValueError, match="without a reach"):
        call(Queries(), 9, 9)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_vectors_levels_and_temperatures_of_each_token():
    torch.manual_seed(0)
    scheme = Everything(n_heads=4, d_model=5)
    call(scheme, 9, 9, x=torch.randn(2, 9, 5))
    call(scheme, 3, 140, x=torch.randn(2, 140, 5), causal=True)


class Levels(locant.Scheme):
    """Levels as after many tokens: large, and nearly equal."""

    has_levels = True

    def sides(self, tokens):
        q_pos, k_pos = (x.double().sin()[:, None] for x in (tokens.q_pos, tokens.k_pos))
        return Sides(query_level=1e7 + q_pos, key_level=-1e7 - k_pos)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_large_levels_of_queries_and_keys_cancel_before_they_are_rounded():
    """float32 has no number between 1e7 and 1e7 + 1."""
    call(Levels(), 9, 9)
    call(Levels(), 3, 140, causal=True)
    call(Levels(), 128, 130)  # queries fill a block, keys do not
