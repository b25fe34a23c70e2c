"""Padding changes nothing: without position_ids the first token is at position 0, wherever it stands in its row."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache

import locant
from locant.analysis.behaviour import shift
from tests.hf.test_swapping import EXACT
from tests.hf_models import BERT_LIKE, CONFIGS, DECODERS, inputs, make, output, spread

TEXT = [kind for kind in CONFIGS if kind != "vit"]
SPECS = ["first", "learned:length=40", "sinusoidal", "tisa", "fire:length=2"]


def stack_of(kind, model):
    """The module that takes input_ids and an attention mask, and no other input."""
    return model.encoder if kind in ("t5", "bart") else model


def padded(kind, side):
    given = inputs(kind, padding=side)
    given.pop("decoder_input_ids", None)
    return given, given["attention_mask"][0].bool()


@pytest.mark.parametrize("kind", TEXT)
def test_padding_on_either_side_changes_no_token(kind):
    for spec in SPECS:
        model = stack_of(kind, spread(locant.swap(make(kind).double(), spec)))
        for side in ("left", "right"):
            given, real = padded(kind, side)
            alone = output(model, input_ids=given["input_ids"][:1, real])
            torch.testing.assert_close(output(model, **given)[:1, real], alone, rtol=0, atol=1e-9, msg=f"{spec} {side}")


@pytest.mark.parametrize("kind", ["bert", "roberta", "mpnet", "modernbert", "gpt2", "opt", "llama"])
def test_padding_of_embedded_tokens(kind):
    """RoBERTa counts tokens by their ids, and has none here: the mask is what is left."""
    model = spread(locant.swap(make(kind), "learned:length=40"))
    given, real = padded(kind, "left")
    alone = output(model, input_ids=given["input_ids"][:1, real])
    tokens = model.get_input_embeddings()(given["input_ids"]).detach()
    found = output(model, inputs_embeds=tokens, attention_mask=given["attention_mask"])
    torch.testing.assert_close(found[:1, real], alone, **EXACT)


@pytest.mark.parametrize("kind", DECODERS)
def test_a_left_padded_prompt_then_more(kind):
    model = spread(locant.swap(make(kind, AutoModelForCausalLM), "learned:length=40+fire:length=2"))
    given, real = padded(kind, "left")
    steps, cache = torch.tensor([[7, 9], [8, 5]]), DynamicCache(config=model.config)
    mask = torch.cat([given["attention_mask"], torch.ones(2, 2, dtype=torch.long)], dim=1)
    with torch.no_grad():
        model(**given, past_key_values=cache, use_cache=True)
        more = model(steps, attention_mask=mask, past_key_values=cache).logits
    alone = output(model, input_ids=torch.cat([given["input_ids"][:1, real], steps[:1]], dim=1))
    torch.testing.assert_close(more[:1], alone[:, -2:], **EXACT)


def test_a_left_padded_input_of_a_decoder():
    """T5's decoder has a mask of its own."""
    model = spread(locant.swap(make("t5", AutoModelForSeq2SeqLM), "first+tisa"))
    given, real = padded("t5", "left")
    encoded = inputs("t5")["input_ids"]
    short = {"decoder_input_ids": given["input_ids"][:1, real]}
    long = {"decoder_input_ids": given["input_ids"], "decoder_attention_mask": given["attention_mask"]}
    found = output(model, input_ids=encoded, **long)[:1, real]
    torch.testing.assert_close(found, output(model, input_ids=encoded[:1], **short), **EXACT)


@pytest.mark.parametrize("kind", ["bert", "roberta", "llama", "t5"])
def test_position_ids_of_the_caller_are_kept(kind):
    model = stack_of(kind, spread(locant.swap(make(kind), "learned:length=40")))
    given, real = padded(kind, "left")
    first = 2 if kind == "roberta" else 0
    pos = torch.arange(first, first + 9).expand(2, -1)
    alone = output(model, input_ids=given["input_ids"][:1, real], position_ids=pos[:1, real])
    torch.testing.assert_close(output(model, **given, position_ids=pos)[:1, real], alone, **EXACT)
    assert (output(model, **given)[:1, real] - alone).abs().max() > 0.01


@pytest.mark.parametrize("kind", TEXT)
def test_positions_that_are_kept_count_as_they_did(kind):
    """BERT's own table gives its first row to the first padding token; a scheme beside it changes nothing in that."""
    model = make(kind)
    for side in ("left", "right"):
        given, _ = padded(kind, side)
        before = output(stack_of(kind, model), **given)
        locant.swap(model, "nope", keep_native=True)
        torch.testing.assert_close(output(stack_of(kind, model), **given), before, **EXACT)
        locant.swap(model, "native")


@pytest.mark.parametrize("kind", [kind for kind in BERT_LIKE if kind not in ("roberta", "camembert")])
def test_how_tokens_are_counted_is_saved(kind, tmp_path):
    """A model with its own table counts padding, in another model and from a folder; with another table it does not."""
    model, given = make(kind), padded(kind, "left")[0]
    before = output(model, **given)
    found = locant.native(locant.swap(model, locant.native(model)))
    model.save_pretrained(tmp_path)
    for again in (locant.load(tmp_path).eval(), locant.swap(make(kind), found)):
        torch.testing.assert_close(output(again, **given), before, **EXACT)
    spread(locant.swap(model, "first")).save_pretrained(tmp_path)
    assert torch.equal(output(locant.load(tmp_path).eval(), **given), output(model, **given))


def test_the_first_token_of_every_packed_sequence_is_a_first_token():
    model = spread(locant.swap(make("llama"), "first"))
    ids = inputs("llama", batch=1)["input_ids"]
    packed = output(model, input_ids=ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]))
    torch.testing.assert_close(packed[:, 4:], output(model, input_ids=ids[:, 4:]), **EXACT)


def test_compiled():
    model = spread(locant.swap(make("bert", num_hidden_layers=1), "first"))
    given = padded("bert", "left")[0]
    torch.compiler.reset()
    with torch.no_grad():
        found = torch.compile(model, backend="eager", fullgraph=True)(**given).last_hidden_state
    torch.testing.assert_close(found, output(model, **given), **EXACT)


def test_a_shift_is_measured_where_padding_shifts_nothing():
    """T5's own stacks take no position_ids; as padding no longer moves the tokens of a swapped one, it takes them."""
    ids = inputs("t5")["input_ids"]
    for spec, moves in (("first", True), ("tisa", False)):
        model = spread(locant.swap(make("t5"), spec))
        rows = shift(model.encoder, ids, by=(1, 5))
        assert {row.how for row in rows} == {"position_ids"}
        assert all((row.relative > 0.01) == moves for row in rows)
