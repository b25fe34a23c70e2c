"""The Triton kernels against `eager` in float64, in Triton's interpreter: output and every gradient.

Tolerances are those of `test_fused.py`. Tiles are 16 × 16 in the interpreter, so 17 queries over 18 keys are four
tiles, three of them partial. `make gpu-proof` compares more and longer calls.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

import locant
from locant.attention import choice, triton
from locant.attention.request import prepare
from locant.attention.triton.__main__ import main
from tests import cases
from tests.attention.test_fused import Clipped, build_scheme, check, compare, expect, results, tensors
from tests.attention.test_fused_sides import NUMBERS, Distant, Numbers, Vectors
from tests.attention.test_softcap_and_sinks import gradients_under_a_flat_cap

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(),
    reason="no triton (make runs these tests in an environment that has it), or a GPU (then --selftest of the back end "
    "compares with eager)",
)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


FAST = ["nope", "tisa", "huang1:clip=3", "huang3:clip=3", "huang4:clip=3,heads=own", "shaw:clip=3", "xl", "rope"]
SPECS = [
    pytest.param(spec, marks=[] if spec in FAST else pytest.mark.slow)
    for spec in cases.SPECS
    if spec not in cases.PAIRS
]
LQ, LK = 17, 18
KINDS = {
    "band": {},
    "causal": {"causal": True},
    "far": {"q_pos": torch.arange(LQ), "k_pos": torch.arange(LK) + 200},
    "scatter": {"q_pos": torch.arange(LQ).flip(0), "k_pos": torch.arange(LK) // 2, "causal": True},
    "packed": {
        "q_pos": torch.cat([torch.arange(9), torch.arange(8)]),
        "k_pos": torch.cat([torch.arange(9), torch.arange(9)]),
        "mask": (torch.arange(LQ) < 9)[:, None] == (torch.arange(LK) < 9),
        "causal": True,
    },
    "window": {"window": (6, 3)},
    "masked": {"mask": torch.arange(LK)[None, None, None] % 7 != 3},
    "all masked": {"mask": torch.zeros(1, LK, dtype=torch.bool)},
    "half hidden": {"mask": (torch.arange(LK) > 15)[None, None, None]},
}


def ours(scheme, given, **how):
    check(scheme, given, impl="triton", **how)


@pytest.mark.parametrize("spec", SPECS)
def test_equal_to_eager(spec):
    heads = 4 if "free=2" in spec else 2
    ours(build_scheme(spec, heads, 8), tensors(1, heads, heads // 2, LQ, LK, 8), causal=True)


def every_table():
    """Every kind of table at once. A sum multiplies gains, so the vector gain is a test of its own."""
    parts = [locant.scheme(spec, n_heads=2, head_dim=8) for spec in ("huang1:clip=3", "shaw:clip=3,heads=own", "tisa")]
    return locant.schemes.Sum(*parts, Vectors(5, 3, heads=2), Numbers(NUMBERS[-1], heads=2))


@pytest.mark.parametrize("kind", KINDS)
def test_every_term_in_every_kind_of_tile(kind):
    torch.manual_seed(1)
    ours(every_table(), tensors(1, 2, 1, LQ, LK, 8), **KINDS[kind])


@pytest.mark.parametrize("kind", ["causal", "packed"])
def test_tiles_may_load_the_rows_of_their_block_again(kind, monkeypatch):
    """As some sizes of `blocks.TABLE` ask for, to save registers."""
    from locant.attention.triton import launch

    torch.manual_seed(1)
    monkeypatch.setattr(launch, "INTERPRETED", launch.INTERPRETED._replace(again=True))
    ours(every_table(), tensors(1, 2, 1, LQ, LK, 8), **KINDS[kind])


def test_tiles_need_not_be_square(monkeypatch):
    from locant.attention.triton import launch

    torch.manual_seed(1)
    for queries, keys in ((16, 32), (32, 16)):
        monkeypatch.setattr(launch, "INTERPRETED", launch.INTERPRETED._replace(queries=queries, keys=keys))
        ours(build_scheme("huang1:clip=3+tisa", 2, 8), tensors(1, 2, 1, 33, 40, 8), causal=True)


@pytest.mark.parametrize("kind", ["scatter", "window", "far"])
def test_a_vector_gain(kind):
    ours(Clipped("vector gain"), tensors(1, 2, 1, LQ, LK, 8), **KINDS[kind])


@pytest.mark.parametrize("kind", ["bias", "gain", "query", "key", "value"])
@pytest.mark.slow
@pytest.mark.parametrize("side", [-1, 1], ids=["past", "future"])
@pytest.mark.parametrize("inside", [0, 1, -1], ids="{} inside".format)
def test_a_tile_at_the_end_of_the_tables(kind, side, inside):
    """The first 16 keys are so far away that their nearest offset is 3 − inside; the others are near."""
    torch.manual_seed(1)
    far = torch.arange(16) + side * (15 + 3 - inside)
    ours(Clipped(kind), tensors(1, 2, 1, 16, 32, 8), q_pos=torch.arange(16), k_pos=torch.cat([far, torch.arange(16)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_under_a_softcap_with_sinks(dtype):
    torch.manual_seed(1)
    scheme = locant.schemes.Sum(locant.scheme("shaw:clip=7", n_heads=2, head_dim=8), Numbers(NUMBERS[-1]))
    ours(scheme, tensors(1, 2, 1, LQ, LK, 8, dtype=dtype), softcap=2.5, sinks=torch.randn(2), causal=True)


def test_gradients_where_the_cap_is_nearly_flat():
    gradients_under_a_flat_cap("triton")


def test_other_head_sizes_and_more_sequences():
    """A head size that is no power of 2, values of another one, and no shared heads."""
    ours(build_scheme("tisa", 2, 20), tensors(2, 2, 2, LQ, LQ, 20, 5), sinks=torch.randn(2))


def test_rotations_may_widen():
    """The query term belongs to the queries without the rotation, which may have another dtype."""
    scheme = locant.schemes.Sum(
        locant.scheme("rope", head_dim=8), locant.scheme("huang4:clip=3", n_heads=2, head_dim=8)
    )
    ours(scheme, tensors(1, 2, 1, LQ, LQ, 8, dtype=torch.bfloat16), causal=True)


@pytest.mark.parametrize("places", [0, 1], ids=["the last is 2^63 - 2", "the last is 2^63 - 1"])
def test_positions_near_the_largest_number(places):
    """Places behind the last query and the last key of a tile have no position beyond int64."""
    last = 2**63 - 2 + places
    q_pos, k_pos = last - LQ + 1 + torch.arange(LQ), last - LK + 1 + torch.arange(LK)
    scheme = Clipped("query")
    ours(scheme, tensors(1, 2, 1, LQ, LK, 8), q_pos=q_pos, k_pos=k_pos, causal=True)
    q_pos[3] -= 2**61  # scattered
    ours(scheme, tensors(1, 2, 1, LQ, LK, 8), q_pos=q_pos, k_pos=k_pos, causal=True)


def test_a_gain_that_float16_cannot_hold():
    """Queries times gains are operands of a product: beyond 65504 they would be infinite in float16."""
    torch.manual_seed(1)
    scheme, (q, k, v) = Clipped("vector gain"), tensors(1, 2, 1, LQ, LQ, 8, dtype=torch.float16)
    with torch.no_grad():
        scheme.table.mul_(1e5)
    ours(scheme, (q, k * 2**-12, v * 2**-6))  # small values keep the gradient of k within float16


@pytest.mark.parametrize("mistake", ["sign of r", "one column off", "factor 1.001"])
def test_a_mistake_is_noticed(mistake):
    """Faults in the tables, which the comparison must notice."""
    change = {
        "sign of r": lambda x: x.flip(1), "one column off": lambda x: x.roll(1, 1), "factor 1.001": lambda x: 1.001 * x,
    }[mistake]  # fmt: skip
    scheme, given = Clipped("query"), tensors(1, 2, 1, LQ, LQ, 8)
    truth, allowed, grad = expect(scheme, given)
    terms = scheme.terms
    scheme.terms = lambda r: locant.Terms(query=change(terms(r).query))
    with pytest.raises(AssertionError, match="from the truth"):
        compare(results("triton", scheme, given, grad), truth, allowed)


def test_tensors_of_any_layout():
    """As a model makes them: transposed from [B, L, H, D], one out of a stack of three, and expanded."""
    scheme = build_scheme("tisa", 3, 16)
    stack = torch.randn(1, LQ, 3, 3, 16)
    q, k, v = (stack[:, :, i].transpose(1, 2) for i in range(3))
    ours(scheme, (q, k, v[:, :1].expand(1, 3, LQ, 16)), grad=torch.randn(1, 1, 1, 1).expand(1, 3, LQ, 16))


def test_the_same_bits_every_time():
    scheme, given, grad = build_scheme("shaw:clip=3+tisa", 2, 8), tensors(2, 2, 1, LQ, LQ, 8), torch.randn(2, 2, LQ, 8)
    first, second = (results("triton", scheme, given, grad) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_of_tables_are_sums_of_parts(monkeypatch):
    """Whatever the number of parts, every block of queries is in one of them."""
    from locant.attention.triton import launch

    scheme, given = build_scheme("toeplitz:clip=3", 2, 8), tensors(1, 2, 1, 40, 40, 8)
    truth, allowed, grad = expect(scheme, given)
    for programs in (1, 4):
        monkeypatch.setattr(launch, "PROGRAMS", programs)
        compare(results("triton", scheme, given, grad), truth, allowed)
    monkeypatch.setattr(launch, "BUFFER_BYTES", 1)  # one part is always allowed
    compare(results("triton", scheme, given, grad), truth, allowed)


def test_dropout_drops_the_same_weights_backwards():
    """With unit vectors as values the output is the weights, and zeros are those that were dropped."""
    p, length = 0.4, 40
    scheme = build_scheme("tisa", 2, 8)
    q, k = torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 8)
    units = torch.eye(length).expand(1, 2, length, length)
    torch.manual_seed(5)
    dropped = locant.attend(q, k, units, scheme, dropout=p, impl="triton")
    _, weights = locant.attend(q, k, units, scheme, need_weights=True)
    keep = (dropped != 0).float() / (1 - p)
    torch.testing.assert_close(dropped, weights * keep)
    assert abs(float((dropped != 0).double().mean()) - (1 - p)) < 5 * (p * (1 - p) / dropped.numel()) ** 0.5
    assert not torch.equal(keep[:, 0], keep[:, 1])  # heads drop other weights

    v, grad = torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 8)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    everything = [*leaves, *scheme.parameters()]
    torch.manual_seed(5)
    found = torch.autograd.grad(locant.attend(*leaves, scheme, dropout=p, impl="triton"), everything, grad)
    _, weights = locant.attend(*leaves, scheme, need_weights=True)
    for x, y in zip(found, torch.autograd.grad((weights * keep) @ leaves[2], everything, grad), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4 * max(1.0, float(y.abs().max())))
    call = triton.make_call(prepare(q, k, v, scheme, dropout=p))
    torch.manual_seed(5)
    call = call._replace(seed=torch.randint(2**62, (1,)))
    from locant.attention.triton.launch import Launch

    assert torch.equal(Launch(call).kept(), keep != 0)


def test_autotuning_takes_the_fastest_sizes_once(monkeypatch):
    """Other sizes of tiles give the same result; those that do not fit on the device are left out."""
    import triton as library

    from locant.attention.triton import blocks, launch

    small, wide, large = blocks.Blocks(16, 16, 1, 1), blocks.Blocks(16, 32, 1, 1), blocks.Blocks(64, 64, 1, 1)
    timed = []

    def bench(run):
        run()
        timed.append(None)
        if len(timed) == 3:
            raise library.runtime.errors.OutOfResources(1, 0, "registers")
        return 2.0 - len(timed)

    monkeypatch.setattr(library.testing, "do_bench", bench)
    monkeypatch.setattr(blocks, "CANDIDATES", (small, wide, large))
    monkeypatch.setattr(blocks, "_fastest", {})
    monkeypatch.setattr(launch.triton.testing, "do_bench", bench)
    triton.autotune(True)
    try:
        given, scheme = tensors(1, 1, 1, 5, 20, 8), build_scheme("shaw:clip=3", 1, 8)
        for _ in range(2):
            with torch.no_grad():
                found = locant.attend(*given, scheme, impl="triton")
    finally:
        triton.autotune(False)
    assert len(timed) == 3
    assert list(blocks._fastest.values()) == [wide]
    torch.testing.assert_close(found, locant.attend(*given, scheme, impl="eager"))


@pytest.mark.parametrize("capability", [75, 80, 89, 90, 100, 103, 120])
@pytest.mark.parametrize("width", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_block_sizes_are_powers_of_2(width, itemsize, capability):
    from locant.attention.triton.blocks import KINDS, choose_blocks

    for kind in KINDS:
        for kernel in ("forward", "backward_queries", "backward_keys"):
            found = choose_blocks(width, kind, itemsize, capability, kernel)
            assert all(size in (16, 32, 64, 128) for size in found[:2])
            assert found.queries == found.keys or kind != "vectors"  # a band is twice a tile then


def test_vectors_of_a_table_count_for_the_size_of_a_tile(monkeypatch):
    """Vectors of q and of a side together may be wider than the head size."""
    from locant.attention.triton import launch

    asked = []
    monkeypatch.setattr(launch, "choose_blocks", lambda width, *rest: asked.append((width, rest[0])) or blocks)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    blocks = launch.INTERPRETED
    scheme = locant.schemes.Sum(build_scheme("huang4:clip=3", 2, 8), Vectors(5, 3, heads=2))
    for by in (scheme, build_scheme("tisa", 2, 8)):
        made = launch.Launch(triton.make_call(prepare(*tensors(1, 2, 1, LQ, LK, 8), by)))
        made.interpreted = False
        made.blocks("forward")
    assert asked == [(13, "vectors"), (8, "numbers")]


class Device:
    """A kernel on a device that holds tiles of 16 × 16, with one stage of loads."""

    def __init__(self, kernel):
        self.kernel, self.tried = kernel, []

    def __getitem__(self, grid):
        from triton.runtime.errors import OutOfResources

        def run(**arguments):
            form, stages = arguments["C"], arguments["num_stages"]
            self.tried.append((form.block_m, form.block_n, stages))
            if self.tried[-1] != (16, 16, 1):
                raise OutOfResources(2, 1, "shared memory")
            self.kernel[grid](**arguments)

        return run


def test_tiles_that_do_not_fit_on_the_device_become_smaller(monkeypatch):
    """Forward and backward. What fits is remembered; sizes that the caller gave are not changed."""
    from triton.runtime.errors import OutOfResources

    from locant.attention.triton import kernels, launch
    from locant.attention.triton.blocks import Blocks, smaller

    monkeypatch.setattr(launch, "_fitting", {})
    monkeypatch.setattr(launch, "INTERPRETED", Blocks(64, 32, 1, 2))
    devices = {name: Device(getattr(kernels, name)) for name in ("forward", "backward_queries", "backward_keys")}
    for name, device in devices.items():
        monkeypatch.setattr(kernels, name, device)
    scheme, given = build_scheme("huang1:clip=3", 2, 8), tensors(1, 2, 1, LQ, LK, 8)
    ours(scheme, given, causal=True)
    assert devices["forward"].tried == [(64, 32, 2), (64, 32, 1), (32, 16, 1), (16, 16, 1)]
    tried = [(64, 32, 1), (64, 32, 1), (32, 16, 1), (16, 16, 1)]  # gradients of tables have scratch memory: one stage
    assert devices["backward_queries"].tried == tried
    ours(scheme, given, causal=True)
    assert all(device.tried[4:] == [(16, 16, 1)] for device in devices.values())
    call = triton.make_call(prepare(*given, scheme))
    out, lse = torch.empty(1, 2, LQ, 8), torch.empty(1, 2, LQ, 2)
    with pytest.raises(OutOfResources):
        launch.Launch(call, Blocks(32, 32, 1, 1)).forward(out, lse)
    assert smaller(Blocks(16, 16, 8, 1)) is None


def test_second_gradients():
    torch.manual_seed(1)
    scheme = Vectors(3, 2, heads=2, head_dim=4)
    leaves = [x.requires_grad_() for x in tensors(1, 2, 1, 5, 6, 4)]
    found = {}
    for impl in ("triton", "eager"):
        out = locant.attend(*leaves, scheme, softcap=3.0, impl=impl)
        inputs = [*leaves, *scheme.parameters()]
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        found[impl] = torch.autograd.grad(sum(x.square().sum() for x in first), inputs)
    for x, y in zip(found["triton"], found["eager"], strict=True):
        torch.testing.assert_close(x, y, rtol=2e-3, atol=2e-3)


def test_a_key_level_of_minus_infinity_hides_a_key():
    class Hiding(Numbers):
        def sides(self, tokens):
            d = tokens.k.double() @ self.weight.double()
            return locant.terms.Sides(key_level=d.masked_fill(torch.arange(d.shape[-1]) % 3 == 1, -torch.inf))

    scheme, given = Hiding(("key_level",)), tensors(1, 2, 2, 9, 9, 8)
    found, truth = (locant.attend(*given, scheme, impl=impl) for impl in ("triton", "eager"))
    torch.testing.assert_close(found, truth)


def test_large_levels_lose_nothing():
    """Levels near 1e6 that nearly cancel. In float32 their differences would be off by 0.06."""

    class Decay(locant.Scheme):
        causal_only = True

        def sides(self, tokens):
            level = -(1e6 + 0.3 * torch.arange(tokens.k.shape[2], dtype=torch.float64))[None, None]
            return locant.terms.Sides(query_level=level[..., -tokens.q.shape[2] :], key_level=-level)

    given = tensors(1, 1, 1, LQ, LQ, 8)
    found = locant.attend(*given, Decay(), causal=True, impl="triton")
    truth = locant.attend(*(x.double() for x in given), Decay(), causal=True, impl="eager")
    assert (found.double() - truth).abs().max() < 2e-6


def test_nan_reaches_the_output():
    scheme, given = build_scheme("tisa", 2, 8), tensors(1, 2, 2, LQ, LQ, 8)
    given[1][0, 0, 5, 3] = float("nan")
    found, truth = (locant.attend(*given, scheme, impl=impl) for impl in ("triton", "eager"))
    assert torch.equal(found.isnan(), truth.isnan())
    assert found.isnan().any()


def test_operators_are_well_formed():
    scheme = build_scheme("shaw:clip=3", 2, 8)
    call = triton.make_call(prepare(*(x.requires_grad_() for x in tensors(1, 2, 1, 5, 6, 8)), scheme, causal=True))
    torch.library.opcheck(
        triton.forward, tuple(call), test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


def test_compiled_training():
    """One graph, with our operator in it, and the same gradients."""
    torch.compiler.reset()
    scheme = build_scheme("huang4:clip=3", 2, 8)
    leaves = [x.requires_grad_() for x in tensors(1, 2, 2, LQ, LQ, 8)]
    compiled = torch.compile(
        lambda q, k, v: locant.attend(q, k, v, scheme, causal=True, impl="triton"), backend="aot_eager", fullgraph=True
    )
    everything = [*leaves, *scheme.parameters()]
    found = torch.autograd.grad(compiled(*leaves).square().sum(), everything)
    truth = torch.autograd.grad(locant.attend(*leaves, scheme, causal=True, impl="eager").square().sum(), everything)
    for x, y in zip(found, truth, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)


# ------------------------------------------------------------------------------------------------- the self-test


def test_selftest_in_the_interpreter(monkeypatch, capsys):
    from locant.attention.triton import selftest

    monkeypatch.setattr(selftest, "SCHEMES", ("tisa",))
    monkeypatch.setattr(selftest, "HALF_INTERPRETED", ("alibi",))
    assert main(["--selftest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "No GPU that torch can use: tiny calls in Triton's interpreter. No time is measured."
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["tisa", "float32"],
        ["alibi", "bfloat16"],
        ["alibi", "float16"],
    ]
    assert all(line.endswith("ok") for line in lines[1:4])
    assert lines[4] == "3 of 3 comparisons with eager in float64 passed."
    assert lines[5].startswith("For an issue: locant ")
    assert lines[5].endswith("0 of 3 wrong, in Triton's interpreter, nothing timed")


@pytest.mark.slow
def test_selftest_as_it_is(capsys):
    assert main(["--selftest"]) == 0
    assert "13 of 13 comparisons" in capsys.readouterr().out


def test_selftest_notices_a_wrong_kernel(monkeypatch, capsys):
    from locant.attention.triton import selftest

    right = selftest._results

    def wrong(impl, *arguments):
        found = right(impl, *arguments)
        return [*found[:-1], found[-1] * 1.001] if impl == "triton" else found

    monkeypatch.setattr(selftest, "SCHEMES", ("tisa",))
    monkeypatch.setattr(selftest, "HALF_INTERPRETED", ())
    monkeypatch.setattr(selftest, "_results", wrong)
    assert main(["--selftest"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_selftest_without_the_interpreter(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET")
    assert main(["--selftest"]) == 1
    assert "Set TRITON_INTERPRET=1" in capsys.readouterr().out
    assert main([]) == 2
    assert "--selftest" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scheme": cases.build("cope:positions=4").float()}, r"not a function of the offset alone \(pair\)"),
        ({"scheme": Distant(3)}, "far rotations, which take more than one content product"),
        ({"need_weights": True}, "does not return weights"),
        ({"additive_mask": torch.zeros(9, 9)[None, None]}, "does not take additive_mask"),
        ({"k_pos": torch.arange(9) * 1000, "scheme": locant.scheme("tisa", n_heads=4)}, "positions with large gaps"),
        ({"given": cases.tensors(lq=9, lk=9)}, "from float32, bfloat16 or float16 tensors; these are torch.float64"),
        ({"given": tensors(1, 1, 1, 3, 3, 300)}, "vectors of up to 256 numbers; here they have 300"),
        (
            {"given": tensors(1, 1, 1, 3, 3, 136), "scheme": locant.scheme("huang4:clip=3", n_heads=1, head_dim=136)},
            "a tile of torch.float32 with tables of vectors holds vectors of up to 128 numbers; here they have 136",
        ),
    ],
    ids=["pair", "far", "weights", "additive", "gaps", "float64", "wide", "wide vectors"],
)
def test_what_it_refuses(change, reason):
    change = dict(change)
    given = change.pop("given", None) or cases.tensors(dtype=torch.float32)
    with pytest.raises(ValueError, match=f"impl='triton' cannot do this: .*{reason}"):
        locant.attend(*given, change.pop("scheme", None), impl="triton", **change)


def test_wide_vectors_in_bfloat16_and_without_tables_of_vectors():
    """bfloat16 has operands of 16 bits. A bias is no operand of a product."""
    wide = tensors(1, 1, 1, 3, 3, 136)
    huang4 = locant.scheme("huang4:clip=3", n_heads=1, head_dim=136)
    assert choice.triton_unsupported(prepare(*(x.bfloat16() for x in wide), huang4)) is None
    assert choice.triton_unsupported(prepare(*(x.half() for x in wide), huang4)) is not None
    assert choice.triton_unsupported(prepare(*wide, locant.scheme("tisa", n_heads=1))) is None


def test_dropout_is_refused_while_a_graph_is_captured(monkeypatch):
    """The seed is a number among the arguments: every replay would drop the same weights."""
    given = cases.tensors(dtype=torch.float32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        reasons = [choice.triton_unsupported(prepare(*given, None, dropout=p)) for p in (0.5, 0.0)]
        assert reasons == ["a CUDA graph would drop the same weights at every replay" if capturing else None, None]


def test_gpus_that_it_refuses(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: {0: (7, 5), 1: (8, 0)}[index])
    assert choice._missing_triton("cuda", 0) == ("it needs a GPU of compute capability 8.0 or later; this one has 7.5")
    assert choice._missing_triton("cuda", 1) is None
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert choice._missing_triton("cuda", 1) == "it runs on GPUs of NVIDIA, and this torch is for those of AMD"
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # fake tensors
    assert choice._missing_triton("cuda", 0) is None


def test_without_the_interpreter_it_refuses_cpus(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="it runs on CUDA devices; on CPUs only in Triton's interpreter"):
        locant.attend(*cases.tensors(dtype=torch.float32), impl="triton")


def test_without_triton_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(triton, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"triton is not installed; pip install 'locant\[gpu\]'"):
        locant.attend(*cases.tensors(dtype=torch.float32), impl="triton")


def test_too_late_for_the_interpreter(monkeypatch):
    class Compiled:
        cache_key = "…"

    class Language:
        sum = Compiled()

    monkeypatch.setitem(sys.modules, "triton.language", Language)
    assert "set it before Python starts" in triton.missing_interpreter()


def test_auto_does_not_take_it_on_cpus():
    assert "triton" not in choice.AUTO["cpu"]
    given = cases.tensors(dtype=torch.float32)
    assert choice.choose(prepare(*given, build_scheme("shaw", 4, 8)), "auto").name != "triton"


def test_nothing_imports_triton_before_the_first_call():
    code = """
import sys, torch, locant
q, k, v = (torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3))
locant.attend(q, k, v, locant.scheme("huang4:clip=8", n_heads=2, head_dim=8)).sum().backward()
assert "triton" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env=os.environ)
    assert done.returncode == 0, done.stderr
