"""Probes: at chance on noise, right where position is planted, and what random models know (Chi et al. 2023)."""

import pytest
import torch
from transformers import GPT2Config, GPT2Model

import locant
from locant.analysis.probe import probe, states_of
from tests import hf_models

L = 32


def stream(make):
    def sample(number):
        generator = torch.Generator().manual_seed(number + 10_000)
        return {"here": make(torch.randn(16, L, 24, generator=generator))}

    return sample


def test_noise_is_at_chance():
    (row,) = probe(stream(lambda x: x), steps=80)
    assert row.constant == L / 4
    assert 0.9 * row.constant < row.error < 1.3 * row.constant


def test_planted_positions_are_found():
    direction = torch.randn(24, generator=torch.Generator().manual_seed(0))
    place = torch.arange(L)[:, None] / L
    (row,) = probe(stream(lambda x: 0.1 * x + place * direction), steps=120)
    assert row.error < 0.15 * row.constant
    assert row.low <= row.error <= row.high
    assert row.shuffled > 0.9 * row.constant
    assert row.by_position.shape == (L,)


def test_a_random_causal_model_without_positions_knows_where_it_is_and_its_twin_does_not():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=500,
        n_embd=96,
        n_layer=2,
        n_head=4,
        n_positions=L,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.02 * (768 / 96),
        activation_function="gelu_pytorch_tanh",  # GPT-2's own, in one kernel
    )
    model = locant.swap(GPT2Model(config).eval(), "nope")

    def ids(number):
        return torch.randint(0, 500, (16, L), generator=torch.Generator().manual_seed(number + 10_000))

    def probed(places, **how):
        sample = states_of(model, ids, **how)
        assert list(sample(0)) == ["embeddings"] + [
            f"layer {n}{step}" for n in (1, 2) for step in (" attention", " feed-forward", "")
        ]

        def some(number):  # a probe takes longer than the model
            states = sample(number)
            return {place: states[place] for place in places}

        rows = {row.place: row for row in probe(some, steps=150, seeds=2)}
        assert list(rows) == places
        return rows

    causal = probed(["embeddings", "layer 2 attention"])
    twin = probed(["layer 2 attention"], bidirectional=True)
    assert causal["embeddings"].error > 0.95 * L / 4
    assert causal["layer 2 attention"].error < 0.8 * L / 4
    assert twin["layer 2 attention"].error > 0.95 * L / 4


SUB_LAYERS = {
    "bert": ("encoder.layer.{}.attention.output.dense", "encoder.layer.{}.output.dense"),
    "distilbert": ("transformer.layer.{}.attention.out_lin", "transformer.layer.{}.ffn"),
    "mpnet": ("encoder.layer.{}.attention.attn.o", "encoder.layer.{}.output.dense"),
    "gpt2": ("h.{}.attn.c_proj", "h.{}.mlp"),
    "gpt_neox": ("layers.{}.attention.dense", "layers.{}.mlp"),
    "opt": ("decoder.layers.{}.self_attn.out_proj", "decoder.layers.{}.fc2"),
    "llama": ("layers.{}.self_attn.o_proj", "layers.{}.mlp"),
    "modernbert": ("layers.{}.attn.Wo", "layers.{}.mlp"),
}


@pytest.mark.parametrize("kind", SUB_LAYERS)
@pytest.mark.parametrize("spec", [None, "tisa"])
def test_sub_layers_are_found_by_what_they_compute(kind, spec):
    model = hf_models.make(kind)
    if spec is not None:
        locant.swap(model, spec)
    ids = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(input_ids=ids).last_hidden_state
    states = states_of(model, lambda number: ids)(0)
    taken = {}

    def keep(name):
        return lambda module, args, output: taken.update({name: output})

    hooks = [
        model.get_submodule(path.format(n - 1)).register_forward_hook(keep(f"layer {n} {name}"))
        for n in (1, 2)
        for path, name in zip(SUB_LAYERS[kind], ("attention", "feed-forward"), strict=True)
    ]
    with torch.no_grad():
        hidden = model(input_ids=ids, output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    assert len(states) == 7
    for name, value in taken.items():
        assert torch.allclose(states[name], value.view_as(states[name]), atol=1e-5), name
    for number, value in enumerate(hidden):
        assert torch.allclose(states["embeddings" if number == 0 else f"layer {number}"], value, atol=1e-5)
    if kind != "opt":  # its hidden states are before the last norm
        assert torch.equal(states["layer 2"], before)  # a probe changes no output, not even of MPNet's own attention
    assert torch.equal(hidden[-1], states["layer 2"])


@pytest.mark.parametrize("kind", ["gpt2", "opt", "llama"])
@pytest.mark.parametrize("spec", [None, "tisa"])
def test_the_twin_of_a_causal_model_sees_what_follows_and_is_otherwise_the_same(kind, spec):
    model = hf_models.make(kind)
    if spec is not None:
        locant.swap(model, spec)
    ids = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(0))
    plain, twin = (states_of(model, lambda number: ids, bidirectional=both)(0) for both in (False, True))
    assert torch.equal(plain["embeddings"], twin["embeddings"])
    last, rest = (slice(None), -1), (slice(None), slice(None, -1))
    assert torch.allclose(plain["layer 1"][last], twin["layer 1"][last], atol=1e-4)  # it saw everything anyway
    assert not torch.allclose(plain["layer 1"][rest], twin["layer 1"][rest], atol=1e-2)


def test_one_module_in_all_layers():
    """ALBERT's two layers are one module, run twice."""
    model = hf_models.make("albert")
    ids = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(0))
    states = states_of(model, lambda number: ids)(0)
    assert len(states) == 7
    assert not torch.allclose(states["layer 1 feed-forward"], states["layer 2 feed-forward"], atol=1e-3)
    norm = model.encoder.albert_layer_groups[0].albert_layers[0].full_layer_layer_norm
    before = model.encoder.albert_layer_groups[0].albert_layers[0].attention.LayerNorm
    with torch.no_grad():
        after_attention = before(states["layer 1"] + states["layer 2 attention"])
        assert torch.allclose(norm(after_attention + states["layer 2 feed-forward"]), states["layer 2"], atol=1e-5)


def test_bad_states_are_named():
    with pytest.raises(ValueError, match="contain NaN or infinity"):
        probe(stream(lambda x: x * float("nan")))
    with pytest.raises(ValueError, match=r"same width; got widths \[8, 24\]"):
        probe(lambda number: {"one": torch.randn(2, L, 8), "other": torch.randn(2, L, 24)})
