"""Models whose attention does not go through transformers' interface: right answers, and restored bit for bit."""

import math
import pickle
from collections import Counter

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, ImageGPTForCausalImageModeling
from transformers.models.bloom import modeling_bloom
from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention as DebertaAttention
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention as DebertaV2Attention
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

import locant
from locant.analysis import probe
from locant.analysis.steps import LOGITS, QUERY
from locant.analysis.variance import measure
from locant.hf.families import FAMILIES, REFUSED
from locant.hf.finding import FOUND
from locant.hf.listening import observing
from locant.hf.seam import through_seam
from locant.hf.seams.families import SEAM_FAMILIES, SEAMS
from tests.adaptations import fitted
from tests.hf.test_swapping import EXACT
from tests.hf_models import check_kept_and_added, output, spread
from tests.seam_models import CONFIGS, DECODERS, MORE, inputs, make, sides

LAW = 2e-5
"""Largest difference between a model and the same with its own positions as schemes, over its largest output."""


def real_tokens(given):
    return given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()


class ImageGPT:
    """ImageGPT is in no Auto class of language models."""

    from_config = ImageGPTForCausalImageModeling._from_config


def with_head(kind):
    return make(kind, ImageGPT if kind == "imagegpt" else AutoModelForCausalLM)


def test_every_family_with_a_seam_is_tested():
    elsewhere = {"mpnet", "led", "longformer"}
    assert {family for family, _ in CONFIGS.values()} | elsewhere | set(MORE) == set(SEAM_FAMILIES) | set(SEAMS)
    assert SEAM_FAMILIES.items() <= FAMILIES.items()
    assert not set(FAMILIES) & set(REFUSED)


@pytest.mark.parametrize("kind", CONFIGS)
def test_native_positions_as_a_scheme_change_nothing(kind):
    """And a model that is only observed, or swapped back, computes the same bits."""
    model = make(kind)
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    config, found = model.config.to_dict(), locant.native(model)
    for side in sides(kind):
        given = inputs(kind, padding=side)
        before, real, heads = output(model, **given), real_tokens(given), Counter()
        with through_seam(model), observing(before=lambda call, heads=heads: heads.update([tuple(call.query.shape)])):
            assert torch.equal(output(model, **given), before)
        shape, count = heads.most_common()[0]
        assert count == 2
        assert (shape[0], shape[2]) == (2, 9)
        locant.swap(model, found)
        far = (output(model, **given) - before)[real].abs().max()
        assert far <= LAW * before[real].abs().max()
        locant.swap(model, "tisa+learned:length=40")
        assert (output(model, **given) - before)[real].abs().max() > 0.01
        locant.swap(model, "native")
        assert torch.equal(output(model, **given), before)
    after = model.state_dict()
    assert list(after) == list(weights)
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    assert model.config.to_dict() == config
    assert {name for module in model.modules() for name in vars(module) if "locant" in name} <= {FOUND}


def test_what_is_read():
    expected = {
        "squeezebert": "absolute: learned:length=40",
        "luke": "absolute: learned:length=38",
        "roformer": "rotary: rope:layout=interleaved,partial=1",
        "gptj": "rotary: rope:layout=interleaved,partial=0.5",
        "bloom": "bias: alibi",
        "mpt": "bias: alibi",
        "falcon": "rotary: rope:theta=10000,layout=half,partial=1,scaling=none",
        "falcon, alibi": "bias: alibi:scaled=true,rounding=bfloat16",
        "deberta": "absolute and disentangled: learned:length=40+deberta:buckets=6,spacing=linear",
        "deberta, c2p": "disentangled: deberta:buckets=40,spacing=linear,products=c2p",
        "deberta-v2": "disentangled: deberta:buckets=4,max_distance=8",
        "xlnet": "relative: xl",
    }
    assert {kind: str(locant.native(make(kind))) for kind in expected} == expected


def without_positions(kind, monkeypatch):
    """The model with its own positions set to nothing, in its weights or functions."""
    model = make(kind)
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith(("position_embeddings", "wpe")) and isinstance(module, nn.Embedding):
                module.weight.zero_()
            if type(module).__name__ == "XGLMSinusoidalPositionalEmbedding":
                module.weights.zero_()
                continue
            table = getattr(module, "embed_positions", None)
            table = getattr(table, "weight", None) if isinstance(table, nn.Module) else table
            if isinstance(table, torch.Tensor):
                table[:] = table[:1].clone()
            for buffer, value in module.named_buffers(recurse=False):
                if "inv_freq" in buffer:
                    value.zero_()
            if type(module).__name__ == "XLNetRelativeAttention":
                module.r.zero_()
    slopes = modeling_bloom._get_alibi_slopes
    monkeypatch.setattr(modeling_bloom, "_get_alibi_slopes", lambda *args: 0 * slopes(*args))
    monkeypatch.setattr(modeling_mpt, "build_mpt_alibi_tensor", lambda heads, length, *_: torch.zeros(heads, 1, length))
    alibi = modeling_falcon.build_alibi_tensor
    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", lambda *args, **kwargs: 0 * alibi(*args, **kwargs))
    monkeypatch.setattr(DebertaAttention, "disentangled_att_bias", lambda *_: 0.0)
    monkeypatch.setattr(DebertaV2Attention, "disentangled_attention_bias", lambda *_: 0.0)
    return model


@pytest.mark.parametrize("kind", CONFIGS)
def test_silenced_exactly(kind, monkeypatch):
    model, silent = locant.swap(make(kind), "nope"), without_positions(kind, monkeypatch)
    for side in sides(kind):
        given = inputs(kind, padding=side)
        real = real_tokens(given)
        torch.testing.assert_close(output(model, **given)[real], output(silent, **given)[real], **EXACT)


# ---- attention by hand, in float64 -----------------------------------------------------------------


def attention_by_hand(q, k, v, scale, visible):
    """[H, L, D] with ALiBi of four heads."""
    out = torch.zeros_like(q)
    for h in range(4):
        for i in range(q.shape[1]):
            keys = [j for j in range(k.shape[1]) if visible(i, j)]
            logits = torch.stack([scale * (q[h, i] @ k[h, j]) - 2.0 ** -(2 * (h + 1)) * abs(i - j) for j in keys])
            out[h, i] = sum(w * v[h, j] for w, j in zip(logits.softmax(0), keys, strict=True))
    return out.transpose(0, 1).flatten(1)


def heads(x):
    return x.view(len(x), 4, 8).transpose(0, 1)


def seen(model, module, **given):
    """The input and the output of a module, each [L, width]."""
    found = {}

    def record(_, args, kwargs, result):
        x, y = args[0] if args else kwargs["hidden_states"], result[0] if isinstance(result, tuple) else result
        found.update(x=x[0], y=y[0])

    hook = module.register_forward_hook(record, with_kwargs=True)
    output(model, **given)
    hook.remove()
    return found["x"], found["y"]


def test_an_encoder_by_hand():
    model = locant.swap(make("megatron-bert").double(), "alibi")
    module = model.encoder.layer[1].attention.self
    x, y = seen(model, module, **inputs("megatron-bert"))
    q, k, v = (heads(layer(x)) for layer in (module.query, module.key, module.value))
    torch.testing.assert_close(y, attention_by_hand(q, k, v, 1 / math.sqrt(8), lambda i, j: True), rtol=0, atol=1e-10)


def test_deberta_by_hand():
    """Three products, of which one is left: the scale of DeBERTa stays 1/√(3·8)."""
    model = locant.swap(make("deberta-v2").double(), "alibi")
    module = model.encoder.layer[1].attention.self
    x, y = seen(model, module, **inputs("deberta-v2"))
    q, k, v = (heads(layer(x)) for layer in (module.query_proj, module.key_proj, module.value_proj))
    torch.testing.assert_close(y, attention_by_hand(q, k, v, 1 / math.sqrt(24), lambda i, j: True), rtol=0, atol=1e-10)


def test_a_decoder_by_hand_and_with_a_cache():
    """GPT-Neo: no scale, and the second layer sees four tokens."""
    model = locant.swap(make("gpt_neo").double(), "alibi")
    ids, module = inputs("gpt_neo")["input_ids"], model.h[1].attn.attention
    x, y = seen(model, module, input_ids=ids)
    q, k, v = (heads(layer(x)) for layer in (module.q_proj, module.k_proj, module.v_proj))
    expected = module.out_proj(attention_by_hand(q, k, v, 1.0, lambda i, j: i - 4 < j <= i))
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)
    cache = DynamicCache(config=model.config)
    for first, last in ((0, 3), (3, 7), (7, 8), (8, 9)):
        _, step = seen(model, module, input_ids=ids[:, first:last], past_key_values=cache, use_cache=True)
        torch.testing.assert_close(step, expected[first:last], rtol=0, atol=1e-10)


# ---- padding, caches, windows ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONFIGS)
def test_padding_does_not_change_real_tokens(kind):
    for spec in ("huang4:clip=3", "sinusoidal"):
        model = spread(locant.swap(make(kind).double(), spec))
        for side in sides(kind)[1:3]:
            given = inputs(kind, padding=side)
            real = real_tokens(given)[0]
            alone = output(model, input_ids=given["input_ids"][:1, real])
            torch.testing.assert_close(output(model, **given)[:1, real], alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (kind, spec)
        for number, kind in enumerate(DECODERS)
        for spec in ("native", ("huang4:clip=3", "learned:length=40")[number % 2])
    ],
)
def test_generation(kind, spec):
    """With a cache as without, and in a left-padded batch as alone. Its own positions generate what the model does."""
    model = with_head(kind)
    torch.manual_seed(2)
    ids = torch.randint(3, 60, (2, 7))
    batch = torch.cat([torch.cat([torch.ones(1, 3, dtype=torch.long), ids[:1, :4]], dim=1), ids[1:]])
    mask = (torch.arange(7) >= torch.tensor([[3], [0]])).long()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    before = model.generate(batch, attention_mask=mask, **options)
    spread(locant.swap(model, spec)) if spec != "native" else locant.swap(model, locant.native(model))
    together = model.generate(batch, attention_mask=mask, **options)
    assert torch.equal(model.generate(batch, attention_mask=mask, use_cache=False, **options), together)
    if spec == "native":
        assert torch.equal(together, before)
    else:
        alone = model.generate(ids[:1, :4], attention_mask=torch.ones(1, 4, dtype=torch.long), **options)
        assert torch.equal(together[0, 7:], alone[0, 4:])


@pytest.mark.parametrize("kind", DECODERS)
def test_several_tokens_after_cached_ones(kind):
    model = spread(locant.swap(with_head(kind), "huang4:clip=3"))
    ids, cache = inputs(kind)["input_ids"], DynamicCache(config=model.config)
    whole = output(model, input_ids=ids, use_cache=False)
    for first, last in ((0, 4), (4, 7), (7, 9)):
        step = output(model, input_ids=ids[:, first:last], past_key_values=cache, use_cache=True)
        torch.testing.assert_close(step, whole[:, first:last], **EXACT)


@pytest.mark.parametrize("kind", [kind for kind in DECODERS if kind != "imagegpt"])
def test_a_static_cache(kind):
    model = spread(locant.swap(with_head(kind), "tisa"))
    given = inputs(kind, padding="left")
    options = {
        "max_new_tokens": 4,
        "do_sample": False,
        "pad_token_id": 1,
        "eos_token_id": None,
        "disable_compile": True,
    }
    dynamic = model.generate(**given, **options)
    assert torch.equal(model.generate(**given, cache_implementation="static", **options), dynamic)


def test_falcon_rounds_its_biases():
    """Beyond 256 tokens bfloat16 has no odd numbers; ALiBi without rounding is far from Falcon's."""
    model, ids = make("falcon, alibi"), torch.randint(3, 60, (1, 600))
    before = output(model, input_ids=ids)
    locant.swap(model, locant.native(model))
    assert (output(model, input_ids=ids) - before).abs().max() <= LAW * before.abs().max()
    locant.swap(model, "alibi:scaled=true")
    assert (output(model, input_ids=ids) - before).abs().max() > 100 * LAW * before.abs().max()


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "mpt"])
def test_longer_inputs_than_the_model_had_positions(kind):
    model = locant.swap(make(kind), "alibi")
    ids = torch.randint(3, 60, (1, 90))
    whole = output(model, input_ids=ids)
    assert whole.isfinite().all()
    if kind in DECODERS:
        torch.testing.assert_close(output(model, input_ids=ids[:, :70]), whole[:, :70], **EXACT)


# ---- training, weights, saving ---------------------------------------------------------------------


def undropped(kind):
    model = make(kind)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attn_dropout_p", "hidden_dropout", "dropout_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


@pytest.mark.parametrize("kind", CONFIGS)
def test_gradients_with_and_without_checkpointing(kind):
    """Two batches before one backward pass: what is run again must see the positions of its own batch."""
    model = spread(locant.swap(undropped(kind), "huang4:clip=3")).train()
    grads = []
    for checkpointing in (False, True):
        if checkpointing and not model.supports_gradient_checkpointing:
            break
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        first, second = inputs(kind), inputs(kind, length=6)
        sum(model(**given).last_hidden_state.square().sum() for given in (first, second)).backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    tables = {name for name, _ in model.named_parameters() if name.endswith("locant.table")}
    assert len(tables) == 2
    assert all(grads[0][name].abs().sum() > 0 for name in tables)
    for name, grad in grads[-1].items():
        torch.testing.assert_close(grad, grads[0][name], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "kind",
    ["gpt_neo", "gptj", "bloom", "mpt", "falcon, alibi", "squeezebert", "deberta", "deberta-v2", "rembert", "xlnet"],
)
def test_attention_weights_are_dropped_out_in_training(kind):
    model = locant.swap(undropped(kind), "alibi").train()
    attention = model.base_model.get_submodule(locant.hf.plan.plan_of(model).stacks[0].attentions[0].name)
    given = inputs(kind)
    assert torch.equal(output(model, **given), output(model, **given))
    if kind == "mpt":
        attention.attn_dropout_p = 0.5
    for name in ("dropout", "attn_dropout", "attention_dropout"):
        if isinstance(getattr(attention, name, None), nn.Dropout):
            getattr(attention, name).p = 0.5
    assert not torch.equal(output(model, **given), output(model, **given))


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_are_returned_when_asked_for(kind):
    if kind == "falcon, alibi":
        return  # with sdpa transformers adds its bool mask to the logits, with eager its ALiBi twice
    model, given = make(kind, **{"attn_implementation": "eager"} if "falcon" in kind else {}), inputs(kind)
    with torch.no_grad():
        before = model(**given, output_attentions=True).attentions
        with through_seam(model):
            observed = model(**given, output_attentions=True).attentions
        locant.swap(model, locant.native(model))
        result = model(**given, output_attentions=True)
    assert len(before) == 2
    for theirs, same, ours in zip(before, observed, result.attentions, strict=True):
        assert torch.equal(same, theirs)
        torch.testing.assert_close(ours, theirs.softmax(-1) if kind == "squeezebert" else theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(result.last_hidden_state, output(model, **given), **EXACT)


@pytest.mark.parametrize("kind", CONFIGS)
def test_saved_pickled_and_opened_again(kind, tmp_path):
    given, plain = inputs(kind), make(kind)
    native = output(plain, **given)
    for number, spec in enumerate((locant.native(plain), "tisa+learned:length=40")):
        model = spread(locant.swap(make(kind), spec), std=0.1)
        before = output(model, **given)
        again = pickle.loads(pickle.dumps(model))
        assert torch.equal(output(again, **given), before)
        assert torch.equal(output(locant.swap(again, "native"), **given), native)
        model.save_pretrained(tmp_path / str(number))
        assert torch.equal(output(locant.load(tmp_path / str(number)).eval(), **given), before)


@pytest.mark.parametrize("kind", ["falcon", "deberta-v2"])
def test_compiled_without_a_graph_break(kind):
    model, given = spread(locant.swap(make(kind), "tisa")), inputs(kind)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        result = compiled(**given).last_hidden_state
    torch.testing.assert_close(result, output(model, **given), **EXACT)


@pytest.mark.parametrize("kind", ["codegen", "gpt_neo", "bloom", "deberta", "xlnet"])
def test_half_precision(kind):
    model, given = spread(locant.swap(make(kind), "tisa"), std=0.05), inputs(kind)
    before = output(model, **given)
    after = output(model.to(torch.bfloat16), **given)
    assert (after - before).abs().max() < 0.1 * before.abs().max()


@pytest.mark.parametrize("kind", ["gptj", "codegen", "roformer"])
def test_a_rotary_table_in_half_precision_is_read(kind):
    """Its sines and cosines are rounded, and no more than that."""
    model, given = make(kind).to(torch.bfloat16), inputs(kind)
    before = output(model, **given).float()
    read = locant.native(model)
    assert all("rope" in str(scheme) for scheme in read.stacks[0].layers)
    after = output(locant.swap(model, read), **given).float()
    assert (after - before).abs().max() < 0.05 * before.abs().max()
    other = make(kind).to(torch.bfloat16)
    for table in [x for name, x in other.named_buffers() if "embed_positions" in name] + [
        x for name, x in other.named_parameters() if "embed_positions" in name
    ]:
        table.data.mul_(1.03)
    with pytest.raises(NotImplementedError, match=r"more than rounding to torch\.bfloat16 explains"):
        locant.native(other)


def test_its_own_positions_are_kept_and_something_added():
    for kind in ("bloom", "gptj", "deberta", "xlnet"):
        check_kept_and_added(make(kind), inputs(kind))


def test_cross_attention_is_as_it_was():
    """The masks of a swapped model are bool; cross-attention adds them to its logits."""
    model = make("rembert decoder", add_cross_attention=True)
    given = inputs("rembert decoder")
    given["encoder_hidden_states"] = torch.randn(2, 5, 32)
    given["encoder_attention_mask"] = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    before = output(model, **given)
    locant.swap(model, locant.native(model))
    assert not hasattr(model.encoder.layer[0].crossattention.self, "locant")
    torch.testing.assert_close(output(model, **given), before, **EXACT)
    given["encoder_attention_mask"][0, 0] = 0
    assert (output(model, **given) - before)[0].abs().max() > 1e-3


def test_logits_that_are_not_q_k_are_not_measured_as_such():
    for kind in CONFIGS:
        if kind.startswith("xlnet"):
            with pytest.raises(NotImplementedError, match=r"XLNetModel do not take hidden states as \[batch, length"):
                measure(make(kind), sequences=2, length=8)
            continue
        steps = {row.step for row in measure(make(kind), sequences=2, length=8).rows}
        differ = ("gpt_neo", "imagegpt", "bloom", "mpt", "falcon, alibi", "deberta", "squeezebert")
        assert QUERY in steps or kind == "squeezebert"  # whose layers take [batch, width, length]
        # GPT-Neo's first layer sees everything.
        assert (LOGITS in steps) == (not kind.startswith(differ) or kind.startswith("gpt_neo")), kind


def test_a_model_that_hides_the_future_itself_has_no_bidirectional_twin():
    ids = inputs("gpt_neo")["input_ids"]
    with pytest.raises(ValueError, match="hides the future itself"):
        probe.states_of(make("gpt_neo"), lambda number: ids, bidirectional=True)(0)
    assert probe.states_of(make("gptj"), lambda number: ids, bidirectional=True)(0)


def test_masks_of_numbers_keep_windows():
    model, given = locant.swap(make("gpt_neo"), "tisa"), inputs("gpt_neo")
    mask = torch.ones(2, 1, 9, 9).tril()
    logits = torch.zeros_like(mask).masked_fill(mask == 0, torch.finfo(torch.float32).min)
    for each in (mask.bool(), mask.long(), logits):
        torch.testing.assert_close(output(model, **given, attention_mask=each), output(model, **given), **EXACT)


@pytest.mark.parametrize("kind", ["bloom", "gptj", "squeezebert", "deberta-v2"])
def test_fitted(kind):
    """A fit starts from the model's own positions as schemes; SqueezeBERT's layers cannot be replayed."""
    model = make(kind)
    fitted(model, "tisa:kernels=3", tokens=64)
    schemes = locant.native(model).stacks[0].layers
    assert [str(scheme) for scheme in schemes] == ["tisa:kernels=3"] * 2
    assert all(scheme.amplitude.abs().max() > 0.2 for scheme in schemes)  # where they start, it is about 0.1


# ---- refused, in words -----------------------------------------------------------------------------


def refuses(model, message, error=NotImplementedError, **given):
    with pytest.raises(error, match=message):
        output(model, **given)


def test_inputs_that_a_swapped_model_cannot_read():
    words = inputs("luke")
    entities = {
        "entity_ids": torch.ones(2, 1, dtype=torch.long),
        "entity_position_ids": torch.tensor([[[1, 2]], [[1, 2]]]),
    }
    luke = make("luke")
    before = output(luke, **words, **entities)
    with through_seam(luke):
        assert torch.equal(output(luke, **words, **entities), before)
    refuses(locant.swap(luke, "alibi"), "a swapped LUKE model reads words alone", **words, **entities)

    xlnet, given = locant.swap(make("xlnet"), "alibi"), inputs("xlnet")
    same = torch.ones_like(given["input_ids"])
    torch.testing.assert_close(output(xlnet, **given, token_type_ids=same), output(xlnet, **given))
    refuses(xlnet, "one segment", **given, token_type_ids=torch.arange(9).expand(2, 9) // 5)
    mems = xlnet(**given, use_mems=True).mems
    refuses(xlnet, "cannot use mems: it got 9 tokens and 9 states", **given, mems=mems)

    square = torch.ones(2, 1, 9, 9).tril()
    refuses(locant.swap(make("mpt"), "tisa"), r"takes attention masks \[batch, length\]", TypeError, **inputs("mpt"),
            attention_mask=square.bool())  # fmt: skip
    refuses(locant.swap(make("deberta"), "tisa"), "masks of 0 and 1", TypeError, **inputs("deberta"),
            attention_mask=-1e4 * (1 - square[:, :, :1]))  # fmt: skip
    for kind in ("megatron-bert", "gpt_neo", "bloom", "gptj", "xglm"):
        mask = torch.zeros(2, 1, 9, 9).masked_fill(square == 0, -0.5)
        with pytest.raises((TypeError, ValueError), match=r"mask|unpack"):
            output(locant.swap(make(kind), "tisa"), **inputs(kind), attention_mask=mask)


def test_xlnet_in_one_segment_is_xlnet():
    model, given = make("xlnet"), inputs("xlnet")
    given["token_type_ids"] = torch.ones_like(given["input_ids"])
    before = output(model, **given)
    locant.swap(model, locant.native(model))
    torch.testing.assert_close(output(model, **given), before, **EXACT)


def test_two_streams_of_xlnet():
    """Targets and a permutation: the second stream attends from the same positions."""
    model, given = make("xlnet"), inputs("xlnet")
    given["perm_mask"] = torch.ones(2, 9, 9).triu()
    given["perm_mask"][:, 0, 0] = 0.0
    given["target_mapping"] = torch.eye(9)[[5, 8]].expand(2, 2, 9).contiguous()
    before = output(model, **given)
    locant.swap(model, locant.native(model))
    torch.testing.assert_close(output(model, **given), before, **EXACT)


def test_positions_that_no_scheme_has():
    for kind, changes, message in (
        ("roformer", {"rotary_value": True}, "rotates values too"),
        ("xlnet", {"clamp_len": 3}, "clamp_len=3"),
        ("xlnet", {"bi_data": True}, "bi_data=True"),
    ):
        model = make(kind, **changes)
        with pytest.raises(NotImplementedError, match=message):
            locant.native(model)
    falcon = make("falcon, alibi", attn_implementation="eager")
    with pytest.raises(NotImplementedError, match="adds Falcon's ALiBi twice"):
        locant.native(falcon)
    gptj = make("gptj")
    gptj.h[1].attn.embed_positions.mul_(1.001)
    with pytest.raises(
        NotImplementedError,
        match=r"positions of GPTJModel: its rotary table does not have the angles of rope.*at position",
    ):
        locant.native(gptj)


def test_models_that_cannot_be_swapped_are_as_they_were():
    model, given = make("deberta", talking_head=True), inputs("deberta")
    before = output(model, **given)
    with pytest.raises(NotImplementedError, match="talking_head"):
        locant.swap(model, "tisa")
    assert torch.equal(output(model, **given), before)
    with pytest.raises(NotImplementedError, match="slow_but_exact"):
        locant.native(make("bloom", pretraining_tp=2, slow_but_exact=True))
