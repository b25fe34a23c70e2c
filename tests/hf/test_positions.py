"""Where the tokens of a swapped model are: against the native model, whose rotations go with its cached keys.

The native positions as a scheme must give the native outputs, however the tokens are numbered, cached and reordered.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache

import locant
from locant.hf.listening import observing
from tests.hf.test_swapping import EXACT
from tests.hf_models import CONFIGS, DECODERS, make, output, spread

IDS = torch.arange(3, 15)[None]  # 12 tokens


def pair(**changes):
    """The native model, and the same with its positions as a scheme."""
    native = make("llama", AutoModelForCausalLM, **changes)
    swapped = make("llama", AutoModelForCausalLM, **changes)
    return native, locant.swap(swapped, locant.native(swapped))


def agree(run, models=None):
    with torch.no_grad():
        native, swapped = (run(model) for model in models or pair())
    torch.testing.assert_close(swapped, native, rtol=0, atol=3e-5)


@pytest.mark.parametrize("numbers", ["halved", "zeros", "back", "apart", "shuffled"])
def test_any_numbering(numbers):
    pos = {
        "halved": torch.arange(12) // 2,
        "zeros": torch.zeros(12, dtype=torch.long),
        "back": torch.arange(12).flip(0),
        "apart": torch.arange(12) * 3 + 5,
        "shuffled": torch.tensor([3, 0, 7, 1, 9, 2, 11, 4, 5, 10, 6, 8]),
    }[numbers][None]
    agree(lambda model: model(IDS, position_ids=pos).logits)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_positions_further_apart_than_the_old_maximum(kind):
    """A shift-invariant scheme does not see where a text begins, however far that is past the old table of 40."""
    model = spread(locant.swap(make(kind), "tisa"))
    pos = torch.arange(12)[None] + 2
    near, far = (output(model, input_ids=IDS, position_ids=pos + shift) for shift in (0, 500))
    torch.testing.assert_close(far, near, **EXACT)
    torch.testing.assert_close(near, output(model, input_ids=IDS), **EXACT)


def test_a_pack_is_kept_apart_with_and_without_a_cache():
    pos = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    for spec in ("alibi", "nope"):
        model = locant.swap(make("llama"), spec)
        for use_cache in (True, False):
            packed = output(model, input_ids=IDS, position_ids=pos, use_cache=use_cache)
            torch.testing.assert_close(packed[:, 5:], output(model, input_ids=IDS[:, 5:]), **EXACT)
            torch.testing.assert_close(packed[:, :5], output(model, input_ids=IDS[:, :5]), **EXACT)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("numbered", [False, True])
def test_a_right_padded_prompt_then_more(numbered, cache):
    ids = torch.cat([IDS[:, :5], torch.ones(1, 3, dtype=torch.long)], dim=1)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])

    def run(model):
        kept = DynamicCache() if cache == "dynamic" else StaticCache(config=model.config, max_cache_len=20)
        where = {"position_ids": torch.arange(8)[None]} if numbered else {}
        model(ids, attention_mask=mask, past_key_values=kept, use_cache=True, **where)
        more = torch.cat([mask, torch.ones(1, 3, dtype=torch.long)], dim=1)
        where = {"position_ids": torch.tensor([[5, 6, 7]])}
        return model(IDS[:, 5:8], attention_mask=more, past_key_values=kept, **where).logits

    agree(run)


@pytest.mark.parametrize(
    "spec", ["tisa", *(pytest.param(spec, marks=pytest.mark.slow) for spec in ("learned:length=40", "rope"))]
)
def test_compiled_steps_after_a_right_padded_prompt(spec):
    """In compiled code with a static cache, as in a batch that is not compiled and as one row at a time."""
    model = spread(locant.swap(make("llama", AutoModelForCausalLM, num_hidden_layers=1), spec))
    ids, steps, lengths = torch.stack([IDS[0], IDS[0].flip(0)]), torch.tensor([[7, 8], [9, 5]]), torch.tensor([3, 5])
    mask = (torch.arange(5) < lengths[:, None]).long()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    def run(step, cache):
        model(ids[:, :5].where(mask.bool(), 1), attention_mask=mask, position_ids=torch.arange(5).expand(2, 5),
              past_key_values=cache, use_cache=True)  # fmt: skip
        found = []
        for t in range(2):
            shown = torch.cat([mask, torch.ones(2, t + 1, dtype=torch.long)], dim=1)
            where = {"attention_mask": shown, "position_ids": (lengths + t)[:, None]}
            found.append(step(input_ids=steps[:, t : t + 1], past_key_values=cache, **where).logits)
        return torch.cat(found, dim=1)

    with torch.no_grad():
        found = run(compiled, StaticCache(config=model.config, max_cache_len=9))
        torch.testing.assert_close(found, run(model, DynamicCache()), **EXACT)
    for row, length in enumerate(lengths):
        alone = output(model, input_ids=torch.cat([ids[row, :length], steps[row]])[None])
        torch.testing.assert_close(found[row], alone[0, length:], **EXACT)


@pytest.mark.parametrize(
    ("first", "then", "counted"),
    [(range(5), [5], True), (range(5), [6], False), (range(1, 6), [6], False), ([0, 1, 1, 2, 3], [5], False)],
    ids=["counted", "a gap", "from 1", "a repeat"],
)
def test_a_step_whose_positions_count_from_zero_passes_none(first, then, counted):
    """`generate` passes position_ids in every step; `attend` is faster without them."""
    model = locant.swap(make("llama", AutoModelForCausalLM), "tisa")
    first, then = torch.tensor([*first])[None], torch.tensor(then)[None]
    with torch.no_grad():
        kept, calls = DynamicCache(), []
        model(IDS[:, :5], position_ids=first, past_key_values=kept, use_cache=True)
        with observing(after=lambda call, out: calls.append(call.arguments())):
            step = model(IDS[:, 5:6], position_ids=then, past_key_values=kept).logits
        whole = model(IDS[:, :6], position_ids=torch.cat([first, then], -1)).logits
    assert calls
    assert all((call["q_pos"] is None) == (call["k_pos"] is None) == counted for call in calls)
    torch.testing.assert_close(step, whole[:, 5:], rtol=0, atol=3e-5)


@pytest.mark.filterwarnings("ignore:the 5 cached keys had no position_ids")
def test_in_chunks_and_far_away():
    def run(model):
        first = model(IDS[:, :5], use_cache=True)
        return model(IDS[:, 5:], position_ids=torch.arange(20, 27)[None], past_key_values=first.past_key_values).logits

    agree(run)

    def chunks(model):
        kept, parts = DynamicCache(), IDS.split([2, 1, 5, 3, 1], dim=1)
        return torch.cat([model(part, past_key_values=kept, use_cache=True).logits for part in parts], dim=1)

    agree(chunks)
    model = spread(locant.swap(make("llama", AutoModelForCausalLM), "fire+huang4:clip=3"))
    with torch.no_grad():
        torch.testing.assert_close(chunks(model), model(IDS).logits, **EXACT)


@pytest.mark.parametrize("what", ["reorder", "select", "repeat", "tuple"])
def test_rows_of_a_cache(what):
    """Each row has positions of its own: those that stay behind when the keys move are found out."""
    ids = torch.cat([IDS[:, :6], IDS[:, 6:]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    pos = torch.stack([torch.arange(6), torch.tensor([0, 3, 4, 9, 11, 15])])

    def run(model):
        model = model.model
        kept = DynamicCache()
        options = {"return_dict": False} if what == "tuple" else {}
        model(ids, attention_mask=mask, position_ids=pos, past_key_values=kept, use_cache=True, **options)
        rows = torch.tensor([0, 1])
        if what == "reorder":
            rows = torch.tensor([1, 0])
            kept.reorder_cache(rows)
        if what == "select":
            rows = torch.tensor([1])  # the first row would also be right if rows were left out at the end
            kept.batch_select_indices(rows)
        if what == "repeat":  # as beams of one prompt
            rows = torch.tensor([0, 0, 1, 1])
            kept.batch_repeat_interleave(2)
        step = {
            "input_ids": torch.tensor([[9], [8]])[rows],
            "attention_mask": torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)[rows],
            "position_ids": torch.tensor([[4], [17]])[rows],
        }
        return model(**step, past_key_values=kept).last_hidden_state

    agree(run)


def test_rows_that_cannot_be_matched_to_the_cache_are_refused():
    model, kept = locant.swap(make("llama"), "tisa"), DynamicCache()
    pos = torch.stack([torch.arange(3), torch.arange(3) * 2])
    output(model, input_ids=IDS[:, :3].expand(2, -1), position_ids=pos, past_key_values=kept, use_cache=True)
    for layer in kept.layers:  # behind the back of the cache: whose rows the copies are is not known
        layer.batch_repeat_interleave(2)
    step = {"input_ids": IDS[:, :1].expand(4, -1), "position_ids": torch.full((4, 1), 3)}
    with pytest.raises(RuntimeError, match="holds 2 sequences and the batch has 4: cannot match the positions"):
        output(model, **step, past_key_values=kept)


@pytest.mark.parametrize("spec", ["fire:length=2", "learned:length=40"])
@pytest.mark.parametrize("kind", DECODERS)
def test_the_first_token_is_at_position_zero(kind, spec):
    """Schemes that are not shift-invariant see where a text begins: at 0, with a mask as with position_ids."""
    model, places = spread(locant.swap(make(kind), spec)), torch.arange(12)[None]
    expected = output(model, input_ids=IDS, position_ids=places)
    mask = torch.ones_like(IDS)
    calls = []
    with observing(before=calls.append):
        torch.testing.assert_close(output(model, input_ids=IDS), expected, **EXACT)
        torch.testing.assert_close(output(model, input_ids=IDS, attention_mask=mask), expected, **EXACT)
    where = [call.positions.of_queries(12, IDS.device) for call in calls]
    assert all(torch.equal(found, places) for found in where)
    moved = output(model, input_ids=IDS, position_ids=places + 1)
    assert (moved - expected).abs().max() > 1e-3  # or this test would see nothing


def test_dynamic_scaling_with_a_static_cache():
    """Empty places of the cache are no tokens."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}

    def run(model):
        kept = StaticCache(config=model.config, max_cache_len=100)
        model(IDS[:, :5], past_key_values=kept, use_cache=True)
        return model(IDS[:, 5:9], past_key_values=kept).logits

    agree(run, pair(rope_parameters=rope))


@pytest.mark.parametrize("pad", [0, 1, 5])
def test_roberta_counts_from_its_padding_token(pad):
    model = make("roberta", pad_token_id=pad)
    with torch.no_grad():
        model.embeddings.position_embeddings.weight.normal_()
        model.embeddings.position_embeddings.weight[pad] = 0
    ids = torch.randint(6, 60, (2, 9))
    before = output(model, input_ids=ids)
    found = locant.native(model)
    torch.testing.assert_close(output(locant.swap(model, found), input_ids=ids), before, **EXACT)
    locant.swap(model, "learned:length=9")
    output(model, input_ids=ids)


def test_attention_switched_after_the_swap_is_noticed():
    model = locant.swap(make("llama"), "alibi")
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="was set to 'eager', which ignores its scheme"):
        output(model, input_ids=IDS)
    model.set_attn_implementation("locant")
    output(model, input_ids=IDS)


def test_whether_attention_is_causal_is_found_by_running():
    """Splinter's attention modules have no attribute is_causal, and transformers' default is True."""
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model("splinter", **CONFIGS["roberta"])).eval()
    locant.swap(model, "nope")
    other = torch.cat([IDS[:, :-1], IDS[:, :1]], dim=1)
    changed = (output(model, input_ids=IDS) - output(model, input_ids=other))[:, :-1].abs().amax(-1)
    assert changed.min() > 1e-6  # every token sees the last one


def test_a_model_and_its_part():
    """Swapped here, swapped there: there is one plan, and native is native."""
    for kind in ("llama", "bert", "gpt2", "opt"):
        auto = AutoModelForCausalLM if kind != "bert" else AutoModel
        model = make(kind, auto)
        before = output(model, input_ids=IDS)
        part = model.base_model
        locant.swap(part, "alibi")
        locant.swap(model, "tisa+learned:length=30")
        assert "tisa" in str(locant.native(part))
        locant.swap(part, "huang4:clip=3")
        assert "huang4" in str(locant.native(model))
        locant.swap(part, "native")
        assert locant.native(model).kind != "swapped"
        assert torch.equal(output(model, input_ids=IDS), before)
        assert not any("locant" in name for name in model.state_dict())


def test_a_generic_family_can_be_swapped_again():
    config = AutoConfig.for_model("ernie", **CONFIGS["bert"])
    model = AutoModel.from_config(config).eval()
    before = output(model, input_ids=IDS)
    for spec in ("tisa", "alibi", "native"):
        locant.swap(model, spec)
    assert torch.equal(output(model, input_ids=IDS), before)


@pytest.mark.parametrize("kind", ["data2vec-text", "xlm-roberta-xl"])
def test_a_generic_family_that_counts_from_after_its_padding(kind):
    model = AutoModel.from_config(AutoConfig.for_model(kind, **CONFIGS["roberta"])).eval()
    table = model.embeddings.position_embeddings.weight.data.normal_()
    before = output(model, input_ids=IDS)
    found = locant.native(model)
    torch.testing.assert_close(found.table, table[2:])  # the first token has the first row
    locant.swap(model, found)
    torch.testing.assert_close(output(model, input_ids=IDS), before)


def test_mt5_is_a_t5():
    model = AutoModel.from_config(AutoConfig.for_model("mt5", **CONFIGS["t5"])).eval()
    given = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}
    model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data.normal_()
    before = output(model, **given)
    locant.swap(model, locant.native(model))
    torch.testing.assert_close(output(model, **given), before)


def test_one_scheme_in_both_stacks(tmp_path):
    model = spread(locant.swap(make("t5"), locant.scheme("tisa", n_heads=4)))
    given = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}
    model.save_pretrained(tmp_path)
    again = locant.load(tmp_path).eval()
    assert torch.equal(output(again, **given), output(model, **given))
    encoder, decoder = (stack.block[1].layer[0].SelfAttention for stack in (again.encoder, again.decoder))
    assert encoder.locant is decoder.locant


def test_what_is_read_from_one_model_is_not_tied_to_another():
    first, second = make("bert"), make("bert", seed=1)
    found = locant.native(first)
    locant.swap(first, found)
    locant.swap(second.to(torch.bfloat16), found)
    table = first.embeddings.position_embeddings.scheme.table
    assert table.dtype == torch.float32
    assert table is not second.embeddings.position_embeddings.scheme.table


def test_peft_and_a_shared_scheme():
    peft = pytest.importorskip("peft")
    model = locant.swap(make("bert"), locant.scheme("tisa", n_heads=4))
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"], modules_to_save=["locant"]))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "locant" in name and parameter.requires_grad:
                parameter.add_(1.0)
    trained = locant.native(model).stacks[0].layers
    assert trained[0] is trained[1]
    assert float(trained[1].amplitude.detach().mean()) > 0.9


def test_a_decoder_with_cross_attention_and_a_cache():
    decoder = make("bert", AutoModelForCausalLM, is_decoder=True, add_cross_attention=True)
    spread(locant.swap(decoder, "tisa"))
    states = torch.randn(1, 7, 32)
    with torch.no_grad():
        whole = decoder(IDS, encoder_hidden_states=states).logits
        first = decoder(IDS[:, :8], encoder_hidden_states=states, use_cache=True)
        rest = decoder(IDS[:, 8:], encoder_hidden_states=states, past_key_values=first.past_key_values).logits
    torch.testing.assert_close(rest, whole[:, 8:], **EXACT)


def test_arguments_of_the_auto_classes_reach_the_model(tmp_path):
    from transformers import AutoModelForSequenceClassification

    locant.swap(make("bert"), "tisa").save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    assert model.classifier.weight.shape[0] == 5
    half = locant.load(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


def test_vit_can_be_copied_after_a_training_step():
    import copy

    model = locant.swap(make("vit"), "learned:length=17").train()
    model(pixel_values=torch.randn(1, 3, 16, 16)).last_hidden_state.sum().backward()
    twin = copy.deepcopy(model).eval()
    pixels = torch.randn(1, 3, 16, 16)
    assert torch.equal(output(twin, pixel_values=pixels), output(model.eval(), pixel_values=pixels))


def test_things_that_are_not_specs_or_have_no_weights():
    with pytest.raises(TypeError, match="spec must be a string, a scheme or a list with one per layer, got int"):
        locant.swap(make("bert"), 3)
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model("bert", **CONFIGS["bert"]))
    with pytest.raises(ValueError, match="no weights yet"):
        locant.swap(model, "tisa")
