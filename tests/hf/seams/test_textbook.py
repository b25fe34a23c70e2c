"""BigBird with an encoder's states, which transformers gives to its self-attention too."""

import pytest
import torch

import locant
from locant.hf.seam import through_seam
from tests.hf_models import output
from tests.seam_models import inputs, make_more


def test_big_bird_with_the_states_of_an_encoder_runs_as_it_is_and_cannot_be_swapped():
    model = make_more("big_bird", is_decoder=True, add_cross_attention=True)
    given = inputs("big_bird", padding="right")
    given["encoder_hidden_states"] = torch.randn(2, 5, 32)
    given["encoder_attention_mask"] = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    before = output(model, **given)
    with through_seam(model):
        assert torch.equal(output(model, **given), before)
    locant.swap(model, "alibi")
    with pytest.raises(NotImplementedError, match="got states of an encoder in its self-attention"):
        output(model, **given)
