"""Which module computes which step: layers by name, and roles by comparing numbers."""

import pytest
import torch

import locant
from locant.analysis.layout import LayerTracker, find_layout, layer_names
from locant.analysis.steps import ATTENTION, FEED_FORWARD, INPUT, NORM, OUTPUT, RESIDUAL
from tests.hf_models import make


@pytest.mark.parametrize(
    ("kind", "attentions", "layers"),
    [
        ("bert", ["encoder.layer.{}.attention.self"], "encoder.layer.{}"),
        ("gpt2", ["h.{}.attn"], "h.{}"),
        ("t5", ["encoder.block.{}.layer.0.SelfAttention", "decoder.block.{}.layer.0.SelfAttention"], None),
    ],
)
def test_the_layer_of_an_attention(kind, attentions, layers):
    model = make(kind)
    names = [name.format(number) for name in attentions for number in (0, 1)]
    found = layer_names(model, names)
    if kind == "t5":  # lists in lists: an entry of the inner list is a feed-forward
        assert found == [f"{stack}.block.{number}" for stack in ("encoder", "decoder") for number in (0, 1)]
    else:
        assert found == [layers.format(number) for number in (0, 1)]


ROLES = {
    "gpt2": {("ln_1", "out"): NORM, ("attn.c_proj", "out"): ATTENTION, ("ln_2", "in"): RESIDUAL,
             ("mlp", "out"): FEED_FORWARD},
    "mpnet": {("attention.attn.o", "out"): ATTENTION, ("attention.LayerNorm", "in"): RESIDUAL,
              ("output.dense", "out"): FEED_FORWARD},
}  # fmt: skip


@pytest.mark.parametrize("spec", [None, "alibi"])
@pytest.mark.parametrize("kind", ROLES)
def test_recorded_steps_are_those_of_the_modules(kind, spec):
    """Against tensors taken from the named modules by hooks of the test."""
    model = make(kind)
    if spec is not None:
        locant.swap(model, spec)
    layers = model.h if kind == "gpt2" else model.encoder.layer
    layout = find_layout(model)
    assert layout.layers == frozenset(layers)
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    taken, recorded, hooks = {}, {}, []

    def keep(key, side):
        return lambda module, args, output: taken.update({key: args[0] if side == "in" else output})

    for number, layer in enumerate(layers):
        for (path, side), step in ROLES[kind].items():
            hooks.append(layer.get_submodule(path).register_forward_hook(keep((number, step), side)))
    with torch.no_grad(), LayerTracker(layout.layers).recording(layout, lambda *x: recorded.update({x[:2]: x[2]})):
        hidden = model(input_ids=ids, output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    assert set(recorded) == {(layer, step) for layer in (0, 1) for step in (*ROLES[kind].values(), INPUT, OUTPUT)}
    for key, value in taken.items():
        assert torch.equal(recorded[key], value), key
    assert torch.equal(recorded[0, INPUT], hidden[0])
    assert torch.equal(recorded[1, INPUT], recorded[0, OUTPUT])
