"""Changed queries: merged into the layer that computes them, and only if the model then computes them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import locant
from locant.adaptation import fitting, queries
from locant.adaptation.layer_cache import LayerCache
from locant.hf.plan import plan_of
from tests import hf_models, words
from tests.adaptations import fitted, t5


@pytest.mark.parametrize(
    "kind", ["bert", "distilbert", "albert", "modernbert", "gpt2", "gpt_neox", "opt", "llama", "gemma", "phi", "t5"]
)
def test_the_layer_that_computes_queries_absorbs_the_map(kind):
    """Whatever the name of the layer and whatever else it computes. Keys and values do not change."""
    model = locant.swap(t5() if kind == "t5" else hf_models.make(kind), "alibi")
    ids = words.rows(2, 9)
    name = plan_of(model).stacks[0].attentions[0].name
    attention = model.base_model.get_submodule(name)
    cache = LayerCache(model, [attention], [], [ids])
    layer = queries.find_query_layer(cache, attention)
    assert layer is not None
    before = cache.requests(0, attention)[0]
    query_map = layer.identity()
    with torch.no_grad():
        for parameter in query_map.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
        layer.merge(query_map)
        after = cache.requests(0, attention)[0]
        torch.testing.assert_close(after.q, query_map(before.q), rtol=1e-4, atol=1e-5)
    assert torch.equal(after.k, before.k)
    assert torch.equal(after.v, before.v)


def shared(model):
    for layer in model.layers[1:]:
        layer.self_attn.q_proj = model.layers[0].self_attn.q_proj


def made_from_others(model):
    for layer in model.layers:
        torch.nn.utils.parametrizations.weight_norm(layer.self_attn.q_proj)


def keys_too(model):
    for layer in model.layers:
        layer.self_attn.k_proj.weight = layer.self_attn.q_proj.weight


def moved_afterwards(model):
    for layer in model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda part, args, output: output + 1)


@pytest.mark.parametrize("change", [shared, made_from_others, keys_too, moved_afterwards])
def test_queries_that_cannot_be_changed_alone_get_a_notice(change):
    """The reported share must be that of the model itself."""
    model = hf_models.make("llama", num_key_value_heads=4)
    change(model)
    before = [layer.self_attn.q_proj.weight.detach().clone() for layer in model.layers]
    found = fitted(model, "tisa:kernels=3", queries=True)
    assert "were not changed" in "".join(found.notices)
    for layer, weight in zip(model.layers, before, strict=True):
        assert torch.equal(layer.self_attn.q_proj.weight, weight)


def test_the_notice_names_the_layer():
    model = hf_models.make("llama")
    with torch.no_grad():
        model.layers[1].self_attn.q_proj.weight[1] = model.layers[1].self_attn.q_proj.weight[0]
    assert "queries of layer 2 were not changed" in "".join(fitted(model, "tisa:kernels=3", queries=True).notices)


def test_queries_that_no_layer_computes_are_not_changed():
    q, output = torch.randn(2, 3, 5, 4), torch.randn(10, 12)
    assert queries._columns(q, output) is None
    qwen = locant.swap(hf_models.make("qwen3"), "alibi")  # a norm comes after the layer
    attention = qwen.base_model.get_submodule(plan_of(qwen).stacks[0].attentions[0].name)
    assert queries.find_query_layer(LayerCache(qwen, [attention], [], [words.rows(2, 9)]), attention) is None
    made = q.transpose(1, 2).flatten(2).flatten(0, 1)
    assert queries._columns(q, made).tolist() == torch.arange(12).view(3, 4).tolist()
    assert queries._columns(q, made[:, torch.arange(11, -1, -1)])[0, 0] == 11
    assert queries._columns(q, made.clone().index_fill_(1, torch.tensor([5]), 0.0)) is None


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_changed_queries_explain_more(kind):
    alone, more = (fitted(hf_models.make(kind), "tisa:kernels=3", length=16, queries=each) for each in (False, True))
    assert more.explained > alone.explained
    assert [head.silenced for head in more.heads][:2] == pytest.approx([head.silenced for head in alone.heads][:2])
    nothing = fitted(hf_models.make(kind), "nope", length=16, queries=True)
    assert nothing.explained > 0
    assert "only the queries were fitted" in nothing.notices[0]


def test_the_divergence_without_positions_is_without_changed_queries():
    """ALBERT's layers share an attention, which is fitted twice."""
    alone, more = (fitted(hf_models.make("albert"), "tisa", length=16, queries=each) for each in (False, True))
    assert [head.silenced for head in more.heads] == pytest.approx([head.silenced for head in alone.heads])


def test_queries_are_restored_if_a_fit_fails(monkeypatch):
    model = hf_models.make("bert")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    calls = []

    def fail(*arguments, **named):
        calls.append(1)
        if len(calls) == 2:  # in the second layer
            raise KeyboardInterrupt
        return real(*arguments, **named)

    real = fitting._minimize
    monkeypatch.setattr(fitting, "_minimize", fail)
    with pytest.raises(KeyboardInterrupt):
        fitted(model, "tisa", length=16, queries=True)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_queries_of_models_in_double_precision_can_be_changed():
    model = hf_models.make("llama", AutoModelForCausalLM).double()
    found = fitted(model, "alibi", length=16, tokens=64, queries=True)
    assert found.explained > 0


def test_queries_of_a_layer_that_keeps_its_scheme_stay():
    model = hf_models.make("llama")
    own = str(locant.native(model).stacks[0].layers[0])
    before = [layer.self_attn.q_proj.weight.clone() for layer in model.layers]
    found = fitted(model, f"{own}/nope", length=16, queries=True)
    same = [torch.equal(layer.self_attn.q_proj.weight, was) for layer, was in zip(model.layers, before, strict=True)]
    assert same[0]
    assert not same[1]
    assert found.heads[0].explained == 1
    assert not any("were not changed" in notice for notice in found.notices)
