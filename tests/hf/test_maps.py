"""Mapped schemes in Hugging Face models: swapped, generating, saved, read back."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertModel, LlamaConfig

import locant
from locant.schemes import Interpolated
from locant.testing import check_scheme
from tests.hf.test_swapping import EXACT
from tests.hf_models import CONFIGS, SMALL, inputs, make, output, spread

LLAMA = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 64, "pad_token_id": 0}  # fmt: skip
SPEC = "rope@selfextend:window=8,size=2"


def llama():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA)).eval()


@pytest.mark.parametrize("spec", [SPEC, "rope@grouped:size=3", "tisa@selfextend:window=6,size=3", "t5@interpolated"])
def test_generating_with_a_cache_equals_without(spec):
    model = spread(locant.swap(llama(), spec))
    ids = torch.randint(1, 60, (2, 15), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # left padding
    how = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    with torch.no_grad():
        cached, whole = (model.generate(ids, use_cache=cache, **how) for cache in (True, False))
    assert torch.equal(cached, whole)
    assert cached.shape[1] == 27


def test_selfextend_is_exact_within_the_window_and_differs_beyond():
    plain, mapped = llama(), locant.swap(llama(), SPEC)
    ids = torch.randint(1, 60, (1, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        a, b = plain(ids).logits, mapped(ids).logits
    torch.testing.assert_close(b[:, :9], a[:, :9], **EXACT)
    assert (b[:, 9:] - a[:, 9:]).abs().amax(-1).min() > 1e-4


def test_a_rotary_model_keeps_its_own_speeds():
    model = llama()
    (own,) = set(locant.native(model).rotary)
    locant.swap(model, f"{own}@interpolated:factor=2")
    ids = torch.randint(1, 60, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        slow = model(ids).logits
        fast = llama()(ids, position_ids=torch.arange(0, 24, 2)[None]).logits
        locant.swap(model, f"{own}@interpolated:factor=1")
        torch.testing.assert_close(model(ids).logits, llama()(ids).logits, **EXACT)
        torch.testing.assert_close(model(ids, position_ids=torch.arange(0, 24, 2)[None]).logits, fast, **EXACT)
    assert (slow - fast).abs().max() > 1e-4


def test_bert_reads_past_its_table():
    torch.manual_seed(0)
    small = {**SMALL, "max_position_embeddings": 512}
    model = BertModel(BertConfig(**small)).eval()
    table = model.embeddings.position_embeddings.weight.detach().clone()
    own = locant.native(model).stacks[0].embed
    locant.swap(model, Interpolated(own, factor=4.0))
    assert str(locant.native(model)) == "swapped: learned:length=512@interpolated:factor=4+nope"
    assert model.config.max_position_embeddings == 2048
    ids = torch.randint(0, 60, (1, 2048))
    with torch.no_grad():
        assert model(ids).last_hidden_state.isfinite().all()
    found = locant.native(model).table
    assert found.shape == (2048, 32)
    torch.testing.assert_close(found[::4], table)
    torch.testing.assert_close(found[2::4][:-1], (table[:-1] + table[1:]) / 2)
    with torch.no_grad(), pytest.raises(ValueError, match="2048"):
        model(torch.randint(0, 60, (1, 2049)))


@pytest.mark.parametrize("kind", ["bert", "llama", "t5"])
@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        "tisa:kernels=3@grouped:size=2+learned:length=10@interpolated:factor=4",
        "shaw:clip=3@interpolated+learned:length=7@recurrent:length=7",
    ],
)
def test_saved_and_opened_again(kind, spec, tmp_path):
    assert kind in CONFIGS
    model, given = spread(locant.swap(make(kind), spec)), inputs(kind)
    model.save_pretrained(tmp_path)
    again = locant.load(tmp_path).eval()
    assert torch.equal(output(again, **given), output(model, **given))
    read = locant.native(again)
    assert all(str(part) in spec for stack in read.stacks for layer in stack.layers for part in layer.parts_of_sum())
    for stack in read.stacks:
        for layer in stack.layers:
            check_scheme(layer)


def test_native_of_a_swapped_model_can_be_swapped_in_again():
    model, given = spread(locant.swap(make("bert"), "tisa@selfextend:window=4,size=2+first")), inputs("bert")
    before = output(model, **given)
    locant.swap(model, locant.native(model))
    assert torch.equal(output(model, **given), before)
    assert locant.native(model).bias is None
    assert locant.native(model).rotary is None
    assert locant.native(locant.swap(llama(), SPEC)).rotary == [SPEC, SPEC]


def test_a_model_loads_what_it_learned_without_the_map():
    plain, mapped = spread(locant.swap(make("bert"), "tisa")), locant.swap(make("bert"), "tisa@grouped:size=2")
    mapped.load_state_dict(plain.state_dict())
    for a, b in zip(locant.native(plain).stacks[0].layers, locant.native(mapped).stacks[0].layers, strict=True):
        assert torch.equal(a.offset, b.scheme.offset)


def test_kept_and_added():
    model, given = make("llama"), inputs("llama")
    before = output(model, **given)
    with torch.no_grad():
        locant.swap(model, "toeplitz:clip=3@grouped:size=2", keep_native=True)
        for parameter in locant.native(model).stacks[0].layers[0].parts_of_sum()[-1].parameters():
            assert parameter.shape == (4, 7)
        for layer in locant.native(model).stacks[0].layers:
            layer.parts_of_sum()[-1].scheme.table.zero_()
    torch.testing.assert_close(output(model, **given), before, **EXACT)


@torch.no_grad()
def test_a_models_own_positions_within_a_map(tmp_path):
    bert = make("bert").eval()
    table = bert.embeddings.position_embeddings.weight.clone()
    locant.swap(bert, "native@interpolated:factor=2")
    assert bert.config.max_position_embeddings == 2 * len(table)
    at = torch.tensor([0, 1, 2, 5])
    want = torch.stack([table[0], (table[0] + table[1]) / 2, table[1], (table[2] + table[3]) / 2])
    torch.testing.assert_close(locant.native(bert).stacks[0].embed.embed(at), want)
    bert(input_ids=torch.randint(3, 60, (1, 70)))
    bert.save_pretrained(tmp_path)
    ids = torch.randint(3, 60, (1, 70))
    assert torch.equal(locant.load(tmp_path).eval()(input_ids=ids)[0], bert(input_ids=ids)[0])
    locant.swap(bert, "native")
    assert torch.equal(bert.embeddings.position_embeddings.weight, table)


@torch.no_grad()
def test_self_extend_of_a_rotary_model_changes_distant_pairs_alone():
    model, ids = make("llama").eval(), torch.randint(3, 60, (1, 24))
    before = model(input_ids=ids)[0]
    locant.swap(model, "native@selfextend:window=8,size=2")
    after = model(input_ids=ids)[0]
    torch.testing.assert_close(after[:, :9], before[:, :9], atol=1e-5, rtol=1e-5)
    assert float((after[:, 9:] - before[:, 9:]).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", ["t5", "mpnet", "gpt2", "opt", "jamba"])
def test_a_map_that_changes_nothing_changes_nothing(kind):
    """Groups of one token, on tables, biases, both, and layers without positions."""
    model = make(kind).eval()
    given = {"input_ids": torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(0))}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = given["input_ids"]
    if kind == "jamba":
        with pytest.raises(ValueError, match="has no positions of its own that 'native@grouped:size=1' could map"):
            locant.swap(model, "native@grouped:size=1")
        return
    with torch.no_grad():
        before = model(**given)[0]
        torch.testing.assert_close(
            locant.swap(model, "native@grouped:size=1")(**given)[0], before, atol=1e-5, rtol=1e-5
        )


def test_own_positions_within_a_map_in_words():
    model = make("bert")
    for spec, problem in (
        ("native@selfextend:window=8,size=2", "selfextend"),
        ("native@gruped:size=2", "unknown map 'gruped'"),
        ("native@grouped:size=2+tsia", "unknown scheme 'tsia'"),
    ):
        with pytest.raises(ValueError, match=problem):
            locant.swap(model, spec)
    with pytest.raises(ValueError, match="leave out keep_native"):
        locant.swap(model, "native@grouped:size=2", keep_native=True)
    locant.swap(model, "alibi")
    with pytest.raises(ValueError, match="with its own positions; call"):
        locant.swap(model, "native@grouped:size=2")


@pytest.mark.parametrize("spec", ["native@grouped:size=2", "native@selfextend:window=3,size=2"])
@torch.no_grad()
def test_left_padding_does_not_move_the_groups_of_a_rotary_model(spec):
    model = locant.swap(make("llama").eval(), spec)
    ids = torch.randint(3, 60, (1, 12))
    padded = torch.cat([torch.ones(1, 1, dtype=torch.long), ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, 0] = 0
    got = model(input_ids=padded, attention_mask=mask)[0][:, 1:]
    torch.testing.assert_close(got, model(input_ids=ids)[0], atol=1e-5, rtol=1e-5)


def test_a_scheme_beside_mapped_native_positions():
    """A table that starts again, and attention to neighbours: short texts as they were, long texts in one pass."""
    model = make("bert").eval()
    ids = torch.randint(5, 60, (2, 12))
    with torch.no_grad():
        before = model(ids).last_hidden_state
        locant.swap(model, "native@recurrent:length=16+local:window=15")
        torch.testing.assert_close(model(ids).last_hidden_state, before, atol=1e-5, rtol=1e-5)
        long = torch.randint(5, 60, (1, 90))
        other = long.clone()
        other[0, -1] = 4
        locant.swap(model, "native")
        locant.swap(model, "native@recurrent:length=16+local:window=3,first=false")
        changed = (model(long).last_hidden_state != model(other).last_hidden_state).any(-1)[0]
    assert int(changed.int().argmax()) == long.shape[1] - 1 - 3 * model.config.num_hidden_layers
    assert "local:window=3,first=false" in str(locant.native(model))
