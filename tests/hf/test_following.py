"""What a swapped model passes down to its attention."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import locant
from tests.seam_models import inputs, make


@pytest.mark.parametrize("kind", ["gptj", "gpt_neo", "bloom", "codegen", "xglm"])
@torch.no_grad()
def test_weights_that_the_config_asks_for_are_returned_by_a_model_with_a_head(kind):
    """The head passes output_attentions=None on."""
    model, given = make(kind, AutoModelForCausalLM, output_attentions=True), inputs(kind)
    before = model(**given).attentions
    locant.swap(model, locant.native(model))
    for one, other in zip(model(**given).attentions, before, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert not model(**given, output_attentions=False).attentions
