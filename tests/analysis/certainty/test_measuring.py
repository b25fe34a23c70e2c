"""Certainty of whole models: what it covers, that it leaves the model alone, and what it refuses."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

import locant
from locant.analysis.certainty import certainty
from tests import bert, hf_models

IDS = torch.randint(3, 60, (8, 12), generator=torch.Generator().manual_seed(0))


def swapped(spec: str):
    return locant.swap(hf_models.make("bert", num_hidden_layers=1), spec)


def test_tisa_in_an_encoder():
    model = swapped("tisa:kernels=2").train()
    model.embeddings.word_embeddings.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = certainty(model, IDS, reach=6)
    assert model.training
    assert not model.embeddings.word_embeddings.weight.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (found.likelihood, found.tempered, found.sequences, found.observations) == ("attention", False, 8, 96)
    (place,) = found.places
    assert (place.place, place.parameters, place.noise) == ("layer 1", 24, None)
    assert 0 < place.determined < 24
    assert [(band.head, band.field) for band in found.bands] == [(head, "bias") for head in (1, 2, 3, 4)]
    scheme = model.encoder.layer[0].attention.self.locant
    band = found.bands[2]
    assert band.r == tuple(range(-6, 7))
    curve = scheme.terms(torch.arange(-6, 7)).bias[2].detach().double()
    weight = torch.tensor(band.weight, dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(band.value).double(), curve - (weight * curve).sum(), atol=1e-5, rtol=0)
    assert weight.tolist() == pytest.approx([(12 - abs(r)) / 114 for r in band.r])  # pairs of 12 tokens, not of 7
    assert all(low < y < high for low, y, high in zip(band.low, band.value, band.high, strict=True))
    assert all(high - low == pytest.approx(2 * 1.95996 * sd, rel=1e-4)
               for low, high, sd in zip(band.low, band.high, band.sd, strict=True))  # fmt: skip
    assert len(found.bumps) == 8
    bump = found.bumps[5]
    assert (bump.head, bump.kernel) == (3, 2)
    assert bump.amplitude == pytest.approx(scheme.amplitude[2, 1].item(), abs=1e-6)
    assert bump.offset == pytest.approx(scheme.offset[2, 1].item(), abs=1e-5)
    assert bump.low < bump.high
    assert bump.nats >= 0
    assert "24 parameters determined" in str(found)
    assert len(found.rows()) == 4 * 13


def test_a_strong_bump_is_there_and_one_without_height_is_not():
    model = swapped("tisa:kernels=2")
    scheme = model.encoder.layer[0].attention.self.locant
    with torch.no_grad():
        scheme.amplitude[:] = torch.tensor([2.0, 0.0])
        scheme.sharpness[:] = torch.tensor([0.3, 0.3])
        scheme.offset[:] = torch.tensor([-2.0, 3.0])
        for layer in (model.encoder.layer[0].attention.self.query, model.encoder.layer[0].attention.self.key):
            layer.weight.mul_(0.1)
    ids = torch.randint(3, 60, (24, 24), generator=torch.Generator().manual_seed(1))
    found = certainty(model, ids)
    assert [bump.there for bump in found.bumps] == [True, False] * 4
    assert all(band.signal > 0.8 for band in found.bands)
    assert found.bands[0].value.index(max(found.bands[0].value)) == found.bands[0].r.index(-2)
    assert min(found.bumps[0].nats, found.bumps[2].nats) > 0.01
    assert found.bumps[1].nats == 0
    more = certainty(model, ids, learned_from=100 * ids.numel())
    assert more.bands[0].sd[10] == pytest.approx(found.bands[0].sd[10] / 10, rel=0.1)


def test_the_noise_scale_needs_an_original():
    model = hf_models.spread(swapped("t5:buckets=4,max_distance=8"), 1.0)
    original = hf_models.make("bert", num_hidden_layers=1)
    found = certainty(model, IDS, original=original)
    assert found.tempered
    assert found.places[0].noise > 0
    assert original.base_model.__dict__.get("locant_plan") is None
    plain = certainty(model, IDS)
    widths = [each.bands[0].sd[3] for each in (found, plain)]
    assert widths[0] != pytest.approx(widths[1])
    first = found.buckets[0]
    assert (first.head, first.bucket) == (1, 0)
    assert sorted({each.bucket for each in found.buckets}) == [0, 1, 3]  # bucket 2 would be distance 0 to the right
    assert (first.first, first.last) == (0, 0)
    by = {each.bucket: each for each in found.buckets if each.head == 2}
    table = model.encoder.layer[0].attention.self.locant.table[1]
    assert by[3].value - by[1].value == pytest.approx((table[3] - table[1]).item(), abs=1e-5)


def test_a_table_as_it_was_initialized_is_not_certain():
    found = certainty(swapped("t5:buckets=4,max_distance=8"), IDS)
    assert all(band.signal < 0.6 and band.excluded < 0.5 for band in found.bands)


def test_vectors_of_an_encoder():
    model, original = swapped("tisa:kernels=1"), hf_models.make("bert", num_hidden_layers=1)
    found = certainty(model, IDS, original=original, likelihood="vectors")
    assert (found.likelihood, found.tempered, found.observations) == ("vectors", True, 8)
    assert len(found.bands) == 4
    with pytest.raises(ValueError, match="compares with the vectors of the original; pass original="):
        certainty(model, IDS, likelihood="vectors")


def test_a_causal_model_has_offsets_to_the_past_and_predicts_tokens():
    model = hf_models.make("gpt2", AutoModelForCausalLM, n_layer=1)
    locant.swap(model, "toeplitz:clip=2")
    found = certainty(model, IDS)
    assert (found.likelihood, found.observations) == ("tokens", 8 * 11)
    assert found.places[0].noise is not None
    assert not found.tempered
    assert found.bands[0].r == tuple(range(-11, 1))
    # rows for the future are never used, and have the prior: only the three others are determined, less the constant
    assert found.places[0].determined <= 4 * 2 + 0.1
    assert found.averages[0].head is None
    mean = torch.tensor([band.value for band in found.bands]).mean(0)
    assert found.averages[0].value == pytest.approx(mean.tolist(), abs=1e-6)


def test_masked_models_predict_masked_tokens():
    model = hf_models.make("bert", AutoModelForMaskedLM, num_hidden_layers=1, vocab_size=len(bert.tokenizer()))
    locant.swap(model, "tisa:kernels=1")
    found = certainty(model, "so it goes on and on, and then it ends. " * 40, tokenizer=bert.tokenizer(), length=16,
                      sequences=8)  # fmt: skip
    assert (found.likelihood, found.observations) == ("tokens", 8 * 2)


def test_vectors_of_a_table_are_shown_by_their_norm_and_values_have_the_prior():
    model = swapped("shaw:clip=1")
    found = certainty(model, IDS, samples=200)
    assert {band.field for band in found.bands} == {"query", "value"}
    assert all(low >= 0 for band in found.bands for low in band.low)  # quantiles of norms
    scale = 1 / math.sqrt(found.places[0].damping)
    value = next(band for band in found.bands if band.field == "value")
    assert value.sd[0] == pytest.approx(scale * math.sqrt(0.5), rel=0.5)  # of the norm of 8 normal numbers


def test_the_encoder_of_t5_has_its_own_bias():
    found = certainty(hf_models.make("t5"), IDS)
    assert [place.place for place in found.places] == ["layers 1–2"]
    assert found.buckets


def windowed(reach=None):
    model = hf_models.make("mistral", AutoModelForCausalLM, sliding_window=4, num_hidden_layers=1)
    locant.swap(model, "toeplitz:clip=15", impl="eager")
    torch.manual_seed(3)
    table = model.model.layers[0].self_attn.locant.table
    table.data = torch.randn_like(table) * 0.5
    ids = torch.randint(3, 60, (24, 16), generator=torch.Generator().manual_seed(0))
    return certainty(model.base_model, ids, likelihood="attention", reach=reach)


def test_offsets_beyond_a_window_have_no_weight():
    found = windowed()
    band = found.bands[0]
    assert band.r == (-3, -2, -1, 0)
    assert band.weight == pytest.approx([13 / 58, 14 / 58, 15 / 58, 16 / 58])
    assert sum(w * y for w, y in zip(band.weight, band.value, strict=True)) == pytest.approx(0, abs=1e-6)
    assert max(band.sd) < 0.25  # 0.5 if offsets that nothing determines were a part of the mean
    assert max(band.signal for band in found.bands) > 0.7
    assert windowed(reach=3).bands[0].sd == pytest.approx(band.sd)


def test_heads_of_a_layer_are_joint_unless_attention_is_observed():
    model = hf_models.make("gpt2", AutoModelForCausalLM, n_layer=1, n_head=2)
    attention = model.transformer.h[0].attn
    with torch.no_grad():  # two equal heads: the output depends on the sum of their biases
        for part in attention.c_attn.weight.split(attention.embed_dim, dim=1):
            part[:, attention.head_dim :] = part[:, : attention.head_dim]
        attention.c_proj.weight[attention.head_dim :] = attention.c_proj.weight[: attention.head_dim]
    locant.swap(model, "toeplitz:clip=2")
    attention.locant.table.data = torch.tensor([[0.5, -0.5, 1.0, 0.0, 0.0]] * 2)
    ids = torch.randint(3, 60, (16, 12), generator=torch.Generator().manual_seed(0))
    ratio = {}
    for likelihood in ("tokens", "attention"):
        found = certainty(model, ids, likelihood=likelihood)
        heads = sum(sd**2 for band in found.bands for sd in band.sd) / 4
        ratio[likelihood] = sum(sd**2 for sd in found.averages[0].sd) / heads
    assert ratio["tokens"] < 0.8
    assert ratio["attention"] == pytest.approx(1)
    with torch.no_grad():  # the caller's mode of gradients makes no difference
        assert certainty(model, ids, likelihood="attention").bands[0].sd == pytest.approx(found.bands[0].sd)


def test_too_many_parameters_for_one_covariance_of_all_heads():
    model = locant.swap(hf_models.make("gpt2", AutoModelForCausalLM, n_layer=1), "toeplitz:clip=300")
    ids = torch.randint(3, 60, (8, 300), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"1,200 parameters .* at most 1,024.*or likelihood='attention', under which"):
        certainty(model, ids)


def test_an_original_that_cannot_be_compared_is_refused():
    model, copied = swapped("tisa:kernels=1"), swapped("tisa:kernels=1")
    copied.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match=r"has the attention weights of the original.* Leave original out"):
        certainty(model, IDS, original=copied)
    with pytest.raises(
        ValueError, match=r"of the original are \[1, 1, 12, 12\] .* those of the model \[1, 4, 12, 12\]"
    ):
        certainty(model, IDS, original=hf_models.make("bert", num_hidden_layers=1, num_attention_heads=1))
    with pytest.raises(ValueError, match=r"vectors of the original have 16 numbers, and those of the model 32"):
        certainty(model, IDS, likelihood="vectors",
                  original=hf_models.make("bert", num_hidden_layers=1, hidden_size=16))  # fmt: skip
    with pytest.raises(ValueError, match="is not one of the 20 tokens of the original"):
        certainty(model, IDS, original=hf_models.make("bert", vocab_size=20))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_weights_without_gradients_are_refused():
    model = swapped("tisa:kernels=1")
    packed = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match="the weights of the model are quantised"):
        certainty(packed, IDS)
    with torch.inference_mode():
        made = hf_models.make("bert")
    with pytest.raises(ValueError, match=r"made inside torch.inference_mode\(\).*make or load it outside"):
        certainty(made, IDS)
    with torch.autocast("cpu"), pytest.raises(ValueError, match="call this outside autocast"):
        certainty(model, IDS)


@pytest.mark.parametrize(
    ("match", "given"),
    [
        ("reach must be a whole number of 1 or more.*got 0", {"reach": 0}),
        ("reach must be a whole number.*got 2.5", {"reach": 2.5}),
        ("learned_from must be a number of tokens above 0; got 0", {"learned_from": 0}),
        ("learned_from must be a number of tokens above 0; got -5", {"learned_from": -5}),
        ("learned_from must be a number of tokens above 0; got nan", {"learned_from": math.nan}),
        ("learned_from must be a number of tokens above 0; got '10'", {"learned_from": "10"}),
        ("samples must be 0, or a whole number of 100 or more.*got 150.5", {"samples": 150.5}),
        ("level must be above 0 and below 1.*got '0.9'", {"level": "0.9"}),
        ("token ids are cut already; leave length and sequences out", {"length": 20}),
        ("token ids are cut already; leave length and sequences out", {"sequences": 9}),
        ("as int64; got torch.float32", {"text": IDS.float()}),
        ("token -3 is not one of the 60 tokens", {"text": IDS - 6}),
    ],
)  # fmt: skip
def test_arguments_that_mean_nothing_are_refused(match, given):
    model = swapped("tisa:kernels=1")
    with pytest.raises(ValueError, match=match):
        certainty(model, given.pop("text", IDS), **given)


def test_small_vocabularies_and_models_of_images():
    model = hf_models.make("gpt2", AutoModelForCausalLM, n_layer=1, vocab_size=4)
    assert certainty(locant.swap(model, "tisa:kernels=1"), IDS % 4).likelihood == "tokens"
    with pytest.raises(ValueError, match="ViTModel does not read tokens; certainty is for models of text"):
        certainty(hf_models.make("vit"), IDS)


def test_refusals():
    model = locant.swap(hf_models.make("bert", num_hidden_layers=1), "tisa:kernels=1")
    with pytest.raises(ValueError, match="nope: no parameters in attention, so there is no learned curve"):
        certainty(hf_models.make("bert"), IDS)
    with pytest.raises(ValueError, match="nope: no parameters in attention"):  # whatever the text is
        certainty(hf_models.make("bert"), "too short")
    with pytest.raises(ValueError, match="alibi: no parameters"):
        certainty(locant.swap(hf_models.make("bert"), "alibi"), IDS)
    with pytest.raises(ValueError, match="measured on a text, got an empty text"):
        certainty(model, " ", tokenizer=bert.tokenizer())
    with pytest.raises(ValueError, match="measured on a text, got NoneType"):
        certainty(model, None)
    with pytest.raises(ValueError, match=r"the text has \d+ tokens; 48 sequences of 40 need"):
        certainty(model, "too short", tokenizer=bert.tokenizer())
    with pytest.raises(ValueError, match="found no tokenizer"):
        certainty(model, "a text")
    with pytest.raises(
        ValueError, match=r"8 or more sequences of 4 or more tokens, as int64; got torch.int64 \[2, 12\]"
    ):
        certainty(model, IDS[:2])
    with pytest.raises(ValueError, match="token 70 is not one of the 60 tokens"):
        certainty(model, IDS.masked_fill(IDS[0, 0] == IDS, 70))
    with pytest.raises(ValueError, match="likelihood must be one of auto, attention, tokens, vectors; got 'words'"):
        certainty(model, IDS, likelihood="words")
    with pytest.raises(ValueError, match="BertModel predicts no tokens; use likelihood='attention'"):
        certainty(model, IDS, likelihood="tokens")
    with pytest.raises(ValueError, match="level must be above 0 and below 1"):
        certainty(model, IDS, level=95)
    with pytest.raises(ValueError, match="samples must be 0, or a whole number of 100 or more"):
        certainty(model, IDS, samples=5)
    with pytest.raises(TypeError, match="the model is compiled, and its attention cannot be observed"):
        certainty(torch.compile(model), IDS)
    with torch.inference_mode(), pytest.raises(ValueError, match="needs gradients"):
        certainty(model, IDS)
    with pytest.raises(ValueError, match="parameters that depend on each other"):
        certainty(locant.swap(hf_models.make("bert"), "shaw:clip=64"), IDS)
    model.is_quantized = True
    with pytest.raises(ValueError, match="the weights of the model are quantised"):
        certainty(model, IDS)
    model.is_quantized = False
    model.encoder.layer[0].attention.self.locant.amplitude.data[0] = math.nan
    with pytest.raises(ValueError, match=r"locant\.amplitude has numbers that are not finite"):
        certainty(model, IDS)
