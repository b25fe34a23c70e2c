"""More models that write attention out, whose positions are found by running them; encoder-decoders among them."""

import pytest
import torch
from transformers import DiaConfig, DiaModel, DynamicCache, EncoderDecoderCache

import locant
from locant.hf.listening import observing
from locant.hf.seam import through_seam
from tests.hf.test_swapping import EXACT
from tests.hf_models import output, spread
from tests.seam_models import MORE, inputs, make_more

LAW = 2e-5
TWO_STACKS = ("mvp", "fsmt", "bigbird_pegasus")


def given_to(kind, padding=None):
    given = inputs(kind, padding=padding)
    if kind in TWO_STACKS:
        given["decoder_input_ids"] = given["input_ids"].flip(1)[:, :6].clamp(min=3)
        if kind == "fsmt":  # with a cache transformers makes no mask of the future
            given["use_cache"] = False
    return given


def first(model, **given):
    """The logits or the last hidden states."""
    with torch.no_grad():
        return model(**given)[0]


def real(kind, given):
    mask = given.get("attention_mask")
    return (..., slice(None)) if mask is None or kind in TWO_STACKS else mask.bool()


@pytest.mark.parametrize("kind", MORE)
def test_native_positions_as_a_scheme_change_nothing(kind):
    """A model that is observed, or swapped back, computes the same bits. Padding leaves other tokens alone."""
    model = make_more(kind)
    found = locant.native(model)
    for side in (None, "left", "right"):
        given = given_to(kind, side)
        before, shown = first(model, **given), real(kind, given)
        with through_seam(model):
            assert torch.equal(first(model, **given), before)
        locant.swap(model, found)
        assert (first(model, **given) - before)[shown].abs().max() <= LAW * before.abs().max()
        locant.swap(model, "native")
        assert torch.equal(first(model, **given), before)
    spread(locant.swap(model, "huang4:clip=3"))
    given = given_to(kind, "left")
    alone = {name: x[:1] for name, x in given.items() if isinstance(x, torch.Tensor)}
    alone["input_ids"] = alone["input_ids"][:, 3:]
    alone["attention_mask"] = alone["attention_mask"][:, 3:]
    together = first(model, **given)[:1]
    together = together if kind in TWO_STACKS else together[:, 3:]
    assert (first(model, **{**given, **alone}) - together).abs().max() <= LAW * together.abs().max()


@pytest.mark.parametrize("kind", ["openai-gpt", "xlm", "flaubert", "semantic", "fsmt"])
def test_longer_inputs_than_the_model_had_positions(kind):
    model, ids = locant.swap(make_more(kind), "alibi"), torch.randint(3, 60, (1, 90))
    decoder = {"decoder_input_ids": ids[:, :80]} if kind in TWO_STACKS else {}
    assert first(model, input_ids=ids, **decoder).isfinite().all()


@pytest.mark.parametrize("kind", TWO_STACKS)
def test_both_stacks_have_schemes_and_cross_attention_has_none(kind):
    model = make_more(kind)
    given = given_to(kind, "right")
    locant.swap(model, "alibi")
    names = [name for name, _ in model.named_modules() if name.endswith(".locant")]
    assert len(names) == 4
    assert {name.split(".")[0] for name in names} == {"encoder", "decoder"}
    assert not any("encoder_attn" in name for name in names)
    whole = first(model, **given)
    given["attention_mask"][0, 0] = 0
    assert (first(model, **given) - whole)[0].abs().max() > 1e-3  # the mask of the encoder reaches cross-attention


@pytest.mark.parametrize("kind", ["mvp", "fsmt"])
def test_a_cache_of_two_stacks(kind):
    model = spread(locant.swap(make_more(kind), "huang4:clip=3"))
    given = given_to(kind, "left")
    whole, ids = first(model, **given), given.pop("decoder_input_ids")
    given.pop("use_cache", None)
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    steps = [
        first(model, **given, decoder_input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True)
        for at in range(6)
    ]
    torch.testing.assert_close(torch.cat(steps, 1), whole, **EXACT)


def test_blip_is_causal_where_the_call_says_so():
    """Without padding transformers makes no mask, neither for the encoder nor for the decoder."""
    model, given = spread(locant.swap(make_more("blip_text_model"), "tisa")), inputs("blip_text_model")
    other = given["input_ids"].clone()
    other[:, -1] = 7
    for causal in (True, False):
        changed = output(model, input_ids=other, is_decoder=causal) - output(model, **given, is_decoder=causal)
        assert (changed[:, :-1].abs().max() == 0) == causal


def test_blip_writes_with_a_cache():
    model = spread(locant.swap(make_more("blip_text_model", "BlipTextLMHeadModel", is_decoder=True), "huang4:clip=3"))
    ids, cache = inputs("blip_text_model")["input_ids"], DynamicCache(config=model.config)
    whole = first(model, input_ids=ids, use_cache=False)
    steps = [
        first(model, input_ids=ids[:, a:b], past_key_values=cache, use_cache=True) for a, b in ((0, 4), (4, 7), (7, 9))
    ]
    torch.testing.assert_close(torch.cat(steps, 1), whole, **EXACT)


def test_tapas_counts_from_the_first_token_of_a_cell():
    model, given = make_more("tapas"), inputs("tapas", padding="right")
    types = torch.zeros(2, 9, 7, dtype=torch.long)
    types[:, 3:, 1] = torch.tensor([1, 1, 1, 2, 2, 2])
    types[:, 3:, 2] = torch.tensor([1, 1, 2, 1, 1, 2])
    before = output(model, **given, token_type_ids=types)
    locant.swap(model, locant.native(model))
    torch.testing.assert_close(output(model, **given, token_type_ids=types), before, **EXACT)
    locant.swap(model, "alibi")
    seen = []
    with observing(before=lambda call: seen.append(call.positions.q)):
        output(model, **given, token_type_ids=types)
    assert [x[1].tolist() for x in seen] == [[0, 1, 2, 0, 1, 0, 0, 1, 0]] * 2


def test_cross_attention_of_trocr_is_as_it_was():
    model, given = make_more("trocr"), inputs("trocr", padding="right")
    torch.manual_seed(3)
    given["encoder_hidden_states"] = torch.randn(2, 5, 24)
    given["encoder_attention_mask"] = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    before, real = first(model, **given), given["attention_mask"].bool()
    locant.swap(model, locant.native(model))
    torch.testing.assert_close(first(model, **given)[real], before[real], **EXACT)


# ---- refused, in words -----------------------------------------------------------------------------


def test_inputs_that_a_swapped_model_cannot_read():
    model = locant.swap(make_more("visual_bert"), "nope")
    given = inputs("visual_bert", padding="right")
    parts = {"visual_embeds": torch.ones(2, 3, 16), "visual_attention_mask": torch.ones(2, 3)}
    with pytest.raises(NotImplementedError, match="a swapped VisualBERT model reads words alone"):
        output(model, **given, **parts)
    output(locant.swap(model, "native"), **given, **parts)

    model, given = locant.swap(make_more("xlm"), "alibi"), inputs("xlm")
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    output(model, input_ids=given["input_ids"][:, :5], cache=cache)
    with pytest.raises(NotImplementedError, match="cannot use a cache: it got 4 tokens and 5 states"):
        output(model, **given, cache=cache)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("big_bird", {"attention_type": "block_sparse"}, "Open the model with attention_type='original_full'"),
        ("bigbird_pegasus", {"attention_type": "block_sparse"}, "Open the model with attention_type='original_full'"),
        ("ibert", {"quant_mode": True}, "Open the model with quant_mode=False"),
        ("mvp", {"use_prompt": True, "prompt_length": 3, "prompt_mid_dim": 8}, "use_prompt=False"),
    ],
)
def test_settings_that_cannot_be_swapped(kind, changes, message):
    """The model is not even run: a sparse BigBird becomes a full one in its first short run."""
    model = make_more(kind, **changes)
    for call in (lambda: locant.swap(model, "alibi"), lambda: locant.native(model)):
        with pytest.raises(NotImplementedError, match=message):
            call()
    kinds = [module.attention_type for module in model.modules() if hasattr(module, "attention_type")]
    assert set(kinds) <= {"block_sparse"}


def test_models_that_take_no_embeddings_get_no_absolute_positions():
    """Dia makes its own token embeddings; a scheme in attention needs none."""
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8,
             "num_key_value_heads": 4, "intermediate_size": 64}  # fmt: skip
    cross = {"cross_head_dim": 8, "cross_num_attention_heads": 4, "cross_num_key_value_heads": 4,
             "cross_hidden_size": 32}  # fmt: skip
    torch.manual_seed(0)
    model = DiaModel(DiaConfig(encoder_config=sizes, decoder_config={**sizes, **cross})).eval()
    with pytest.raises(NotImplementedError, match="DiaEncoder takes no inputs_embeds, so learned:length=40"):
        locant.swap(model, "learned:length=40")
    ids = inputs("dia")["input_ids"]
    given = {"input_ids": ids, "decoder_input_ids": ids[:, :6, None].repeat(1, 1, 9)}
    before = output(model, **given)
    torch.testing.assert_close(output(locant.swap(model, locant.native(model)), **given), before, **EXACT)
