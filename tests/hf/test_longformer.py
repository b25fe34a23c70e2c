"""Longformer and LED: a window of tokens and global tokens, as a mask."""

import pytest
import torch
from transformers import LEDConfig, LEDForConditionalGeneration, LongformerConfig, LongformerForMaskedLM

import locant
from locant.hf import interface
from locant.hf.seam import through_seam
from tests.hf_models import spread

LENGTH = 21
"""No multiple of a window: transformers pads it."""


def make(kind):
    torch.manual_seed(0)
    if kind == "longformer":
        config = LongformerConfig(
            vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=64, attention_window=[4, 6], initializer_range=0.4,
        )  # fmt: skip
        return LongformerForMaskedLM(config).eval()
    config = LEDConfig(
        vocab_size=60, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64, attention_window=[4, 6], dropout=0.0, init_std=0.4,
    )  # fmt: skip
    return LEDForConditionalGeneration(config).eval()


def given(kind, *, global_tokens):
    torch.manual_seed(1)
    ids = torch.randint(3, 60, (2, LENGTH))
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind == "led":
        found["decoder_input_ids"] = ids[:, :7]
    found["attention_mask"][1, 15:] = 0
    if global_tokens:
        marks = torch.zeros_like(ids)
        marks[:, 0] = marks[0, 7] = 1
        found["global_attention_mask"] = marks
    return found


@pytest.mark.parametrize("global_tokens", [False, True])
@pytest.mark.parametrize("kind", ["led", "longformer"])
def test_its_own_positions_as_a_scheme_change_nothing(kind, global_tokens):
    model, inputs = make(kind), given(kind, global_tokens=global_tokens)
    shown = inputs["attention_mask"].bool() if kind == "longformer" else ...  # LED's outputs are its decoder's
    with torch.no_grad():
        before = model(**inputs).logits

        def distance():
            return (model(**inputs).logits - before)[shown].abs().max() / before.abs().max()

        with through_seam(model):
            assert distance() <= 2e-6
        locant.swap(model, locant.native(model))
        assert distance() <= 2e-6
        locant.swap(model, "native")
        assert torch.equal(model(**inputs).logits, before)


@pytest.mark.parametrize("kind", ["led", "longformer"])
def test_a_scheme_acts_within_the_window_and_on_global_tokens(kind):
    """The weights of the first layer, by hand: a bias, a window of 2 tokens on each side, global tokens."""
    model, inputs = make(kind), given(kind, global_tokens=True)
    spread(locant.swap(model, "tisa"))
    marks, shown = inputs["global_attention_mask"].bool(), inputs["attention_mask"].bool()
    stack = model.base_model.encoder
    layer = stack.layers[0].self_attn.longformer_self_attn if kind == "led" else stack.layer[0].attention.self
    states = []
    layer.query.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    with torch.no_grad():
        found = model(**inputs, output_attentions=True)
    weights = (found.encoder_attentions if kind == "led" else found.attentions)[0]
    offsets = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
    bias = interface.scheme_of(layer).terms(torch.arange(-LENGTH + 1, LENGTH)).bias.detach()[:, offsets + LENGTH - 1]

    def logits(query, key):
        parts = (one(states[0]).view(2, LENGTH, 2, 8).transpose(1, 2) for one in (query, key))
        return torch.einsum("bhid,bhjd->bhij", *parts) / 8**0.5 + bias

    own = logits(layer.query, layer.key).masked_fill(~((offsets.abs() <= 2) | marks[:, None, None, :]), -torch.inf)
    every = logits(layer.query_global, layer.key_global)
    wanted = torch.where(marks[:, None, :, None], every, own)
    wanted = wanted.masked_fill(~shown[:, None, None, :], -torch.inf).softmax(-1)
    rows = shown[:, None, :, None].expand_as(weights)
    assert torch.allclose(weights[rows], wanted[rows], atol=2e-6)
