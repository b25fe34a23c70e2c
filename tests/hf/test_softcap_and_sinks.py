"""Models that cap their logits or have a sink per head: swapped, restored, decoding, against transformers' own code."""

import importlib

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import locant
from locant.adaptation.cross_entropy import cross_entropy, entropy
from locant.adaptation.initial_values import measured_curve
from locant.analysis import distance
from locant.attention.request import prepare
from locant.hf import interface
from locant.hf.call import Positions
from locant.hf.listening import observing
from locant.hf.seam import through_seam
from locant.schemes import Nope
from tests.hf_models import GROUPED

EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
CONFIGS = {
    "gemma2": {"attn_logit_softcapping": 1.5},
    "vaultgemma": {"attn_logit_softcapping": 1.5},
    "mimo_v2_flash": {"v_head_dim": 4, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    "gpt_oss": EXPERTS,
    "openai_privacy_filter": {**EXPERTS, "pad_token_id": 0},
    "granite_swa": {},
    "granitemoe_swa": EXPERTS,
}
CAPPED = ("gemma2", "vaultgemma")
IDS = torch.arange(3, 15)[None]
SLOPES = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])


def make(kind):
    torch.manual_seed(0)
    options = {**GROUPED, "head_dim": 8, "sliding_window": 6, **CONFIGS[kind]}
    model = AutoModel.from_config(AutoConfig.for_model(kind, **options), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def modeling(kind):
    return importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")


def alibi_bias(lq, lk):
    distance = (torch.arange(lk) - torch.arange(lk)[lk - lq :, None]).abs()
    return -SLOPES[:, None, None] * distance  # [H, Lq, Lk]


def with_alibi(kind):
    """The eager attention of a family plus the bias of alibi: in the mask, or inside the cap, where a mask is not."""
    theirs = modeling(kind).eager_attention_forward

    def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, softcap=None, **kwargs):
        bias = alibi_bias(query.shape[2], key.shape[2])
        if kind not in CAPPED:
            mask = bias[None] if attention_mask is None else attention_mask + bias
            return theirs(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)
        key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
        logits = softcap * torch.tanh((query @ key.mT * scaling + bias) / softcap)
        weights = (logits if attention_mask is None else logits + attention_mask).softmax(-1)
        return (weights @ value).transpose(1, 2), weights

    return attention


def output(model, **inputs):
    with torch.no_grad():
        return model(**inputs).last_hidden_state


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_alibi_equals_the_eager_attention_with_its_bias(kind, padded, monkeypatch):
    inputs = {"input_ids": IDS}
    if padded:
        inputs = {"input_ids": IDS.expand(2, -1), "attention_mask": torch.arange(12) < torch.tensor([[12], [8]])}
        inputs["attention_mask"] = inputs["attention_mask"].long()
    model = make(kind)
    before = output(model, **inputs)
    locant.swap(model, "alibi")
    ours = output(model, **inputs)
    locant.swap(model, "native")
    assert torch.equal(output(model, **inputs), before)
    monkeypatch.setattr(modeling(kind), "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k))
    monkeypatch.setattr(modeling(kind), "eager_attention_forward", with_alibi(kind))
    truth = output(model, **inputs)
    seen = slice(None) if not padded else inputs["attention_mask"].bool()
    torch.testing.assert_close(ours[seen], truth[seen], rtol=1e-4, atol=1e-4)
    assert (before[seen] - truth[seen]).abs().max() > 0.1


@pytest.mark.parametrize("kind", CONFIGS)
def test_nope_is_not_given_to_the_sdpa_of_transformers(kind, monkeypatch):
    """It refuses a softcap, and ignores sinks without an error."""
    model = make(kind)
    locant.swap(model, "nope")
    ours = output(model, input_ids=IDS)
    locant.swap(model, "native")
    monkeypatch.setattr(modeling(kind), "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k))
    torch.testing.assert_close(ours, output(model, input_ids=IDS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "openai_privacy_filter"])  # an encoder
def test_decoding_equals_the_whole_pass(kind):
    model = locant.swap(make(kind), "alibi")
    whole = output(model, input_ids=IDS)
    with torch.no_grad():
        cache = model(input_ids=IDS[:, :9], use_cache=True).past_key_values
        for n in range(9, 12):
            step = model(input_ids=IDS[:, n : n + 1], past_key_values=cache, use_cache=True)
            torch.testing.assert_close(step.last_hidden_state[:, 0], whole[:, n], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_gradients(kind, monkeypatch):
    model = locant.swap(make(kind), "alibi")
    model(input_ids=IDS).last_hidden_state.square().mean().backward()
    grads = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    locant.swap(model, "native")
    model.zero_grad()
    monkeypatch.setattr(modeling(kind), "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k))
    monkeypatch.setattr(modeling(kind), "eager_attention_forward", with_alibi(kind))
    model(input_ids=IDS).last_hidden_state.square().mean().backward()
    for name, x in model.named_parameters():
        if x.grad is not None:
            torch.testing.assert_close(grads[name], x.grad, rtol=1e-3, atol=1e-3 * max(1.0, float(x.grad.abs().max())))
    assert kind in CAPPED or any("sinks" in name and x.abs().max() > 0 for name, x in grads.items())


@pytest.mark.parametrize("kind", ["gemma2", "mimo_v2_flash"])
def test_weights(kind, monkeypatch):
    model = locant.swap(make(kind), "alibi")
    with torch.no_grad():
        ours = model(input_ids=IDS, output_attentions=True).attentions
        locant.swap(model, "native")
        monkeypatch.setattr(modeling(kind), "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k))
        monkeypatch.setattr(modeling(kind), "eager_attention_forward", with_alibi(kind))
        theirs = model(input_ids=IDS, output_attentions=True).attentions
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_one_attention_with_alibi(kind):
    """A call as the model makes it, with a scheme on its module. These keys are rotated; that changes nothing here."""
    model, calls = make(kind), []
    with through_seam(model), observing(before=calls.append):
        output(model, input_ids=IDS)
    assert len(calls) == 2
    for call in calls:
        module, mask = call.module, call.mask
        visible = None if mask is None else mask if mask.dtype == torch.bool else mask == 0
        added = None if visible is None else torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
        truth, _ = with_alibi(kind)(module, call.query, call.key, call.value, added, call.scale, **call.others)
        module.add_module("locant", locant.scheme("alibi", n_heads=4))
        given = {**call.others, interface.ARGUMENT: Positions(None, None)}
        tensors = call.query, call.key, call.value
        ours, _ = interface.attention(module, *tensors, visible, scaling=call.scale, **given)
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)
        wrong = {**given, "softcap": None, "s_aux": None}
        other, _ = interface.attention(module, *tensors, visible, scaling=call.scale, **wrong)
        if call.softcap is not None or call.sinks is not None:
            assert (other - truth).abs().max() > 1e-3
        del module.locant


@pytest.mark.parametrize("kind", CONFIGS)
def test_no_native_position_is_left(kind):
    model = locant.swap(make(kind), "nope")
    near, far = (output(model, input_ids=IDS, position_ids=step * torch.arange(12)[None]) for step in (1, 3))
    assert torch.equal(near, far)


def test_sparse_attention_is_refused():
    """A model with an indexer leaves the mask as it is and passes the chosen keys, which only some kernels read."""
    module = nn.Module()
    module.is_causal = True
    module.add_module("locant", Nope())
    q = torch.randn(1, 2, 5, 8)
    indices = torch.zeros(1, 5, 2, dtype=torch.long)
    for given in ({interface.ARGUMENT: Positions(None, None)}, {}):
        with pytest.raises(NotImplementedError, match="Module attends to a few keys alone"):
            interface.attention(module, q, q, q, None, indices=indices, **given)
        del module.locant
        module.add_module("locant", None)  # then as a model that is only observed


def test_a_position_bias_beside_a_softcap_is_refused():
    """Cross-attention in a swapped model has no scheme, and transformers' sdpa function has no softcap."""
    module = nn.Module()
    module.is_causal = False
    q = torch.randn(1, 2, 5, 8)
    given = {interface.ARGUMENT: Positions(None, None), "position_bias": torch.zeros(1, 2, 5, 5)}
    with pytest.raises(NotImplementedError, match="Module has a position bias beside a softcap or sinks"):
        interface.attention(module, q, q, q, None, softcap=2.0, **given)
    out, _ = interface.attention(module, q, q, q, None, **given)
    torch.testing.assert_close(out, sdpa_attention_forward(module, q, q, q, None)[0])


def test_cross_attention_with_a_softcap():
    """A swapped encoder-decoder calls the seam with positions and without a scheme."""
    module = nn.Module()
    module.is_causal = False
    q, k = torch.randn(1, 2, 7, 8), torch.randn(1, 2, 5, 8)
    out, _ = interface.attention(module, q, k, k, None, softcap=0.5, **{interface.ARGUMENT: Positions(None, None)})
    truth = (0.5 * torch.tanh(q @ k.mT * 8**-0.5 / 0.5)).softmax(-1) @ k
    torch.testing.assert_close(out, truth.transpose(1, 2))


def test_a_call_with_a_scheme_and_without_positions_is_refused():
    module = nn.Module()
    module.is_causal = True
    module.add_module("locant", Nope())
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(RuntimeError, match="received no positions"):
        interface.attention(module, q, q, q, None, softcap=2.0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_attention_by_distance_has_the_weights_of_the_model(kind):
    model = locant.swap(make(kind), "alibi")
    ids = torch.stack([IDS[0], IDS[0].flip(0)])
    with torch.no_grad():
        weights = model(input_ids=ids, output_attentions=True).attentions
    for layer, expected in zip(distance.by_distance(model, ids), weights, strict=True):
        torch.testing.assert_close(layer.weights, expected.mean(0), rtol=1e-4, atol=1e-5)


def test_a_fit_keeps_the_softcap_and_refuses_sinks():
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    request = prepare(q, k, v, None, causal=True, softcap=0.5)
    _, p = locant.attend(q, k, v, causal=True, softcap=0.5, need_weights=True)
    with torch.no_grad():
        torch.testing.assert_close(cross_entropy(None, [request], [p]), entropy([p]))
        offsets, curve, _ = measured_curve([request], [p])
    torch.testing.assert_close(curve, torch.zeros_like(curve), rtol=0, atol=1e-5)
    assert len(offsets) == 6
    with pytest.raises(NotImplementedError, match="cannot fit a scheme to attention with sinks"):
        cross_entropy(None, [prepare(q, k, v, None, sinks=torch.zeros(2))], [p])
