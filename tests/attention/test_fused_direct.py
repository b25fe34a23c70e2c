"""A decoding step that gives the kernel pointers equals the operator, bit for bit, and leaves other calls to it."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import locant
from locant.attention import build, fused, fused_direct
from locant.attention.request import prepare
from locant.attention.sides import Remembered
from tests import cases
from tests.attention.test_fused import build_scheme, tensors
from tests.attention.test_fused_sides import Distant, Vectors

pytestmark = pytest.mark.skipif(
    build.build().library is None, reason=f"no kernel here: {build.build().why}; returns with a C compiler"
)
KEYS = 530
SPECS = [
    "nope", "tisa", "t5", "toeplitz:clip=3", "huang1:clip=3,heads=shared", "huang4:clip=3,heads=own", "shaw:clip=3",
    "xl", "rope+huang4:clip=3", "rope+alibi", "logn", "grape", "fox", "fox:two_sided=true", "inkling:extent=40,width=3",
    "inkling:extent=40,width=16,alpha=0.1,n0=4",
]  # fmt: skip


@pytest.fixture
def operators(monkeypatch):
    """Counts the calls of the operator."""
    calls, original = [], fused.forward
    monkeypatch.setattr(fused, "forward", lambda *args: calls.append(1) or original(*args))
    return calls


def same(scheme, given, operators, **how):
    """Compares the two ways, without gradients."""
    with torch.no_grad():
        x = torch.randn(given[0].shape[0], given[1].shape[2], cases.D_MODEL) if scheme.reads else None
        request = prepare(*given, scheme, x=x, **how)
        found, _ = fused_direct.attend(request)
        assert not operators
        wanted, _ = fused.attend(request)
        assert operators
    assert torch.equal(found, wanted)
    assert found.dtype == wanted.dtype == given[0].dtype
    assert found.transpose(1, 2).is_contiguous()
    operators.clear()


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_every_term(spec, queries, operators):
    torch.manual_seed(0)
    scheme = cases.build(spec).float()
    given = tensors(2, 4, 4, queries, KEYS, 8)
    same(scheme, given, operators, causal=True)
    far = {"q_pos": torch.arange(queries) + 700, "k_pos": torch.arange(KEYS) + 3}
    if not scheme.reads:
        same(scheme, given, operators, causal=True, **far)
        same(scheme, given, operators, **{name: x.repeat(2, 1) for name, x in far.items()})


HOW = {
    "mask": {"mask": torch.arange(KEYS) < torch.tensor([[KEYS], [90]])},
    "mask by head": {"mask": (torch.arange(4 * KEYS) % 7 != 3).view(1, 4, 1, KEYS)},
    "mask by query": {"mask": (torch.arange(3 * KEYS) % 5 != 3).view(3, KEYS)},
    "window": {"window": (40, 0)},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.tensor([0.0, 1.0, -torch.inf, 3.0])},
    "sinks in double": {"sinks": torch.tensor([0.0, 1.0, -torch.inf, 3.0], dtype=torch.float64)},
    "scale": {"scale": 0.7},
    "strided positions": {"q_pos": torch.arange(6)[::2] + KEYS, "k_pos": torch.arange(2 * KEYS).view(-1, 2)[:, 0]},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv", [1, 2, 4])
@pytest.mark.parametrize("how", HOW)
def test_every_argument(how, kv, dtype, operators):
    torch.manual_seed(1)
    scheme = build_scheme("tisa+rope+huang4:clip=9", 4, 8)
    same(scheme, tensors(2, 4, kv, 3, KEYS, 8, 11, dtype=dtype), operators, **HOW[how])


def test_strides(operators):
    torch.manual_seed(2)
    scheme = build_scheme("tisa", 4, 8)
    for layout in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.mT.contiguous().mT,
        lambda x: x[:1].expand(2, -1, -1, -1),
        lambda x: x[:, :, :1].expand_as(x),
    ):
        same(scheme, [layout(x) for x in tensors(2, 4, 4, 2, KEYS, 8)], operators)


@pytest.mark.parametrize(("query", "keys"), [(0, (0, 5, 2**62)), (2**62, (0, 1, 2**61))])
def test_without_a_window_no_key_is_too_far_away(query, keys, operators):
    """Not at the largest and the smallest offset either."""
    torch.manual_seed(4)
    scheme, given = build_scheme("toeplitz:clip=3", 4, 8), tensors(1, 4, 4, 1, 3, 8)
    where = {"q_pos": torch.tensor([query]), "k_pos": torch.tensor(keys)}
    same(scheme, given, operators, **where)
    with torch.no_grad():
        found, truth = (locant.attend(*given, scheme, impl=impl, **where) for impl in ("fused", "eager"))
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Own(torch.Tensor):
    """A tensor of another class."""


def test_calls_that_need_the_operator(operators):
    torch.manual_seed(3)
    scheme = build_scheme("tisa", 4, 8)
    q, k, v = tensors(1, 4, 4, 1, KEYS, 8)

    def by_operator(*given, scheme=scheme, **how):
        before = len(operators)
        locant.attend(*given, scheme, impl="fused", **how)
        return len(operators) > before

    assert by_operator(q, k, v)  # gradients are enabled
    with torch.no_grad():
        assert not by_operator(q, k, v)
        assert not by_operator(q.expand(1, 4, 4, 8), k, v)
        assert by_operator(q.expand(1, 4, 5, 8), k, v)
        assert by_operator(q, k, v, dropout=0.5)
        assert by_operator(q, k, v, scheme=build_scheme("huang3:clip=3", 4, 8))
        assert by_operator(q, k, v, scheme=Distant(3))
        assert by_operator(q, k, v, scheme=Vectors(None, 3, heads=4))
        assert by_operator(torch._neg_view(q), k, v)
        assert by_operator(q, k.as_subclass(Own), v)
        with Mode():
            assert by_operator(q, k, v)


def test_a_query_with_a_negative_bit_is_read_right():
    q, k, v = tensors(1, 2, 2, 1, 40, 8)
    with torch.no_grad():
        wanted = locant.attend(-q, k, v, None, impl="fused")
        assert torch.equal(locant.attend(torch._neg_view(q), k, v, None, impl="fused"), wanted)


def test_the_limits_are_those_of_the_kernel():
    source = Path(fused.__file__).with_name("fused.c").read_text()
    for name in ("FEW_QUERIES", "FEW_ROWS"):
        assert int(re.search(rf"#define {name} (\d+)", source)[1]) == getattr(fused_direct, name)


def test_no_memory_is_an_error(monkeypatch):
    monkeypatch.setattr(fused_direct, "_kernel", lambda: lambda call: 1)
    with torch.no_grad(), pytest.raises(MemoryError, match="for 40 keys"):
        locant.attend(*tensors(1, 2, 2, 1, 40, 8), build_scheme("tisa", 2, 8), impl="fused")


def test_remembered_states(operators):
    """As a swapped model passes them: views of a longer cache."""
    scheme = cases.build("inkling:extent=9,width=3+fox").float()
    read = scheme.read(torch.randn(2, KEYS + 9, cases.D_MODEL)).detach()[:, :, :KEYS]
    given = tensors(2, 4, 4, 1, KEYS, 8)
    with torch.no_grad():
        x = Remembered(read[:, :, -1:], read)
        found = locant.attend(*given, scheme, causal=True, x=x)
        assert not operators
        truth = locant.attend(*(y.double() for y in given), scheme.double(), causal=True, x=x, impl="eager")
    torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=2e-5)
