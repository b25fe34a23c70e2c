"""Distillation: the frozen original, the parameters that are trained, and early stopping."""

import torch

import locant
from locant.adaptation import distillation, preconditioning, training
from tests import hf_models, words
from tests.adaptations import adapted


def test_the_frozen_copy_shares_weights_if_they_do_not_change():
    model = hf_models.make("bert")
    shared, apart = distillation.frozen_copy(model, shared=True), distillation.frozen_copy(model, shared=False)
    places = {weight.data_ptr() for weight in model.parameters()}
    assert all(weight.data_ptr() in places for weight in shared.parameters())
    assert not any(weight.data_ptr() in places for weight in apart.parameters())
    locant.swap(model, "alibi")
    ids = words.rows()
    torch.testing.assert_close(hf_models.output(shared, input_ids=ids), hf_models.output(apart, input_ids=ids))


def test_training_stops_when_agreement_no_longer_rises(monkeypatch):
    monkeypatch.setattr(training, "SCHEME_RATE", 0.0)
    monkeypatch.setattr(training, "PATIENCE", 3)
    monkeypatch.setattr(training.Stage, "every", 1)
    done = adapted(hf_models.make("bert"), rate=0.0)
    assert len(done.evaluations) == 4  # one, and three without improvement


def test_no_parameter_has_weight_decay():
    model = locant.swap(hf_models.make("bert"), "tisa+first")
    groups, sizes = training.parameter_groups(model, 1e-3)
    optimizer = preconditioning.ScaledAdamW(groups, sizes)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}
    assert len(optimizer.param_groups[0]["params"]) == 2 * 3 + 2  # all scheme parameters, and no others
    fire = locant.swap(hf_models.make("bert"), "fire")
    assert len(training.parameter_groups(fire, 1e-3)[1]) == len(
        [name for name, _ in fire.named_parameters() if "locant" in name]
    )
