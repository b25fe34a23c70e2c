"""Rotations found in numbers: on synthetic vectors, and in models whose layout nobody has written down."""

import copy
import json
import math
from dataclasses import asdict

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

import locant
from locant.hf import families
from locant.hf.family import Family
from locant.hf.finding_rotary import find_rotary, rotary_of
from locant.hf.mechanisms import Rotary
from locant.hf.mechanisms.unturned import Form, Unturned, form_of_module
from locant.hf.turning import NotATurn, measure, measure_both
from locant.schemes import Nope, Rope
from tests.hf_models import TOKENS, make, output

POSITIONS = torch.arange(7)


def vectors(width, heads=3, dtype=torch.float32, seed=0):
    return torch.randn(2, heads, 7, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def turned(x, first, speeds, layout, magnitude=1.0, positions=POSITIONS):
    """One pair at a time, in float64, as the definition says."""
    y, pairs = x.double().clone(), len(speeds)
    for t, speed in enumerate(speeds):
        a, b = (first + t, first + pairs + t) if layout == "half" else (first + 2 * t, first + 2 * t + 1)
        for i, p in enumerate(positions.tolist()):
            c, s = magnitude * math.cos(speed * p), magnitude * math.sin(speed * p)
            y[:, :, i, a] = c * x[:, :, i, a].double() - s * x[:, :, i, b].double()
            y[:, :, i, b] = s * x[:, :, i, a].double() + c * x[:, :, i, b].double()
    return y.to(x.dtype)


# ---- pure functions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_a_pair_too_small_to_be_seen_belongs_to_the_turn(layout):
    """In Gemma 3 270M the learned weights of the norm make the first pair of some heads vanish."""
    x = vectors(8)
    x[..., [0, 4] if layout == "half" else [0, 1]] *= 1e-12
    found = measure(x, turned(x, 0, [1.0, 0.1, 0.01, 0.001], layout), POSITIONS, pairs=(4,))
    assert (found.first, found.pairs, found.layout) == (0, 4, layout)
    wanted = torch.tensor([0.1, 0.01, 0.001], dtype=torch.float64)
    torch.testing.assert_close(found.speeds[1:], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1.0, 1.3])
@pytest.mark.parametrize(
    ("width", "first", "speeds", "layout"),
    [
        (8, 0, [1.0, 0.1, 0.01, 0.001], "half"),
        (8, 0, [1.0, 0.1, 0.01, 0.001], "interleaved"),
        (12, 8, [1.0, 0.01], "half"),
        (12, 8, [1.0, 0.01], "interleaved"),
        (12, 3, [-1.0, -0.3, -0.2], "half"),
        (10, 1, [0.7, 0.7, 3.0], "interleaved"),
        (2, 0, [1.0], "interleaved"),
    ],
)
def test_a_turn_is_measured(width, first, speeds, layout, magnitude, dtype):
    x = vectors(width, dtype=dtype)
    found = measure(x, turned(x, first, speeds, layout, magnitude), POSITIONS)
    assert found is not None
    if len(speeds) > 1:  # one pair is the same in both layouts
        assert found.layout == layout
    assert (found.first, found.pairs) == (first, len(speeds))
    precision = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    assert found.magnitude == pytest.approx(magnitude, rel=precision)
    torch.testing.assert_close(found.speeds, torch.tensor(speeds, dtype=torch.float64), rtol=0, atol=precision)


def test_slow_pairs_that_do_not_move_are_counted_if_their_number_is_known():
    x = vectors(16)
    y = turned(x, 4, [1.0, 0.01, 1e-12], "interleaved")
    assert measure(x, y, POSITIONS).pairs == 2
    assert measure(x, y, POSITIONS, pairs=(5, 3)).pairs == 5  # any that is large enough explains the numbers
    assert measure(x, y, POSITIONS, pairs=(3,)).pairs == 3
    assert measure(x, turned(x, 4, [1.0, 0.01, 1e-12], "half"), POSITIONS).pairs == 3  # the second half starts there


def test_positions_with_gaps():
    x, positions = vectors(8), torch.tensor([0, 1, 2, 5, 30, 100, 1000])
    found = measure(x, turned(x, 0, [1.0, 0.1, 0.01, 0.001], "half", positions=positions), positions)
    torch.testing.assert_close(found.speeds, torch.tensor([1.0, 0.1, 0.01, 0.001]).double(), rtol=0, atol=1e-8)


def test_nothing_turns():
    x = vectors(8)
    assert measure(x, x.clone(), POSITIONS) is None
    assert measure_both((x, x), (x.clone(), x.clone()), POSITIONS) is None


NOT_TURNS = {
    "noise": lambda x: x + 0.01 * vectors(8, seed=1),
    "little noise on a turn": lambda x: turned(x, 0, [1.0, 0.1, 0.5, 0.2], "half") + 1e-4 * vectors(8, seed=1),
    "an absolute shift": lambda x: x + POSITIONS[:, None] * torch.linspace(-1, 1, 8),
    "a learned matrix": lambda x: x @ torch.randn(8, 8, generator=torch.Generator().manual_seed(2)),
    "a factor that grows": lambda x: x * (1 + 0.1 * POSITIONS[:, None]),
    "weights after a turn": lambda x: (
        turned(x / torch.linspace(1, 2, 8), 0, [1.0, 0.1, 0.01, 0.5], "half") * torch.linspace(1, 2, 8)
    ),
    "angles that are not in proportion": lambda x: turned(x, 0, [1.0, 0.1], "half", positions=POSITIONS**2),
}


@pytest.mark.parametrize("what", NOT_TURNS)
def test_what_is_not_a_turn_is_refused_with_its_error(what):
    x = vectors(8)
    with pytest.raises(NotATurn, match=r"change with position, but not by a rotation: the nearest is .* error of \d"):
        measure(x, NOT_TURNS[what](x), POSITIONS)


def test_queries_and_keys_must_turn_alike():
    q, k = vectors(8), vectors(8, heads=1, seed=1)
    speeds = [1.0, 0.1, 0.01, 0.001]

    def both(of_q, of_k):
        return measure_both((q, k), (of_q, of_k), POSITIONS)

    assert both(turned(q, 0, speeds, "half"), turned(k, 0, speeds, "half")).layout == "half"
    with pytest.raises(NotATurn, match=r"do not turn alike: .* factor 1 and .* factor 1.1"):
        both(turned(q, 0, speeds, "half"), turned(k, 0, speeds, "half", 1.1))
    with pytest.raises(NotATurn, match=r"do not turn alike: .*layout half.*layout interleaved"):
        both(turned(q, 0, speeds, "half"), turned(k, 0, speeds, "interleaved"))
    with pytest.raises(NotATurn, match="only queries turn"):
        both(turned(q, 0, speeds, "half"), k)
    with pytest.raises(NotATurn, match="only keys turn"):
        both(q, turned(k, 0, speeds, "half"))
    zero = torch.zeros_like(k)
    assert measure_both((q, zero), (turned(q, 0, speeds, "half"), zero), POSITIONS).layout == "half"


# ---- models --------------------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 64, "max_position_embeddings": 40, **TOKENS,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4,
           "num_experts_per_tok": 2}  # fmt: skip
LATENT = {
    "head_dim": 4, "num_key_value_heads": 4,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": 8,
    "first_k_dense_replace": 2,
}  # fmt: skip
WINDOW = {"sliding_window": 8}
LAYERS = {"num_hidden_layers": 4}

MODELS = {
    "smollm3": ({**LAYERS, "no_rope_layers": [1, 1, 1, 0]}, ["rope", "rope", "rope", "nope"]),
    "gemma3_text": (
        {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
        ["theta=10000", "theta=1000000"],
    ),
    "phi3": ({}, ["layout=half"] * 2),
    "olmo2": ({}, ["layout=half"] * 2),
    "granite": ({}, ["layout=half"] * 2),
    "mixtral": ({**EXPERTS, **WINDOW}, ["layout=half"] * 2),
    "qwen3_moe": (EXPERTS, ["layout=half"] * 2),
    "glm": ({}, ["layout=interleaved,partial=0.5"] * 2),
    "glm4": ({}, ["layout=interleaved,partial=0.5"] * 2),
    "cohere": ({}, ["layout=interleaved"] * 2),
    "cohere2": ({**LAYERS, **WINDOW}, ["interleaved", "interleaved", "interleaved", "nope"]),
    "deepseek_v3": (LATENT, ["partial=0.3333333333333333,first=8"] * 2),
    "deepseek_v2": (LATENT, ["layout=interleaved,partial=0.3333333333333333,first=8"] * 2),
    "persimmon": ({}, ["partial=0.5"] * 2),
    "starcoder2": ({}, ["layout=half"] * 2),
    "nemotron": ({}, ["partial=0.5"] * 2),
    "stablelm": ({}, ["partial=0.25"] * 2),
    "ernie4_5": ({}, ["layout=interleaved"] * 2),
    "helium": ({}, ["layout=interleaved"] * 2),
    "jetmoe": ({"kv_channels": 8, **EXPERTS}, ["layout=half"] * 2),
    "minicpm3": (LATENT, ["first=8"] * 2),
    "nanochat": ({}, ["scaling=table"] * 2),  # it turns the other way
    "modernbert-decoder": ({**WINDOW, "global_attn_every_n_layers": 2}, ["theta=160000", "theta=10000"]),
    "nomic_bert": ({}, ["theta=1000"] * 2),
    "eurobert": ({}, ["layout=half"] * 2),
    "hunyuan_v1_dense": ({}, ["layout=half"] * 2),
}
"""Model type -> changes of its config, and a part of the spec of every layer."""

SCALED = {
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}, "scaling=linear,factor=4"),
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 3.0}, "scaling=dynamic,factor=3,original=40"),
    "yarn": ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 20}, "scaling=yarn"),
    "yarn, ramp between pairs": (
        "llama",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 20, "truncate": False},
        "truncate=false",
    ),
    "yarn, no factor on attention": (
        "llama",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 20, "mscale": 1.0,
         "mscale_all_dim": 1.0},
        "attention_factor=1",
    ),
    "llama3": (
        "llama",
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 20},
        "scaling=llama3",
    ),
    "longrope": (
        "phi3",
        {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 4.0, 8.0, 9.0],
         "original_max_position_embeddings": 20, "factor": 2.0},
        "scaling=longrope,original=20",
    ),
    "proportional": (
        "llama", {"rope_type": "proportional", "partial_rotary_factor": 0.5}, "scaling=table",
    ),
}  # fmt: skip


def build(kind, changes):
    config = AutoConfig.for_model(kind)
    known = {name: value for name, value in {**SMALL, **changes}.items() if name in config.to_dict() or name in changes}
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(kind, **known)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
            elif "norm" in name and "query_layernorm" not in name and "key_layernorm" not in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def law(model, *lengths):
    """The largest change of an output when a model's own positions become schemes, as a share of the largest output."""
    rows = [torch.randint(4, 60, (2, n), generator=torch.Generator().manual_seed(n)) for n in lengths]
    before = [output(model, input_ids=ids) for ids in rows]
    found = locant.native(model)
    assert all(torch.equal(output(model, input_ids=ids), y) for ids, y in zip(rows, before, strict=True))
    locant.swap(model, found)
    after = [output(model, input_ids=ids) for ids in rows]
    return found, max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(after, before, strict=True))


@pytest.mark.parametrize("kind", MODELS)
def test_rotary_positions_of_any_layout_are_read(kind):
    changes, expected = MODELS[kind]
    found, error = law(build(kind, changes), 12, 60)
    assert error < 2e-5
    specs = found.rotary
    assert specs is not None
    assert len(specs) == len(expected)
    assert all(part in spec for part, spec in zip(expected, specs, strict=True)), specs


@pytest.mark.parametrize("kind", SCALED)
def test_scalings_are_read_and_hold_beyond_the_original_length(kind):
    family, parameters, expected = SCALED[kind]
    changes = {"original_max_position_embeddings": 20} if family == "phi3" else {}
    model = build(family, {**changes, "rope_parameters": {"rope_theta": 100.0, **parameters}})
    found, error = law(model, 12, 20, 21, 40, 41, 90)
    assert error < 2e-5
    assert all(expected in spec for spec in found.rotary), found.rotary


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_frequencies_are_those_that_the_model_uses(dtype):
    """`model.to` rounds the frequencies of the model too; the scheme must have the rounded ones."""
    exact = locant.native(make("llama")).stacks[0].layers[0]
    model = make("llama").to(dtype)
    speeds = model.rotary_emb.inv_freq.double()
    found = locant.native(model).stacks[0].layers[0]
    one = torch.ones(1, dtype=torch.long)
    torch.testing.assert_close(found.frequencies(one), speeds, rtol=1e-6, atol=0)
    assert not torch.allclose(exact.frequencies(one), speeds, rtol=1e-6, atol=0)


def test_a_table_of_speeds_is_saved_and_loaded(tmp_path):
    model = build("nanochat", {})
    _, error = law(model, 12)
    assert error < 2e-5
    ids = torch.arange(4, 34)[None]
    before = output(model, input_ids=ids)
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        again = locant.load(tmp_path, dtype=dtype).eval()
        schemes = locant.native(again).stacks[0].layers
        assert torch.equal(schemes[0].speeds, model.layers[0].self_attn.locant.speeds)
        if dtype == torch.float32:
            torch.testing.assert_close(output(again, input_ids=ids), before, rtol=0, atol=1e-6)


def test_complex_rotations_are_silenced_also_before_the_weights_are_loaded(tmp_path):
    model = locant.swap(build("deepseek_v2", LATENT), "alibi")
    ids = torch.arange(4, 20)[None]
    before = output(model, input_ids=ids)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(output(locant.load(tmp_path).eval(), input_ids=ids), before, rtol=0, atol=1e-6)


def test_reading_leaves_the_model_as_it_was():
    model = build("smollm3", {**LAYERS, "no_rope_layers": [1, 1, 1, 0]})
    before = copy.deepcopy(model.state_dict())
    rotary = model.rotary_emb
    locant.native(model)
    assert model.rotary_emb is rotary
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_dynamic_model_is_not_changed_by_questions_about_long_rows():
    model = build("llama", {"rope_parameters": {"rope_theta": 100.0, "rope_type": "dynamic", "factor": 3.0}})
    before = model.rotary_emb.inv_freq.clone()
    locant.native(model)
    assert torch.equal(model.rotary_emb.inv_freq, before)
    assert model.rotary_emb.max_seq_len_cached == 40


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_weights_between_rotation_and_attention_are_refused_with_the_error():
    model = build("hunyuan_v1_dense", {})
    with torch.no_grad():
        model.layers[1].self_attn.query_layernorm.weight.copy_(torch.linspace(0.5, 1.5, 8))
    with pytest.raises(NotImplementedError, match=r"HunYuanDenseV1Attention coordinates 0 to 7 of 8 .* error of \d"):
        locant.native(model)


class Strange(nn.Module):
    """A rotary module whose frequencies change where no config says so."""

    def __init__(self, original):
        super().__init__()
        self.original, self.config = original, original.config

    def forward(self, x, position_ids):
        slower = 1 + int(position_ids.max() >= 70)
        cos, sin = self.original(x, position_ids)
        angle = torch.atan2(sin, cos) / slower
        return angle.cos().to(cos), angle.sin().to(cos)


def test_frequencies_that_change_with_the_length_unknown_to_the_config_are_refused():
    model = build("llama", {})
    model.rotary_emb = Strange(model.rotary_emb)
    with pytest.raises(NotImplementedError, match=r"no frequencies explain them .*other angles than Strange in"):
        locant.native(model)


def test_another_module_with_the_same_angles_nearby_does_not_vouch(monkeypatch):
    model = build("llama", {})
    model.add_module("another", copy.deepcopy(model.rotary_emb))
    model.rotary_emb = Strange(model.rotary_emb)
    model.layers[0].mlp.register_forward_hook(lambda *_: model.another(torch.zeros(1), torch.arange(7)[None]) and None)
    monkeypatch.setitem(families.FAMILIES, "llama", Family(Rotary(("rotary_emb", "another"))))
    with pytest.raises(NotImplementedError, match="other angles than Strange"):
        locant.native(model)


def test_rotation_of_the_values_is_refused():
    model = build("llama", {})
    attention = model.layers[0].self_attn
    plain = type(attention).forward

    def forward(hidden_states, position_embeddings, **kwargs):
        cos = position_embeddings[0]
        attention.v_proj.register_forward_hook(lambda module, args, out: out * cos.repeat(1, 1, 2), always_call=False)
        try:
            return plain(attention, hidden_states, position_embeddings, **kwargs)
        finally:
            attention.v_proj._forward_hooks.clear()

    attention.forward = forward
    with pytest.raises(NotImplementedError, match="LlamaAttention uses rotary positions for more than its queries and"):
        locant.native(model)


class Handing(nn.Module):
    """Hands on what a rotary module makes."""

    def __init__(self, rotary):
        super().__init__()
        self.rotary = (rotary,)  # not a submodule

    def forward(self, *args, **kwargs):
        return self.rotary[0](*args, **kwargs)


def test_a_module_that_hands_rotations_on_is_not_their_source():
    model = build("llama", {})
    model.add_module("made", model.rotary_emb)
    model.rotary_emb = Handing(model.made)
    assert find_rotary(model, model) == ["made"]


def with_two_rotary_modules():
    """A Llama whose second layer has a rotary module of its own, with other frequencies."""
    model = build("llama", {})
    another = copy.deepcopy(model.rotary_emb)
    another.inv_freq /= 2
    model.add_module("another", another)
    attention = model.layers[1].self_attn
    plain = type(attention).forward

    def forward(hidden_states, position_embeddings, **kwargs):
        position_embeddings = model.another(hidden_states, torch.arange(hidden_states.shape[1])[None])
        return plain(attention, hidden_states, position_embeddings, **kwargs)

    attention.forward = forward
    return model


def test_a_rotary_module_that_would_not_be_silenced_is_refused():
    model = with_two_rotary_modules()
    with pytest.raises(NotImplementedError, match="LlamaRotaryEmbedding makes rotary positions too, beside rotary_emb"):
        locant.native(model)


def test_several_rotary_modules_are_found_silenced_and_read(monkeypatch):
    model = with_two_rotary_modules()
    assert find_rotary(model, model) == ["rotary_emb", "another"]
    monkeypatch.setitem(families.FAMILIES, "llama", Family(rotary_of(model, model)))
    found, error = law(model, 12, 60)
    assert error < 2e-5
    assert [("scaling=none" in spec, "scaling=table" in spec) for spec in found.rotary] == [
        (True, False),
        (False, True),
    ]
    locant.swap(model, "nope")
    assert isinstance(model.another, Unturned)
    locant.swap(model, "native")
    assert not isinstance(model.another, Unturned)


def test_positions_in_several_dimensions_that_are_equal(monkeypatch):
    """Qwen2-VL numbers text three times; its rotary module gets [3, batch, length] and returns [batch, length, 8]."""
    model = build("qwen2_vl_text", {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}})
    mechanism = rotary_of(model, model)
    assert mechanism.forms == (Form(False, (("", 8),), dropped=1),)
    monkeypatch.setitem(families.FAMILIES, "qwen2_vl_text", Family(mechanism))
    _, error = law(model, 12, 60)
    assert error < 2e-5


def test_a_second_user_of_the_rotations_is_refused():
    """DeepSeek V3.2 chooses keys by an indexer, which rotates queries and keys of its own."""
    indexer = {"index_topk": 2048, "index_n_heads": 2, "index_head_dim": 8}
    with pytest.raises(NotImplementedError, match="DeepseekV32Attention attends to a few keys alone"):
        locant.native(build("deepseek_v32", {**LATENT, **EXPERTS, **indexer}))


# ---- modules that rotate nothing ----------------------------------------------------------------------------------


def test_the_form_of_a_rotary_module_is_found_without_its_weights():
    assert form_of_module(build("llama", {}).rotary_emb) == Form(False, (("", 8),))
    assert form_of_module(build("deepseek_v2", LATENT).rotary_emb) == Form(True, (("", 2),))
    assert form_of_module(build("gpt_oss", {**EXPERTS, **WINDOW}).rotary_emb) == Form(False, (("", 4),))
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model("gemma3_text", **{**SMALL, **WINDOW}))
    assert set(form_of_module(model.rotary_emb).columns) == {("sliding_attention", 8)}
    with pytest.raises(NotImplementedError, match=r"kind of rotary embedding: Linear cannot be called with hidden"):
        form_of_module(nn.Linear(2, 2))


@pytest.mark.parametrize("kind", ["llama", "deepseek_v2", "gemma3_text"])
def test_a_rotary_module_is_found_in_numbers_and_described_by_plain_data(kind):
    model = build(kind, LATENT if kind == "deepseek_v2" else WINDOW)
    assert find_rotary(model, model) == ["rotary_emb"]
    found = rotary_of(model, model)
    assert found.forms == (form_of_module(model.rotary_emb),)
    written = json.loads(json.dumps(asdict(found)))
    forms = [
        Form(form["complex"], tuple((name, width) for name, width in form["columns"]), form["dropped"])
        for form in written["forms"]
    ]
    assert Rotary(tuple(written["paths"]), tuple(forms), written["kind"]) == found


def test_models_without_rotary_modules():
    model = make("bert")
    assert find_rotary(model, model) == []
    assert rotary_of(model, model) is None


def test_what_rotates_nothing():
    x, positions = torch.zeros(2, 5, 8, dtype=torch.bfloat16), torch.arange(5)[None]
    cos, sin = Unturned(Form(False, (("", 8), ("full", 4))))(x, positions)
    assert cos.dtype == sin.dtype == torch.bfloat16
    assert torch.equal(cos, torch.ones(1, 5, 8, dtype=x.dtype))
    assert torch.equal(sin, torch.zeros(1, 5, 8, dtype=x.dtype))
    assert Unturned(Form(False, (("", 8), ("full", 4))))(x, positions, layer_type="full")[0].shape == (1, 5, 4)
    whole = Unturned(Form(True, (("", 2),), dropped=1))(x, positions.expand(3, 2, 5))
    assert torch.equal(whole, torch.ones(2, 5, 2, dtype=torch.complex64))
    original = build("llama", {}).rotary_emb
    replaced = Unturned(Form(False, (("", 8),)), original)
    assert (replaced.config, replaced.rope_type) == (original.config, "default")
    assert not list(replaced.buffers())
    with pytest.raises(TypeError, match="called without positions"):
        Unturned(Form(False, (("", 8),)))(x)


def test_layers_without_rotation_are_nope():
    layers = locant.native(build("smollm3", {**LAYERS, "no_rope_layers": [1, 0, 1, 0]})).stacks[0].layers
    assert [type(scheme) for scheme in layers] == [Rope, Nope, Rope, Nope]
