"""Fitted layers do not run again while the layers above them are fitted, and the results have the same bits."""

from collections import Counter

import pytest
import torch
from transformers import AutoModelForTextEncoding

import locant
from locant.adaptation import fitting
from locant.adaptation.layer_cache import LayerCache, layer_cache
from locant.hf.plan import plan_of
from tests import hf_models, words
from tests.adaptations import fitted

LAYERS = 4
DEEP = {"distilbert": "n_layers", "gpt2": "n_layer", "t5": "num_layers"}
KINDS = ["bert", "roberta", "electra", "distilbert", "mpnet", "modernbert", "t5", *hf_models.DECODERS]


def make(kind, **changes):
    auto = {"auto": AutoModelForTextEncoding} if kind == "t5" else {}
    return hf_models.make(kind, **auto, **{DEEP.get(kind, "num_hidden_layers"): LAYERS}, **changes)


def counted(model):
    """Counts how often each layer runs, by its first module without children."""
    runs = Counter()
    for number, layer in enumerate(layers(model)):
        part = next(part for part in layer.modules() if not list(part.children()))
        part.register_forward_hook(lambda *_, number=number: runs.update([number]))
    return runs


def layers(model):
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == LAYERS]
    return lists[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_has_the_same_bits_and_runs_each_layer_as_often(kind, monkeypatch):
    monkeypatch.setattr(fitting, "BATCH_TOKENS", 64)  # two batches of each length
    monkeypatch.setattr(fitting, "ITERATIONS", 5)
    quick, slow = make(kind), make(kind)
    few, many = counted(quick), counted(slow)
    first = fitted(quick, "tisa:kernels=3", tokens=128)
    monkeypatch.setattr(fitting, "layer_cache", lambda model, names, batches: LayerCache(model, [], [], batches))
    second = fitted(slow, "tisa:kernels=3", tokens=128)
    assert first.heads == second.heads
    for (name, one), other in zip(quick.state_dict().items(), slow.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert few[0] == few[1] == few[2] > 0
    assert many[0] > many[1] > many[2]  # without, a layer runs for every layer above it


def test_one_attention_in_all_layers_always_runs():
    model = locant.swap(hf_models.make("albert"), "tisa")
    names = [attention.name for stack in plan_of(model).stacks for attention in stack.attentions]
    assert layer_cache(model, names, [words.rows()]).layers == []


def test_layers_that_pass_on_more_than_their_output_always_run():
    """State that a layer leaves elsewhere is missing when it is replayed. The trial finds that in the numbers."""
    model = locant.swap(make("bert"), "tisa")
    state = []
    layers(model)[0].attention.register_forward_hook(lambda *_: state.append(1))
    layers(model)[-1].attention.register_forward_pre_hook(lambda part, args: (args[0] + len(state), *args[1:]))
    names = [attention.name for stack in plan_of(model).stacks for attention in stack.attentions]
    assert layer_cache(model, names, [words.rows()]).layers == []


def test_layers_with_hooks_always_run():
    """A hook that changes the output of a layer would change it again when it is replayed."""
    model = locant.swap(make("llama"), "tisa")
    layers(model)[1].register_forward_hook(lambda layer, args, output: output)
    names = [attention.name for stack in plan_of(model).stacks for attention in stack.attentions]
    assert layer_cache(model, names, [words.rows()]).layers == []


def test_the_hooks_of_transformers_do_not_count():
    """They stay on the layers of a model that was once asked for its hidden states, as `adapt` does."""
    model = locant.swap(make("llama"), "tisa")
    model(input_ids=words.rows(), output_hidden_states=True)
    assert all(layer._forward_hooks for layer in layers(model))
    names = [attention.name for stack in plan_of(model).stacks for attention in stack.attentions]
    assert len(layer_cache(model, names, [words.rows()]).layers) == LAYERS


def test_an_interrupted_run_restores_the_layers():
    model = locant.swap(make("llama"), "tisa")
    names = [attention.name for stack in plan_of(model).stacks for attention in stack.attentions]
    cache = layer_cache(model, names, [words.rows()])
    cache.cache_next_layer()

    def stopped(module, request):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.run(0, stopped)
    assert not any("forward" in layer.__dict__ for layer in layers(model))


def test_layers_run_again_afterwards():
    model = locant.swap(make("llama"), "tisa")
    names = [attention.name for stack in plan_of(model).stacks for attention in stack.attentions]
    before = hf_models.output(model, input_ids=words.rows())
    cache = layer_cache(model, names, [words.rows()])
    assert len(cache.layers) == LAYERS
    cache.cache_next_layer()
    cache.cache_next_layer()
    assert cache.fitted == 2
    assert torch.equal(hf_models.output(model, input_ids=words.rows()), before)
