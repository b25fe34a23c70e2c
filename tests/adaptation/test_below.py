"""Finished layers are not run again while the ones above them are fitted, and nobody can tell."""

from collections import Counter

import pytest
import torch
from transformers import AutoModelForTextEncoding

import locant
from locant.adaptation import fitting
from locant.adaptation.below import Below, below
from locant.hf.plan import plan_of
from tests import hf_models, words

LAYERS = 4
DEEP = {"distilbert": "n_layers", "gpt2": "n_layer", "t5": "num_layers"}
KINDS = ["bert", "roberta", "electra", "distilbert", "mpnet", "modernbert", "t5", *hf_models.DECODERS]


def make(kind, **changes):
    auto = {"auto": AutoModelForTextEncoding} if kind == "t5" else {}
    return hf_models.make(kind, **auto, **{DEEP.get(kind, "num_hidden_layers"): LAYERS}, **changes)


def counted(model):
    """How often a layer runs, counted by its first module without parts."""
    runs = Counter()
    for number, layer in enumerate(layers(model)):
        part = next(part for part in layer.modules() if not list(part.children()))
        part.register_forward_hook(lambda *_, number=number: runs.update([number]))
    return runs


def layers(model):
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == LAYERS]
    return lists[0]


def fitted(model):
    return locant.fit(model, "tisa:kernels=3", words.text(), tokenizer=words.Tokenizer(), length=32, tokens=4096)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_has_the_same_bits_and_runs_each_layer_as_often(kind, monkeypatch):
    quick, slow = make(kind), make(kind)
    few, many = counted(quick), counted(slow)
    first = fitted(quick)
    monkeypatch.setattr(fitting, "below", lambda model, names, batches: Below(model, [], [], batches))
    second = fitted(slow)
    assert first.heads == second.heads
    for (name, one), other in zip(quick.state_dict().items(), slow.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert few[0] == few[1] == few[2] > 0
    assert many[0] > many[1] > many[2]  # without, a layer runs for every layer above it


def test_one_attention_in_all_layers_always_runs():
    model = locant.swap(hf_models.make("albert"), "tisa")
    names = [attention.name for stack in plan_of(model).stacks for attention in stack.attentions]
    assert below(model, names, [words.rows()]).layers == []


def test_layers_that_tell_each_other_more_than_their_output_always_run():
    """What a layer leaves elsewhere is missing when it does not run: that is seen in numbers, not in names."""
    model = locant.swap(make("bert"), "tisa")
    said = []
    layers(model)[0].attention.register_forward_hook(lambda *_: said.append(1))
    layers(model)[-1].attention.register_forward_pre_hook(lambda part, args: (args[0] + len(said), *args[1:]))
    names = [attention.name for stack in plan_of(model).stacks for attention in stack.attentions]
    assert below(model, names, [words.rows()]).layers == []


def test_layers_with_hooks_always_run():
    """A hook that changes what a layer gives would change it once more when it says what it gave."""
    model = locant.swap(make("llama"), "tisa")
    layers(model)[1].register_forward_hook(lambda layer, args, output: output)
    names = [attention.name for stack in plan_of(model).stacks for attention in stack.attentions]
    assert below(model, names, [words.rows()]).layers == []


def test_a_run_that_is_stopped_leaves_no_trace():
    model = locant.swap(make("llama"), "tisa")
    names = [attention.name for stack in plan_of(model).stacks for attention in stack.attentions]
    runs = below(model, names, [words.rows()])
    runs.finish()

    def stopped(module, request):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run(0, stopped)
    assert not any("forward" in layer.__dict__ for layer in layers(model))


def test_layers_run_again_afterwards():
    model = locant.swap(make("llama"), "tisa")
    names = [attention.name for stack in plan_of(model).stacks for attention in stack.attentions]
    before = hf_models.output(model, input_ids=words.rows())
    runs = below(model, names, [words.rows()])
    assert len(runs.layers) == LAYERS
    runs.finish()
    runs.finish()
    assert runs.finished == 2
    assert torch.equal(hf_models.output(model, input_ids=words.rows()), before)
