"""An analysis leaves the random numbers of its caller as they were."""

import pytest
import torch

import locant
from locant.analysis import behaviour, curve, distance, inspection, invariance, layout, probe, variance
from tests import hf_models

IDS = torch.randint(3, 60, (6, 12), generator=torch.Generator().manual_seed(0))
TABLE = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))

ANALYSES = {
    "native": locant.native,
    "invariance.of_model": lambda model: invariance.of_model(model, samples=2),
    "invariance.of_table": lambda model: invariance.of_table(TABLE, samples=2),
    "invariance.of_heads": lambda model: invariance.of_heads(TABLE, TABLE[:16], TABLE[16:32], 4, samples=2),
    "invariance.of_logits": lambda model: invariance.of_logits(TABLE[:16].expand(2, 16, 16), samples=2),
    "invariance.structure": lambda model: invariance.structure(TABLE),
    "curve.curves": lambda model: [curve.curves(x) for x in locant.native(model).stacks[0].layers or []],
    "curve.kernels": lambda model: [curve.kernels(x) for x in locant.native(model).stacks[0].layers or []],
    "distance.by_distance": lambda model: distance.by_distance(model, IDS),
    "layout.find_layout": layout.find_layout,
    "variance.measure": lambda model: variance.measure(model, sequences=3, length=9),
    "variance.predict": lambda model: variance.predict(16, 2, 0.1, 8, 2),
    "probe.probe": lambda model: probe.probe(probe.states_of(model, lambda number: IDS), steps=2, seeds=1),
    "behaviour.shift": lambda model: behaviour.shift(model, IDS, (1, 2)),
    "behaviour.shuffle": lambda model: behaviour.shuffle(model, IDS),
    "behaviour.length": lambda model: behaviour.length(model, IDS, [4, 8]),
    "behaviour.share": lambda model: behaviour.share(model, IDS),
    "inspection.inspect": lambda model: list(inspection.inspect(model, inspection.Tokens(None, "", 60), "x")),
}


@pytest.mark.parametrize("analysis", ANALYSES)
@pytest.mark.parametrize(("kind", "spec"), [("bert", None), ("gpt2", "tisa+learned:length=40"), ("llama", None)])
def test_random_numbers_are_left_alone(analysis, kind, spec, monkeypatch):
    for name, value in {"LENGTH": 12, "SEQUENCES": 4, "PROBE_LENGTH": 8, "PROBE_STEPS": 2, "LENGTHS": (8,)}.items():
        monkeypatch.setattr(inspection, name, value)
    model = hf_models.make(kind)
    if spec is not None:
        locant.swap(model, spec)
    before = torch.get_rng_state()
    ANALYSES[analysis](model)
    assert torch.equal(torch.get_rng_state(), before)


def test_in_training_mode_dropout_draws_nothing():
    model = hf_models.make("bert", hidden_dropout_prob=0.5).train()
    before = torch.get_rng_state()
    for analysis in (
        "invariance.of_model",
        "distance.by_distance",
        "variance.measure",
        "behaviour.share",
        "probe.probe",
    ):
        ANALYSES[analysis](model)
        assert torch.equal(torch.get_rng_state(), before), analysis
    assert model.training
