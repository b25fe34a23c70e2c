"""Every scheme against loops over (i, j) that share no code with it, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import locant
from tests import cases, frontier_cases, oracles

EXACT = {"rtol": 1e-10, "atol": 1e-11}


def compare(scheme, q, k, v, q_pos, k_pos, **kwargs):
    """With gradients, and twice without: then tables are cached."""
    expected, expected_weights = cases.by_oracle(scheme, q, k, v, q_pos, k_pos, **kwargs)
    for grad in (True, False, False):
        with torch.set_grad_enabled(grad):
            out, weights = locant.attend(
                q, k, v, scheme, q_pos=q_pos, k_pos=k_pos, impl="eager", need_weights=True, **kwargs
            )
        torch.testing.assert_close(weights, expected_weights, **EXACT)
        torch.testing.assert_close(out, expected, **EXACT)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", cases.SPECS)
def test_consecutive_positions(spec, causal):
    pos = torch.arange(9)
    compare(cases.build(spec), *cases.tensors(), pos, pos, causal=causal)


@pytest.mark.parametrize("spec", cases.SPECS)
def test_every_kind_of_position_and_mask(spec):
    """Grouped heads; row 0 is left-padded, row 1 packs two sequences whose positions restart; a key is masked."""
    q, k, v = cases.tensors(kv=2, lq=7, lk=7)
    pos = torch.tensor([[0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 0, 1, 2]])
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    mask[0, :, :, :2] = False
    mask[1, :, :4, 4:] = mask[1, :, 4:, :4] = False
    compare(cases.build(spec), q, k, v, pos, pos, causal=True, mask=mask, scale=0.7)


@pytest.mark.parametrize("spec", cases.SPECS)
def test_cache_offset_and_wide_gaps(spec):
    q, k, v = cases.tensors(lq=2, lk=5)
    compare(cases.build(spec), q, k, v, torch.tensor([40, 41]), torch.tensor([0, 17, 39, 40, 41]), causal=True)
    compare(cases.build(spec), q, k, v, torch.tensor([-5, 900]), torch.tensor([900, -5, 0, 3, 2000]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", cases.SPECS)
def test_repeated_positions(spec, causal):
    """Visible keys at the same position, in an order that is not sorted: CoPE counts all of them for each of them."""
    q, k, v = cases.tensors(lq=5, lk=5)
    pos = torch.tensor([[4, 2, 4, 2, 4], [7, 7, 7, 0, 0]])
    compare(cases.build(spec), q, k, v, pos, pos, causal=causal)


positions = st.integers(-30, 60)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_property_any_heads_positions_and_masks(data):
    spec = data.draw(st.sampled_from(cases.NAMES))
    kv = data.draw(st.sampled_from([1, 2, 3]))
    h = kv * data.draw(st.sampled_from([1, 2]))
    lq, lk = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    if "free=2" in spec and h < 2:
        h = kv = 2
    q, k, v = cases.tensors(h=h, kv=kv, lq=lq, lk=lk)
    rows = data.draw(st.sampled_from([1, 2]))
    q_pos = torch.tensor(
        data.draw(st.lists(st.lists(positions, min_size=lq, max_size=lq), min_size=rows, max_size=rows))
    )
    k_pos = torch.tensor(
        data.draw(st.lists(st.lists(positions, min_size=lk, max_size=lk), min_size=rows, max_size=rows))
    )
    bits = data.draw(st.lists(st.booleans(), min_size=2 * lk, max_size=2 * lk))
    mask = torch.tensor(bits).reshape(2, 1, 1, lk)
    causal = data.draw(st.booleans())
    compare(cases.build(spec, n_heads=h), q, k, v, q_pos, k_pos, causal=causal, mask=mask)


@pytest.mark.parametrize(
    "spec", ["learned:length=64", "sinusoidal", "sinusoidal:theta=50", "sinusoidal:amplitude=0.02"]
)
def test_embeddings(spec):
    scheme = cases.build(spec)
    pos = torch.tensor([[0, 5, 63], [1, 1, 2]])
    got = scheme.embed(pos)
    params = {name: value.detach().numpy() for name, value in scheme.state_dict().items()}
    options = {"theta": 10000.0, "amplitude": 1.0, **scheme.options()}
    for row in range(2):
        for column in range(3):
            e = oracles.EMBEDDINGS[scheme.name()](params, options, cases.D_MODEL, int(pos[row, column]))
            torch.testing.assert_close(got[row, column], torch.from_numpy(e), **EXACT)


def test_every_scheme_has_an_oracle_and_a_case():
    """Those of 2025–26, some of which need hidden states, have theirs in `test_frontier`."""
    tested = {spec.split(":")[0] for spec in cases.SPECS}
    assert set(locant.SCHEMES) - set(frontier_cases.ORACLES) == set(oracles.ORACLES) == tested


# ---- the tests above must detect the classic mistakes -------------------------------------------

EVEN = {"alibi", "kerple", "sandwich", "huang1"}  # functions of |r|: the sign has no effect


def detects(scheme, q, k, v, **kwargs):
    pos = torch.arange(q.shape[2])
    try:
        compare(scheme, q, k, v, pos, pos, **kwargs)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("spec", [spec for spec in cases.NAMES if spec not in cases.PAIRS])
@pytest.mark.parametrize(("sign", "shift"), [(-1, 0), (1, 1), (1, -1)])
def test_a_wrong_offset_is_detected(spec, sign, shift):
    scheme = cases.build(spec)
    terms, rotate = scheme.terms, scheme.rotate
    scheme.terms = lambda r: terms(sign * r + shift)
    scheme.rotate = lambda q, k, q_pos, k_pos: rotate(q, k, sign * q_pos, sign * k_pos + shift)
    assert detects(scheme, *cases.tensors()) == (sign == 1 or scheme.name() not in EVEN)


@pytest.mark.parametrize("spec", cases.SPECS)
def test_a_wrong_scale_is_detected(spec):
    scheme = cases.build(spec)
    right = scheme.scale
    scheme.scale = lambda head_dim: 1.01 * right(head_dim)
    assert detects(scheme, *cases.tensors())
