"""Numbers that are added to the logits of every pair."""

import pytest
import torch

import locant
from locant.attention import choice, eager
from locant.attention.request import prepare
from tests import cases

SHAPES = [(2, 4, 9, 9), (1, 1, 9, 9), (2, 1, 1, 9), (9, 9), (2, 9)]


def numbers(shape, dtype=torch.float64):
    """Some of them −∞; a query of the first sequence sees nothing."""
    x = torch.randn(shape, dtype=dtype).masked_fill(torch.rand(shape) < 0.2, -torch.inf)
    if shape[-2] == 9:
        x[..., 3, :] = -torch.inf
    return x


def for_pairs(x):
    full = x if x.ndim == 4 else x[:, None, None, :] if x.shape[0] == 2 else x[None, None]
    return full.expand(2, 4, 9, 9)


def by_hand(q, k, v, added, bias, softcap=None):
    """The softmax of every query by itself, over the keys whose number is not −∞."""
    out = torch.zeros_like(q)
    for b in range(2):
        for h in range(4):
            for i in range(9):
                seen = added[b, h, i] != -torch.inf
                if not seen.any():
                    continue
                logit = k[b, h, seen] @ q[b, h, i] * 8**-0.5 + bias[h, i, seen]
                logit = logit if softcap is None else softcap * (logit / softcap).tanh()
                weight = (logit + added[b, h, i, seen]).exp()
                out[b, h, i] = (weight / weight.sum()) @ v[b, h, seen]
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("impl", "softcap"), [("eager", None), ("sdpa", None), ("eager", 1.5)])
def test_equals_the_sum_by_hand(shape, impl, softcap):
    scheme, (q, k, v), added = cases.build("alibi"), cases.tensors(), numbers(shape)
    slopes = 2.0 ** -(8 / 4 * torch.arange(1, 5, dtype=torch.float64))
    distance = (torch.arange(9)[None, :] - torch.arange(9)[:, None]).abs()
    expected = by_hand(q, k, v, for_pairs(added), -slopes[:, None, None] * distance, softcap)
    out = locant.attend(q, k, v, scheme, additive_mask=added, softcap=softcap, impl=impl)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("impl", ["eager", "sdpa"])
def test_gradients(impl):
    """Finite also where a query sees nothing."""
    scheme = cases.build("tisa")
    given = [x.requires_grad_() for x in cases.tensors()]
    added = numbers((2, 1, 9, 9)).requires_grad_()
    everything = [*given, added, *scheme.parameters()]

    def gradients(impl):
        out = locant.attend(*given, scheme, additive_mask=added, causal=True, impl=impl)
        return torch.autograd.grad(out.square().sum(), everything)

    found = gradients(impl)
    assert all(x.isfinite().all() for x in found)
    for x, y in zip(found, gradients("eager"), strict=True):
        torch.testing.assert_close(x, y)
    step = torch.randn(9, 9, dtype=torch.float64) * 1e-5
    with torch.no_grad():
        up, down = (
            locant.attend(*given, scheme, additive_mask=added + s * step, causal=True, impl="eager").square().sum()
            for s in (1, -1)
        )
    torch.testing.assert_close((found[3] * step).sum(), (up - down) / 2, rtol=1e-6, atol=1e-12)


def test_slices(monkeypatch):
    scheme, given, added = cases.build("tisa"), [x.requires_grad_() for x in cases.tensors()], numbers((2, 4, 9, 9))
    added.requires_grad_()
    runs = []
    for chunk in (eager.CHUNK, 150):
        monkeypatch.setattr(eager, "CHUNK", chunk)
        out = locant.attend(*given, scheme, additive_mask=added, impl="eager")
        runs.append([out, *torch.autograd.grad(out.square().sum(), [*given, added])])
    for x, y in zip(*runs, strict=True):
        torch.testing.assert_close(x, y)


def test_zeros_and_minus_infinity_are_a_mask():
    q, k, v = cases.tensors()
    mask = torch.rand(2, 9) < 0.6
    for spec in ("tisa", "cope:positions=4", "huang1:clip=3"):  # cope counts the keys that are visible
        scheme = cases.build(spec)
        added = torch.zeros(2, 9, dtype=torch.float64).masked_fill(~mask, -torch.inf)
        torch.testing.assert_close(
            locant.attend(q, k, v, scheme, additive_mask=added), locant.attend(q, k, v, scheme, mask=mask)
        )


def test_nan_is_not_hidden():
    q, k, v = cases.tensors()
    added = torch.zeros(9, 9, dtype=torch.float64)
    added[4, 2] = torch.nan
    out = locant.attend(q, k, v, additive_mask=added)
    assert out[:, :, 4].isnan().all()
    assert out[:, :, :4].isfinite().all()


def test_refusals():
    q, k, v = cases.tensors(dtype=torch.float32)
    with pytest.raises(TypeError, match="additive_mask= for numbers that are added to the logits"):
        locant.attend(q, k, v, mask=torch.zeros(9, 9))
    with pytest.raises(TypeError, match=r"additive_mask must hold floating-point numbers.*Pass bool masks as mask="):
        locant.attend(q, k, v, additive_mask=torch.ones(9, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"additive_mask must be \[2, 9\]"):
        locant.attend(q, k, v, additive_mask=torch.zeros(3, 9))
    for impl in ("fused", "flex"):
        with pytest.raises(ValueError, match="additive_mask"):
            locant.attend(q, k, v, additive_mask=torch.zeros(9, 9), impl=impl)
    scheme = cases.build("tisa").float()
    assert choice.choose(prepare(q, k, v, scheme, additive_mask=torch.zeros(9, 9)), "auto").name == "sdpa"
