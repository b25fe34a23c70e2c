"""Modules beside the attention that receive rotary positions: those that ignore them, and those that use them."""

import pytest
import torch
from torch import nn

import locant
from tests.hf_models import inputs, make, output


class Layer(nn.Module):
    """A layer without attention. It gets what Llama gives to all of its layers."""

    def __init__(self, use):
        super().__init__()
        self.use, self.scale = use, nn.Linear(32, 32)

    def forward(self, hidden_states, position_embeddings=None, **others):
        return hidden_states + self.scale(hidden_states) + self.use(*position_embeddings, **others)


def hybrid(use):
    """A Llama model whose second layer is not one of attention."""
    model = make("llama")
    model.layers[1] = Layer(use)
    return model


@pytest.mark.parametrize(
    "use",
    [
        lambda cos, sin, **others: 0.0,
        lambda cos, sin, **others: 0.1 * torch.ones(cos.shape[1], 1),
        lambda cos, sin, position_ids, **others: 0.1 * position_ids[..., None],  # no rotation, and not ours to judge
    ],
    ids=["nothing", "lengths", "numbers"],
)
def test_a_layer_that_ignores_the_rotations_it_gets_is_left_alone(use):
    """Layers of hybrids get rotations for nothing."""
    model, given = hybrid(use), inputs("llama")
    before = output(model, **given)
    found = locant.native(model)
    assert str(found).startswith("rotary: rope:theta=10000")
    assert len(found.stacks[0].layers) == 1
    torch.testing.assert_close(output(locant.swap(model, found), **given), before, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "use",
    [
        lambda cos, sin, **others: cos.repeat(1, 1, 4),
        lambda cos, sin, **others: sin.repeat(1, 1, 4),
        lambda cos, sin, **others: 1e-3 * (cos * sin).sum(-1, keepdim=True),
    ],
    ids=["cos", "sin", "both, a little"],
)
def test_a_layer_that_uses_the_rotations_is_noticed(use):
    with pytest.raises(NotImplementedError, match=r"Layer uses rotary positions too, beside rotary_emb"):
        locant.native(hybrid(use))


def test_a_layer_that_cannot_be_run_by_itself_counts_as_one_that_uses_them():
    """Nobody knows what it does with them."""

    def use(cos, sin, past_key_values=None, **others):
        return 0.0 * past_key_values.get_seq_length()  # None outside the model

    with pytest.raises(NotImplementedError, match="Layer uses rotary positions too"):
        locant.native(hybrid(use))


def test_a_layer_gets_no_cache_when_it_is_run_by_itself():
    """It would be filled a second time."""
    caches = []

    def use(cos, sin, past_key_values=None, **others):
        caches.append(past_key_values)
        return 0.0

    locant.native(hybrid(use))
    assert caches.count(None) == 2  # with the rotations, and without
    assert len(caches) > 2
