"""The Trainer of a run: its optimizer, and its checkpoints."""

import os
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

import locant
from locant.experiments.presets import SCRATCH, find_preset
from locant.experiments.tasks import find_task
from locant.experiments.trainer import Keeper, Recorder, RunTrainer, training_arguments
from locant.experiments.work import Run, Work
from locant.runs import run_folder
from tests import hf_models

PRESET = find_preset("quick:decay=0.5,rate=0.01,scheme_rate=0.02", SCRATCH)


def trainer(spec, folder, **options):
    run = Run(Work("clm", "gpt2", None, PRESET, 12), spec, 0)
    model = locant.swap(hf_models.make("gpt2", AutoModelForCausalLM), spec)
    return RunTrainer(find_task("clm"), PRESET, model=model, args=training_arguments(run, folder), **options)


@pytest.mark.parametrize("spec", ["tisa", "huang4:clip=4", "learned", "t5+shaw:clip=2"])
def test_weight_decay_leaves_the_parameters_of_a_scheme_alone(spec, tmp_path):
    made = trainer(spec, tmp_path)
    model, optimizer = made.model, made.create_optimizer()
    schemes = {p for part in model.modules() if isinstance(part, locant.Scheme) for p in part.parameters()}
    before = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    for parameter in before:
        parameter.grad = torch.zeros_like(parameter)  # so a step does nothing but decay
    optimizer.step()
    changed = {parameter for parameter, value in before.items() if not torch.equal(parameter, value)}
    assert schemes
    assert not changed & schemes
    block = model.transformer.h[0]
    weight = block.mlp.c_fc.weight
    torch.testing.assert_close(weight, before[weight] * (1 - PRESET.rate * PRESET.decay))
    assert not changed & {block.mlp.c_fc.bias, block.ln_1.weight}


def test_a_scheme_has_its_own_learning_rate(tmp_path):
    made = trainer("tisa", tmp_path)
    schemes = {p for part in made.model.modules() if isinstance(part, locant.Scheme) for p in part.parameters()}
    rates = {p: group["lr"] for group in made.create_optimizer().param_groups for p in group["params"]}
    assert {rates[p] for p in schemes} == {0.02}
    assert {rate for p, rate in rates.items() if p not in schemes} == {0.01}


class ClockSetBack(TrainerCallback):
    """After every checkpoint, the clock goes back by a day: for it, all files are from tomorrow."""

    def __init__(self, folder):
        self.folder = folder

    def on_save(self, args, state, control, **rest):
        tomorrow = time.time() + 86_400
        for path in self.folder.glob("checkpoint-*"):
            os.utime(path, (tomorrow, tomorrow))


def test_the_latest_checkpoint_is_kept_after_the_clock_was_set_back(tmp_path):
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(60, (12 * PRESET.batch, 8))]
    made = trainer("alibi", tmp_path, train_dataset=rows, callbacks=[Recorder(tmp_path), ClockSetBack(tmp_path)])
    made.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-12"]
    assert run_folder.last_checkpoint(tmp_path) == tmp_path / "checkpoint-12"


class Watcher(TrainerCallback):
    """Notes the weights after every step, and may stop the process in the middle."""

    def __init__(self, dies_after=0):
        self.dies_after, self.seen = dies_after, {}

    def on_step_end(self, args, state, control, model=None, **rest):
        self.seen[state.global_step] = {name: value.clone() for name, value in model.state_dict().items()}
        if state.global_step == self.dies_after:
            raise KeyboardInterrupt


def keeping(folder, watcher):
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(12 * PRESET.batch * 8).view(-1, 8) % 60]
    return trainer("alibi", folder, train_dataset=rows, callbacks=[Keeper(folder, 2), Recorder(folder), watcher])


def assert_kept(folder, seen):
    assert sorted(path.name for path in (folder / "kept").iterdir()) == ["step-3", "step-6"]
    for step in (3, 6):
        found = locant.load(run_folder.kept_model(folder, step)).state_dict()
        for name, value in seen[step].items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=f"step {step}: {name}")


def test_models_are_kept_on_the_way(tmp_path):
    watcher = Watcher()
    keeping(tmp_path, watcher).train()
    assert_kept(tmp_path, watcher.seen)
    assert not torch.equal(*(watcher.seen[step]["transformer.wte.weight"] for step in (3, 6)))


def test_a_resumed_run_has_every_kept_model_and_no_half_written_one(tmp_path):
    whole, first = Watcher(), Watcher(dies_after=5)
    keeping(tmp_path / "whole", whole).train()
    with pytest.raises(KeyboardInterrupt):
        keeping(tmp_path / "cut", first).train()
    before = (tmp_path / "cut" / "kept" / "step-3" / "model.safetensors").stat().st_mtime_ns
    half = tmp_path / "cut" / "kept" / ".step-6"
    half.mkdir()
    (half / "config.json").write_text("{")
    keeping(tmp_path / "cut", Watcher()).train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))
    assert_kept(tmp_path / "cut", whole.seen)
    assert (tmp_path / "cut" / "kept" / "step-3" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("steps", "count", "kept"), [(800, 3, [100, 200, 400]), (3, 5, [1]), (7, 2, [1, 3]), (8, 0, [])]
)
def test_the_steps_of_kept_models_are_halves_of_halves(steps, count, kept):
    assert run_folder.kept_steps(steps, count) == kept
