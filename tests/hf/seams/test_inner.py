"""Seams that replace a method of an attention class: what a module's own settings change."""

import pytest
import torch

import locant
from locant.hf.seam import through_seam
from tests.hf.test_swapping import EXACT
from tests.hf_models import output
from tests.seam_models import inputs, make, make_more


@pytest.mark.parametrize("scaled", [True, False])
def test_openai_gpt_scales_its_logits_or_not(scaled):
    model, given = make_more("openai-gpt"), inputs("openai-gpt", padding="right")
    for block in model.h:
        block.attn.scale = scaled
    before, real = output(model, **given), given["attention_mask"].bool()
    with through_seam(model):
        assert torch.equal(output(model, **given), before)
    locant.swap(model, locant.native(model))
    torch.testing.assert_close(output(model, **given)[real], before[real], **EXACT)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("by_layer", [True, False])
def test_imagegpt_scales_its_logits_or_not(scaled, by_layer):
    model = make("imagegpt", scale_attn_weights=scaled, scale_attn_by_inverse_layer_idx=by_layer)
    given = inputs("imagegpt")
    before = output(model, **given)
    locant.swap(model, locant.native(model))
    torch.testing.assert_close(output(model, **given), before, **EXACT)
