"""`local`: a limit on the distance, and the first token, which no limit hides."""

import pytest
import torch

import locant
from tests import cases


def weights(spec, length=9, **how):
    scheme = locant.scheme(spec, n_heads=4, head_dim=8, d_model=32).double()
    q, k, v = cases.tensors(lq=length, lk=length, dtype=torch.float64)
    return locant.attend(q, k, v, scheme, need_weights=True, impl="eager", **how)[1]


def test_weights_beyond_the_window_are_exactly_0_but_for_the_first_token():
    found = weights("local:window=2").ne(0).all(0).all(0)
    place = torch.arange(9)
    near = (place[:, None] - place).abs() <= 2
    assert torch.equal(found, near | (place == 0) | (place == 0)[:, None])
    assert torch.equal(weights("local:window=2,first=false").ne(0).all(0).all(0), near)


def test_it_equals_a_window_of_attend():
    given = cases.tensors(lq=9, lk=9, dtype=torch.float64)
    scheme = locant.scheme("local:window=2,first=false")
    torch.testing.assert_close(
        locant.attend(*given, scheme, impl="eager"), locant.attend(*given, window=2, impl="eager"), rtol=0, atol=0
    )


def test_the_first_token_is_the_one_at_position_0():
    pos = torch.tensor([0, 5, 9, 12, 30])
    found = weights("local:window=4", 5, q_pos=pos, k_pos=pos).ne(0).all(0).all(0)
    assert found.tolist() == [[True] * 5, [True, True, True, False, False], [True, True, True, True, False],
                              [True, False, True, True, False], [True, False, False, False, True]]  # fmt: skip
    assert not weights("local:window=4", 5, q_pos=pos + 50, k_pos=pos + 50)[:, :, 4, :4].any()


@pytest.mark.parametrize("impl", ["fused", "sdpa", "flex"])
def test_long_sequences_are_the_same_in_all_back_ends(impl):
    scheme = locant.scheme("tisa:kernels=3+local:window=100", n_heads=4, head_dim=8, d_model=32)
    q, k, v = cases.tensors(lq=700, lk=700, dtype=torch.float32)
    truth = locant.attend(q.double(), k.double(), v.double(), scheme.double(), impl="eager")
    with torch.no_grad():
        found = locant.attend(q, k, v, scheme.float(), impl=impl)
    torch.testing.assert_close(found.double(), truth, rtol=0, atol=2e-6)


def test_a_softcap_would_show_hidden_keys_and_is_refused():
    given = cases.tensors(lq=9, lk=9)
    for spec in ("local", "alibi+local:window=3"):
        with pytest.raises(ValueError, match="a softcap of 30 would show them again"):
            locant.attend(*given, locant.scheme(spec, n_heads=4, head_dim=8, d_model=32), softcap=30.0)


def test_a_long_text_in_one_pass_is_read_as_its_neighbourhoods():
    """A change of a token reaches at most window · layers tokens, and all of them through the first token."""
    from tests.hf_models import make

    model = make("bert").eval()
    locant.swap(model, "alibi+local:window=2,first=false")
    layers = model.config.num_hidden_layers
    ids = torch.randint(5, 60, (1, 24))
    other = ids.clone()
    other[0, 10] = 4
    with torch.no_grad():
        changed = (model(ids).last_hidden_state != model(other).last_hidden_state).any(-1)[0]
    reached = torch.arange(24)[changed]
    assert (reached.min(), reached.max()) == (10 - 2 * layers, 10 + 2 * layers)
    locant.swap(model, "alibi+local:window=2")
    with torch.no_grad():
        assert (model(ids).last_hidden_state != model(other).last_hidden_state).any(-1).all() == (layers > 1)
