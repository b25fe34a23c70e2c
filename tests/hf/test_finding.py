"""Families that are not listed: what they do is found by running the model."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import locant
from locant.hf import families, family_record, finding
from locant.hf.family import Family
from locant.hf.finding import FOUND as RECORD
from locant.hf.mechanisms import Biases, CarriedTable, Nothing
from tests.hf_models import FOUND, WITH_DECODER, inputs, make, output

EXACT = {"atol": 2e-5, "rtol": 0.0}
READ = list(FOUND)


def padded(kind, side):
    given = inputs(kind, padding=side)
    if kind in WITH_DECODER and kind != "nllb-moe":  # whose experts have room for some tokens, padding included
        mask = torch.ones_like(given["decoder_input_ids"])
        mask[1, :2] = 0
        given["decoder_input_ids"][1, :2] = 1
        given["decoder_attention_mask"] = mask
    return given


def real(kind, given):
    """The tokens of the output that are not padding."""
    if kind in WITH_DECODER:
        return given.get("decoder_attention_mask", torch.ones_like(given["decoder_input_ids"])).bool()
    return given["attention_mask"].bool()


@pytest.mark.parametrize("kind", READ)
def test_own_positions_as_schemes_keep_the_outputs(kind):
    model = make(kind)
    plain, given = output(model, **inputs(kind)), {side: padded(kind, side) for side in ("left", "right")}
    before = {side: output(model, **each) for side, each in given.items()}
    locant.swap(model, locant.native(model))
    torch.testing.assert_close(output(model, **inputs(kind)), plain, **EXACT)
    for side, each in given.items():
        shown = real(kind, each)
        torch.testing.assert_close(output(model, **each)[shown], before[side][shown], **EXACT)


def test_stacks_of_unequal_depth(tmp_path):
    model = make("umt5", num_layers=1, num_decoder_layers=3)
    given = inputs("umt5")
    before = output(model, **given)
    locant.swap(model, locant.native(model))
    torch.testing.assert_close(output(model, **given), before, **EXACT)
    model.save_pretrained(tmp_path / "model")
    torch.testing.assert_close(output(locant.load(tmp_path / "model").eval(), **given), before, **EXACT)


def test_stacks_that_differ_are_refused_in_plain_words():
    with pytest.raises(NotImplementedError, match=r"in different ways \(encoder: none, decoder: bias\)"):
        finding._common("made-up", {"encoder": Nothing(), "decoder": Biases(("a",))})
    tables = {"encoder": CarriedTable("table", row=0), "decoder": CarriedTable("table", row=2)}
    message = r"in the same way \(encoder: absolute, decoder: absolute\), with other settings in each"
    with pytest.raises(NotImplementedError, match=message):
        finding._common("made-up", tables)


@pytest.mark.parametrize(("kind", "causal"), [("splinter", False), ("biogpt", True)])
def test_two_tokens_show_whether_a_model_is_causal(kind, causal):
    """A model may have no more positions than that."""
    model = make(kind)
    for tokens in ([[5, 6]], [[5, 6, 7, 8]]):
        assert finding._is_causal(model, model, torch.tensor(tokens)) == causal


@pytest.mark.parametrize("buckets", [10, 11])
def test_any_number_of_buckets_is_read(buckets):
    """T5 itself leaves the last of an odd number out."""
    model = make("t5", relative_attention_num_buckets=buckets, relative_attention_max_distance=9)
    given = inputs("t5", length=30)
    before = output(model, **given)
    locant.swap(model, locant.native(model))
    torch.testing.assert_close(output(model, **given), before, **EXACT)


@pytest.mark.parametrize("kind", FOUND)
def test_native_is_back_bit_for_bit(kind):
    model, given = make(kind), inputs(kind)
    before, names = output(model, **given), list(model.state_dict())
    locant.swap(model, "tisa")
    assert not torch.allclose(output(model, **given), before)
    locant.swap(model, "native")
    assert torch.equal(output(model, **given), before)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("kind", FOUND)
def test_a_saved_model_opens_without_being_run_first(kind, tmp_path, monkeypatch):
    model = locant.swap(make(kind), "huang4:clip=3")
    before = output(model, **inputs(kind))
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(finding, "find_family", lambda model: pytest.fail("the model was run"))
    torch.testing.assert_close(output(locant.load(tmp_path).eval(), **inputs(kind)), before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", FOUND)
def test_a_scheme_that_embeds_takes_the_place_of_the_table(kind):
    """learned in place of the own table, zero everywhere: as without positions."""
    model, given = make(kind), inputs(kind)
    bare = output(locant.swap(model, "nope"), **given)
    locant.swap(model, "learned:length=40")
    with torch.no_grad():
        for parameter in [
            p for name, p in model.named_parameters() if name.endswith(("scheme.table", "locant_embed.table"))
        ]:
            parameter.zero_()
    torch.testing.assert_close(output(model, **given), bare, **EXACT)


@pytest.mark.parametrize("kind", ["m2m_100", "marian", "nllb-moe", "umt5", "biogpt", "ctrl", "jamba", "stablelm"])
def test_generation_with_a_cache_is_that_without(kind):
    auto = AutoModelForSeq2SeqLM if kind in WITH_DECODER else AutoModelForCausalLM
    model = locant.swap(make(kind, auto), "tisa+learned:length=40")
    ids = inputs(kind)["input_ids"]
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 1}
    assert torch.equal(*(model.generate(ids, use_cache=cache, **settings) for cache in (True, False)))


def test_layers_without_attention_are_left_alone():
    model = locant.swap(make("jamba"), "alibi")
    schemes = [name for name, _ in model.named_modules() if name.endswith(".locant")]
    assert schemes == ["layers.1.self_attn.locant"]
    assert str(locant.native(locant.swap(model, "native"))) == "none: nope"


def test_both_stacks_are_found_and_only_the_decoder_is_causal():
    model = make("nllb-moe")
    found = finding.family_of(model)
    assert found.stacks(model) == ["encoder", "decoder"]
    assert found.causal == {"encoder": False, "decoder": True}
    assert isinstance(found.mechanism, CarriedTable)
    assert found.mechanism.row == 2
    assert found.count.__name__ == "by_token"


def test_gradient_checkpointing_runs_a_layer_again_with_its_positions():
    """StableLM's layers drop the argument that carries positions."""
    gradients = []
    for checkpointing in (False, True):
        model = locant.swap(make("stablelm"), "tisa").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        first, second = inputs("stablelm")["input_ids"], inputs("stablelm", length=5)["input_ids"]
        sums = [model(input_ids=ids).last_hidden_state.pow(2).sum() for ids in (first, second)]  # before any backward
        sum(sums).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


# ---- what must be noticed -------------------------------------------------------------------------


def test_positions_that_nobody_removed_are_noticed(monkeypatch):
    monkeypatch.setitem(families.FAMILIES, "llama", Family(Nothing()))
    model = make("llama")
    before = output(model, **inputs("llama"))
    with pytest.raises(NotImplementedError, match=r"own positions still reach layers\.0\.self_attn"):
        locant.swap(model, "alibi")
    assert torch.equal(output(model, **inputs("llama")), before)
    monkeypatch.setitem(families.FAMILIES, "bert", Family(Nothing()))
    with pytest.raises(NotImplementedError, match=r"own positions still reach .* \(in its inputs\)"):
        locant.swap(make("bert"), "alibi")


def test_attention_outside_the_interface_is_noticed():
    model = make("llama")

    def by_itself(hidden_states, **kwargs):
        weights = F.softmax(hidden_states @ hidden_states.mT, dim=-1)
        return weights @ hidden_states, None

    model.layers[1].self_attn.forward = by_itself
    with pytest.raises(NotImplementedError, match="LlamaAttention attends by itself"):
        locant.swap(model, "alibi")


def test_a_model_that_fails_is_refused_by_name(monkeypatch):
    model = make("splinter")

    def broken(*args, **kwargs):
        raise KeyError("bbox")

    monkeypatch.setattr(type(model.encoder), "forward", broken)
    with pytest.raises(NotImplementedError, match="splinter models cannot be swapped: on a few tokens the model fails"):
        locant.swap(model, "alibi")


def test_a_rule_of_counting_that_is_not_known_is_refused(monkeypatch):
    model = make("splinter")
    table = model.embeddings.position_embeddings
    forward = table.forward
    model.embeddings.position_embeddings.forward = lambda ids: forward(ids * (2 if len(ids) > 1 else 1))
    original = type(model.embeddings).forward

    def one_row_each(self, input_ids=None, **kwargs):  # rows of the table depend on the batch
        kwargs["position_ids"] = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        return original(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(type(model.embeddings), "forward", one_row_each)
    with pytest.raises(NotImplementedError, match="does not know how SplinterModel number padded tokens"):
        locant.swap(model, "alibi")


def test_a_decoder_that_counts_by_another_rule_is_refused():
    """One record serves both stacks. Here the decoder counts padding and the encoder does not."""
    model = make("m2m_100")
    table = model.decoder.embed_positions
    forward = table.forward
    table.forward = lambda ids, states, past=0: forward(None, states, past)  # by index
    with pytest.raises(NotImplementedError, match="M2M100Encoder and M2M100Decoder number padded tokens"):
        locant.swap(model, "alibi")


def test_records_are_restored_and_damaged_ones_refused():
    model = make("m2m_100")
    family = finding.family_of(model)
    data = json.loads(json.dumps(family_record.to_json(model)))
    again = family_record.from_json(data)
    assert (again.mechanism, again.count, again.causal) == (family.mechanism, family.count, family.causal)
    assert again.stacks(model) == family.stacks(model)
    for change in (
        {"mechanism": "Family"}, {"count": "by_hand"}, {"stacks": "encoder"}, {"starts_at": True},
        {"causal": {"encoder": 1}},
        {"settings": {**data["settings"], "row": "2"}}, {"settings": {**data["settings"], "more": 2}}, {"settings": {}},
        {"more": 1},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"record of the family|settings of CarriedTable"):
            family_record.from_json({**data, **change})
    with pytest.raises(ValueError, match="names 'elsewhere', which the model does not have"):
        family_record.restore(model, {**data, "stacks": ["elsewhere"]})
    with pytest.raises(ValueError, match="written by an older locant"):
        family_record.restore(model, None)


def test_what_was_found_is_kept_and_copied():
    model = make("biogpt")
    locant.swap(model, "alibi")
    twin = copy.deepcopy(model)
    assert twin.__dict__[RECORD].mechanism == model.__dict__[RECORD].mechanism
    assert torch.equal(output(twin, **inputs("biogpt")), output(model, **inputs("biogpt")))
