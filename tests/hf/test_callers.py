"""What callers do with swapped models that few models expect: each is right, or refused in words."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, BigBirdConfig, BigBirdForCausalLM

import locant
from locant.hf.support import support_of
from tests.hf.test_softcap_and_sinks import make as with_sinks
from tests.hf_models import make, output, spread


def big_bird():
    config = BigBirdConfig(
        vocab_size=60, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=40, attention_type="original_full", is_decoder=True, add_cross_attention=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return BigBirdForCausalLM(config).eval()


def test_bigbird_that_reads_an_encoder_is_refused_and_is_as_it_was_through_its_seam():
    """transformers gives its self-attention the states of the encoder; a bool mask of theirs would hide nothing."""
    model = big_bird()
    given = {
        "input_ids": torch.randint(3, 60, (2, 9)),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "encoder_attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3]),
    }
    with torch.no_grad():
        before = model(**given).logits
        locant.swap(model, locant.native(model))
        with pytest.raises(NotImplementedError, match="states of an encoder in its self-attention"):
            model(**given)
        locant.swap(model, "native")
        assert torch.equal(model(**given).logits, before)


@pytest.mark.parametrize("spec", ["native", "learned:length=40", "tisa"])
def test_roberta_refuses_positions_below_its_first(spec):
    """Its positions start at 2. Lower ones would be tokens without a position."""
    model = make("roberta")
    locant.swap(model, locant.native(model) if spec == "native" else spec)
    ids = torch.randint(3, 40, (2, 8))
    for first in (0, 1):
        with pytest.raises(ValueError, match="start at 2, and padding has 1"):
            output(model, input_ids=ids, position_ids=torch.arange(first, first + 8)[None])
    plain = output(model, input_ids=ids)
    torch.testing.assert_close(output(model, input_ids=ids, position_ids=torch.arange(2, 10)[None]), plain)
    padded = torch.cat([torch.ones(2, 3, dtype=torch.long), ids], 1)
    places = torch.cat([torch.ones(3, dtype=torch.long), torch.arange(2, 10)])[None]
    mask = padded.ne(1).long()
    torch.testing.assert_close(
        output(model, input_ids=padded, position_ids=places, attention_mask=mask)[:, 3:], plain, rtol=1e-4, atol=1e-5
    )


def test_a_scheme_that_is_swapped_in_in_inference_mode_can_be_trained():
    model = make("llama")
    with torch.inference_mode():
        locant.swap(model, "tisa")
    spread(model)
    output_with_gradient = model(input_ids=torch.randint(3, 40, (1, 8)))[0]
    output_with_gradient.square().sum().backward()
    schemes = [weight for name, weight in model.named_parameters() if "locant" in name]
    assert schemes
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in schemes)
    locant.swap(model, "rope")


def test_doctor_knows_what_fit_refuses():
    assert support_of(make("llama")).not_fitted == ""
    assert "sinks" in support_of(with_sinks("gpt_oss")).not_fitted
    assert support_of(AutoModel.from_config(AutoConfig.for_model("mamba", hidden_size=32))).not_fitted == "needs a swap"
