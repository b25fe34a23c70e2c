"""The reference back end: its slices of the queries, which bound the memory, and no slice changes a result."""

import pytest
import torch

import locant
from locant.attention import eager
from locant.attention.request import prepare
from locant.terms import Far
from tests import cases

GAPS = torch.tensor([0, 1, 500, 2000, 9000])
CASES = {  # spec, positions, whether every pair of a slice has a vector of D numbers
    "no terms": ("nope", None, False),
    "bias": ("tisa", None, False),
    "bias and gaps": ("tisa", GAPS, False),
    "scalar gain": ("huang1:clip=3", None, False),
    "vectors of offsets": ("xl", None, False),
    "vectors of pairs": ("xl", GAPS, True),
    "vector gain": ("huang3:clip=3", None, True),
    "pair": ("cope:positions=4", None, True),
}


@pytest.mark.parametrize("rows", [1, 2, 3, 100])
@pytest.mark.parametrize("kind", CASES)
def test_slices_are_as_large_as_the_limit_allows(kind, rows, monkeypatch):
    spec, pos, vectors = CASES[kind]
    q, k, v = cases.tensors(lq=5, lk=5)
    request = prepare(q, k, v, cases.build(spec), q_pos=pos, k_pos=pos)
    row = 2 * 4 * 5 * (8 if vectors else 1)  # batch, heads, keys, head size
    for more in (0, row - 1):
        monkeypatch.setattr(eager, "CHUNK", rows * row + more)
        slices = list(eager._slices(request))
        assert slices == [slice(start, min(start + rows, 5)) for start in range(0, 5, rows)]
    monkeypatch.setattr(eager, "CHUNK", 1)  # a slice has at least one row
    assert list(eager._slices(request)) == [slice(i, i + 1) for i in range(5)]


@pytest.mark.parametrize("lq", [2, 3])
@pytest.mark.parametrize(
    "spec", ["tisa", "huang3:clip=3", "shaw:clip=3", "cope:positions=4", "rope+fire:width=6,length=4"]
)
def test_no_slice_changes_a_result(spec, lq, monkeypatch):
    """Output, weights and gradients, row by row and all at once, for a mask of every shape."""
    scheme, tensors = cases.build(spec), [x.requires_grad_() for x in cases.tensors(lq=lq, lk=4)]
    masks = [None, *(torch.rand(shape) < 0.6 for shape in ((2, 1, 1, 4), (1, 1, lq, 4), (1, 4, lq, 4), (2, 4, lq, 4)))]
    for mask in masks:
        for causal in (False, True):
            found = []
            for chunk in (2**24, 1):
                monkeypatch.setattr(eager, "CHUNK", chunk)
                out, weights = locant.attend(
                    *tensors, scheme, mask=mask, causal=causal, impl="eager", need_weights=True
                )
                grads = torch.autograd.grad(
                    (out.sin().sum() + weights.square().sum()), [*tensors, *scheme.parameters()], allow_unused=True
                )
                found.append((out, weights, *grads))
            for whole, sliced in zip(*found, strict=True):
                torch.testing.assert_close(sliced, whole)


@pytest.mark.parametrize("step", [1, 5000], ids=["near", "far"])
@pytest.mark.parametrize(
    "other", ["alibi", "huang1:clip=3", "huang3:clip=3", "huang4:clip=3", "shaw:clip=3", "xl", "cope:positions=4"]
)
def test_every_term_beside_a_rotation_that_widens_to_float64(other, step):
    """xpos over a wide span makes the product float64; tables stay float32, and the result has the dtype of q."""
    scheme = cases.build(f"xpos+{other}").float().requires_grad_(False)
    tensors, pos = cases.tensors(lq=5, lk=5, dtype=torch.float32), torch.arange(5) * step
    out, weights = locant.attend(*tensors, scheme, q_pos=pos, k_pos=pos, causal=True, impl="eager", need_weights=True)
    assert out.dtype == weights.dtype == torch.float32
    truth = locant.attend(
        *(x.double() for x in tensors), scheme.double(), q_pos=pos, k_pos=pos, causal=True, impl="eager"
    )
    torch.testing.assert_close(out, truth.float(), rtol=1e-4, atol=1e-5)


class Wide(locant.Scheme):
    """A logit of each pair in a dtype of its own."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def terms(self, r):
        def pair(q, k, q_pos, k_pos, **_):
            return -(q_pos[:, None, :, None] - k_pos[:, None, None, :]).abs().to(self.dtype)

        return locant.Terms(pair=pair)


@pytest.mark.parametrize("impl", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_logit_of_a_pair_may_have_any_dtype(dtype, impl):
    """torch's kernel refuses a mask in another dtype than float32 or that of the queries."""
    q, k, v = cases.tensors(dtype=torch.float32)
    distance = (torch.arange(9)[:, None] - torch.arange(9)).abs()
    expected = torch.softmax(q @ k.mT * 8**-0.5 - distance, dim=-1) @ v
    torch.testing.assert_close(locant.attend(q, k, v, Wide(dtype), impl=impl), expected, rtol=1e-4, atol=1e-5)


class Widening(locant.Scheme):
    """Near pairs are rotated in float64, far ones in the dtype of q."""

    def rotate(self, q, k, q_pos, k_pos):
        return q.double(), k.double()

    def rotate_far(self, q, k, q_pos, k_pos):
        return Far(2, 2 * q, 3 * q, k)


def test_near_pairs_may_widen_where_far_ones_do_not():
    q, k, v = cases.tensors(dtype=torch.float32)
    r = torch.arange(9) - torch.arange(9)[:, None]
    factor = torch.where(r < -2, 2, torch.where(r > 2, 3, 1))
    expected = torch.softmax(factor * (q @ k.mT) * 8**-0.5, dim=-1) @ v
    out = locant.attend(q, k, v, Widening(), impl="eager")
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
