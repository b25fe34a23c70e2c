"""Gradients of gradients through the fused kernel."""

import copy

import pytest
import torch

import locant
from locant.attention.build import build
from tests import cases

pytestmark = pytest.mark.skipif(build().library is None, reason="no kernel here; returns with a C compiler")

HOW = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "mask": {"mask": torch.arange(9) < torch.tensor([[9], [6]])},
    "softcap": {"softcap": 2.0},
}


def second(scheme, tensors, sinks, impl, how):
    """The gradients of a function of all first gradients, by everything."""
    given = [x.detach().requires_grad_() for x in tensors]
    everything = [*given, *scheme.parameters(), sinks]
    out = locant.attend(*given, scheme, sinks=sinks, impl=impl, **how)
    first = torch.autograd.grad((out**3).sum(), everything, create_graph=True)
    weights = torch.Generator().manual_seed(5)
    total = sum((x.tanh() * torch.randn(x.shape, generator=weights).to(x)).sum() for x in first)
    return torch.autograd.grad(total, everything)


@pytest.mark.parametrize("how", list(HOW))
@pytest.mark.parametrize("spec", ["nope", "tisa", "huang4:clip=3", "rope+huang3:clip=3", "rope+shaw:clip=3"])
def test_equals_eager_in_float64(spec, how):
    scheme, tensors = cases.build(spec).float(), cases.tensors(kv=2, dtype=torch.float32)
    sinks = torch.randn(4, requires_grad=True)
    found = second(scheme, tensors, sinks, "fused", HOW[how])
    exact = second(
        copy.deepcopy(scheme).double(), [x.double() for x in tensors], sinks.detach().double().requires_grad_(),
        "eager", HOW[how],
    )  # fmt: skip
    for x, y in zip(found, exact, strict=True):
        assert (x - y).abs().max() <= 2e-5 * y.abs().max().clamp(min=1e-3)


def test_eager_itself_by_finite_differences():
    scheme, given = cases.build("tisa"), [x.requires_grad_() for x in cases.tensors(b=1, lq=2, lk=2)]
    assert torch.autograd.gradgradcheck(
        lambda q, k, v: locant.attend(q, k, v, scheme, causal=True, impl="eager"), given
    )


def test_dropout_drops_the_same_weights():
    """The second derivative along a direction, from differences of the first one, with the same seed."""
    scheme, (q, k, v) = cases.build("tisa").float(), cases.tensors(dtype=torch.float32)
    torch.manual_seed(1)
    step = torch.randn_like(q)

    def gradient(q, create_graph):
        torch.manual_seed(3)
        out = locant.attend(q, k, v, scheme, dropout=0.4, impl="fused")
        return torch.autograd.grad((out**2).sum(), q, create_graph=create_graph)[0]

    q.requires_grad_()
    found = (torch.autograd.grad(gradient(q, True).square().sum(), q)[0] * step).sum()
    up, down = (
        gradient((q + s * 3e-3 * step).detach().requires_grad_(), False).double().square().sum() for s in (1, -1)
    )
    torch.testing.assert_close(found.double(), (up - down) / 6e-3, rtol=2e-3, atol=1e-3)


def test_a_third_derivative():
    scheme, tensors = cases.build("tisa").float(), cases.tensors(b=1, dtype=torch.float32)
    results = []
    for impl in ("fused", "eager"):
        q, k, v = (x.detach().requires_grad_() for x in tensors)
        found = (locant.attend(q, k, v, scheme, impl=impl) ** 3).sum()
        for _ in range(2):
            found = torch.autograd.grad(found, q, create_graph=True)[0].square().sum()
        results.append(torch.autograd.grad(found, (q, k, scheme.amplitude)))
    for x, y in zip(*results, strict=True):
        assert (x - y).abs().max() <= 1e-4 * y.abs().max()


def test_only_some_inputs():
    scheme, (q, k, v) = cases.build("tisa").float().requires_grad_(False), cases.tensors(dtype=torch.float32)
    q.requires_grad_()
    found = []
    for impl in ("fused", "eager"):
        (first,) = torch.autograd.grad(locant.attend(q, k, v, scheme, impl=impl).square().sum(), q, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), q)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
