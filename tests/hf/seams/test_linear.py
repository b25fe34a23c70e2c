"""Falcon, Bloom and MPT, observed: what their own attention computes in the cases that masks do not cover."""

import pytest
import torch
from transformers import DynamicCache

from locant.hf.seam import through_seam
from tests.seam_models import inputs, make

KINDS = ["falcon", "falcon, groups of heads", "falcon, alibi", "bloom", "mpt"]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_one_more_token_sees_all_that_are_cached(kind):
    model, ids = make(kind), inputs(kind)["input_ids"]

    def steps():
        cache, found = DynamicCache(config=model.config), []
        for first, last in ((0, 4), (4, 5), (5, 6)):
            out = model(input_ids=ids[:, first:last], past_key_values=cache, use_cache=True)
            found.append(out.last_hidden_state)
        return torch.cat(found, 1)

    before = steps()
    with through_seam(model):
        assert torch.equal(steps(), before)
    torch.testing.assert_close(before, model(input_ids=ids[:, :6]).last_hidden_state, rtol=0, atol=1e-5)


@torch.no_grad()
def test_falcon_without_a_mask_is_causal_and_one_more_token_sees_all_that_are_cached():
    """Its model makes a mask in any case; other callers of its attention need not. "Causal" counts from the first key,
    so that it would hide all others from one token."""
    model = make("falcon", attn_implementation="sdpa")
    attention, x = model.h[0].self_attention, torch.randn(1, 4, 32)

    def steps():
        cache, found = DynamicCache(config=model.config), []
        for first, last in ((0, 3), (3, 4)):
            turns = model.rotary_emb(x, torch.arange(first, last)[None])
            given = {"alibi": None, "attention_mask": None, "layer_past": cache, "position_embeddings": turns}
            found.append(attention(x[:, first:last], **given)[0])
        return torch.cat(found, 1)

    before = steps()
    with through_seam(model):
        assert torch.equal(steps(), before)
    x[:, 1] += 1
    assert ((steps() - before).abs().amax(-1) > 1e-4).tolist() == [[False, True, True, True]]


@pytest.mark.parametrize("kind", ["falcon", "falcon, alibi"])
@torch.no_grad()
def test_falcon_leaves_sdpa_where_weights_are_asked_for(kind):
    model, given = make(kind, attn_implementation="sdpa"), inputs(kind, padding="right")
    before = model(**given, output_attentions=True).attentions
    with through_seam(model):
        observed = model(**given, output_attentions=True).attentions
        assert model(**given).attentions is None
    assert len(before) == 2
    assert all(torch.equal(one, other) for one, other in zip(observed, before, strict=True))
