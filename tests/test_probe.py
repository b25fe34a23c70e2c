"""Probes: at chance on noise, right where position is planted, and what random models know (Chi et al. 2023)."""

import pytest
import torch
from transformers import GPT2Config, GPT2Model

import locant
from locant.analysis.probe import probe, states_of

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
    )
    model = locant.swap(GPT2Model(config).eval(), "nope")

    def ids(number):
        return torch.randint(0, 500, (16, L), generator=torch.Generator().manual_seed(number + 10_000))

    causal = {row.place: row for row in probe(states_of(model, ids), steps=150, seeds=2)}
    twin = {row.place: row for row in probe(states_of(model, ids, bidirectional=True), steps=150, seeds=2)}
    assert set(causal) == {"embeddings", "layer 1 attention", "layer 1", "layer 2 attention", "layer 2"}
    assert causal["embeddings"].error > 0.95 * L / 4
    assert causal["layer 2 attention"].error < 0.8 * L / 4
    assert twin["layer 2 attention"].error > 0.95 * L / 4


def test_bad_states_are_named():
    with pytest.raises(ValueError, match="not finite"):
        probe(stream(lambda x: x * float("nan")))
