"""`locant.adapt`: a model is trained to match its original, and nothing else of it changes."""

import random

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

import locant
from locant.adaptation import adapting
from tests import hf_models, words
from tests.adaptations import adapted


@pytest.mark.parametrize(
    ("kind", "auto"),
    [("bert", None), ("gpt2", AutoModelForCausalLM), ("llama", AutoModelForCausalLM), ("bert", AutoModelForMaskedLM)],
)
def test_training_raises_agreement(kind, auto):
    model = hf_models.make(kind, *([auto] if auto else []))
    done = adapted(model, budget="60steps")
    original, silenced, fitted, after = (row.agreement for row in done.rows)
    assert [row.state for row in done.rows] == ["original", "silenced", "fitted", "adapted"]
    assert original == pytest.approx(1.0)
    assert after > fitted
    assert after > silenced
    assert done.model is model
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_training_the_scheme_changes_no_other_weight():
    model = hf_models.make("bert")
    before = {name: weight.clone() for name, weight in model.named_parameters() if "position" not in name}
    done = adapted(model, train="scheme", budget="60steps")
    after = dict(model.named_parameters())
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert done.rows[3].agreement > done.rows[2].agreement


def test_other_weights_adapt_to_a_scheme_without_parameters():
    done = adapted(hf_models.make("llama", AutoModelForCausalLM), "nope", train="scheme", budget="4steps")
    assert done.evaluations == []  # there is nothing to train
    done = adapted(hf_models.make("llama", AutoModelForCausalLM), "nope", budget="60steps")
    assert done.rows[3].agreement > done.rows[1].agreement


@pytest.mark.parametrize("train", ["all", "scheme"])
def test_an_interrupted_model_is_restored(train):
    model, ids = hf_models.make("bert"), words.rows()
    before = hf_models.output(model, input_ids=ids)

    def stop(found, steps):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adapted(model, train=train, on_evaluation=stop)
    assert torch.equal(hf_models.output(model, input_ids=ids), before)
    assert str(locant.native(model)).startswith("absolute")


@pytest.mark.parametrize(("kind", "changed"), [("bert", False), ("gpt2", False), ("llama", True), ("gpt_neox", True)])
def test_queries_of_rotary_models_change(kind, changed):
    assert adapting._rotates(hf_models.make(kind)) == changed


def test_the_state_of_the_caller_is_restored():
    def everything(model):
        drawn = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
        return drawn, model.training, model.config.use_cache, transformers.utils.logging.get_verbosity()

    def stop(found, steps):
        raise KeyboardInterrupt

    model = hf_models.make("gpt2", AutoModelForCausalLM).train()
    before = everything(model)
    with pytest.raises(KeyboardInterrupt):
        adapted(model, budget="2steps", on_evaluation=stop)
    assert everything(model) == before
    adapted(model, budget="2steps")
    assert everything(model) == before


def test_held_out_lines_are_not_trained_on():
    for count in (2, 5, 19, 20, 21, 100, 639, 640, 5000):
        lines = [str(number) for number in range(count)]
        held, rest = adapting.held_out(lines), adapting.trained_on(lines)
        assert held
        assert sorted([*held, *rest]) == sorted(lines)
    assert held[:16] == [str(number) for number in range(304, 320)]  # blocks of lines


def test_a_model_is_adapted_past_its_length():
    done = adapted(hf_models.make("bert"), "alibi", length=128, budget="20steps")  # it had 40 positions
    assert done.model(input_ids=words.rows(1, 128)).last_hidden_state.isfinite().all()
    assert done.rows[3].agreement > done.rows[2].agreement


def test_modes_of_modules_and_entries_of_configs_stay():
    model = hf_models.make("distilbert").train()
    model.embeddings.eval()
    adapted(model, budget="2steps")
    assert model.training
    assert not model.embeddings.training
    assert "use_cache" not in vars(model.config)


def test_layers_share_a_scheme_through_training_and_saving(tmp_path):
    model = hf_models.make("bert")
    adapted(model, "t5:shared=layers", out=tmp_path / "out")
    again = locant.load(tmp_path / "out")
    for each in (model, again):
        first, second = locant.native(each).stacks[0].layers
        assert first is second
    ids = words.rows()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).last_hidden_state, again(input_ids=ids).last_hidden_state)
