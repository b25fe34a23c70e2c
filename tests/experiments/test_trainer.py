"""The Trainer of a run: its optimizer, and its checkpoints."""

import dataclasses
import os
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PrinterCallback, TrainerCallback, TrainingArguments

import locant
from locant.analysis.invariance import InvarianceCallback
from locant.experiments import trainer as trainer_module
from locant.experiments.presets import SCRATCH, find_preset
from locant.experiments.tasks import find_task
from locant.experiments.trainer import Keeper, Recorder, RunTrainer, make_trainer, training_arguments
from locant.experiments.work import Diverged, Run, Work
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


def test_arguments_of_the_trainer(tmp_path):
    run = Run(Work("clm", "gpt2", None, PRESET, 230), "tisa", 5)
    made = training_arguments(run, tmp_path)
    found = {name: getattr(made, name) for name in (
        "output_dir", "max_steps", "per_device_train_batch_size", "learning_rate", "warmup_steps", "weight_decay",
        "max_grad_norm", "seed", "logging_steps", "logging_nan_inf_filter", "save_steps", "report_to", "run_name",
        "disable_tqdm", "log_level", "remove_unused_columns", "dataloader_pin_memory", "use_cpu",
    )}  # fmt: skip
    gpu = torch.cuda.is_available()
    assert found == {
        "output_dir": str(tmp_path), "max_steps": 230, "per_device_train_batch_size": PRESET.batch,
        "learning_rate": 0.01, "warmup_steps": 23, "weight_decay": 0.5, "max_grad_norm": 1.0, "seed": 5,
        "logging_steps": 2, "logging_nan_inf_filter": False, "save_steps": 24, "report_to": [],
        "run_name": "tisa.s5", "disable_tqdm": True, "log_level": "error", "remove_unused_columns": False,
        "dataloader_pin_memory": gpu, "use_cpu": not gpu,
    }  # fmt: skip
    assert made.lr_scheduler_type == "cosine"
    assert made.train_sampling_strategy == "sequential"


def test_a_batch_that_does_not_divide_among_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=f"a batch of {PRESET.batch} does not divide evenly among 3 processes"):
        training_arguments(Run(Work("clm", "gpt2", None, PRESET, 12), "tisa", 0), tmp_path)


@pytest.mark.parametrize("task", ["clm", "mlm"])
def test_the_loss_of_two_processes_is_the_mean_over_all_labels(task, tmp_path, monkeypatch):
    kind, auto = {"clm": ("gpt2", AutoModelForCausalLM), "mlm": ("bert", AutoModelForMaskedLM)}[task]
    run = Run(Work(task, kind, None, PRESET, 12), "tisa", 0)
    model = locant.swap(hf_models.make(kind, auto), "tisa").eval()
    ids = torch.randint(3, 60, (3, 2, 8), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :, 3:] = -100  # 3 of 8 labels; the first of them has no loss in a causal model
    labels[1, 1] = -100
    labels[2] = -100  # no label at all

    def loss(parts):
        made = RunTrainer(find_task(task), PRESET, model=model, args=training_arguments(run, tmp_path))
        made.model_accepts_loss_kwargs = False
        counted = [labels[part, :, 1:] if task == "clm" else labels[part] for part in parts]
        total = sum((each != -100).sum() for each in counted)

        def reduce(own, how):
            assert how == "sum"
            assert own in [(each != -100).sum() for each in counted]
            return total

        made.accelerator.reduce = reduce
        inputs = [{"input_ids": ids[part], "labels": labels[part]} for part in parts]
        return torch.stack([made.compute_loss(model, each) for each in inputs]).mean()

    whole = model(input_ids=ids[:2].flatten(0, 1), labels=labels[:2].flatten(0, 1)).loss
    torch.testing.assert_close(loss([0]), model(input_ids=ids[0], labels=labels[0]).loss)
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 2))
    torch.testing.assert_close(loss([0, 1]), whole)
    one = model(input_ids=ids[1], labels=labels[1]).loss
    torch.testing.assert_close(loss([1, 2]), one)  # a process without labels adds nothing, and no NaN
    assert not torch.isclose(whole, one)


def test_inputs_without_labels_have_the_loss_of_the_model(tmp_path, monkeypatch):
    made = trainer("tisa", tmp_path)
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 2))
    monkeypatch.setattr(
        "transformers.Trainer.compute_loss", lambda self, model, inputs, *args, **rest: (inputs, args, rest)
    )
    given = {"input_ids": 1, "start_positions": 2}
    assert made.compute_loss(made.model, given, True, num_items_in_batch=3) == (
        given,
        (True,),
        {"num_items_in_batch": 3},
    )


def test_a_line_of_metrics_for_every_logged_loss(tmp_path):
    recorder, state = Recorder(tmp_path), SimpleNamespace(is_world_process_zero=True, global_step=7)
    logs = {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1, "invariance/table": 0.5, "epoch": 1.0}
    recorder.on_log(None, state, None, logs=logs)
    recorder.on_log(None, state, None)
    recorder.on_log(None, state, None, logs={"train_runtime": 3.0})
    (line,) = run_folder.metrics(tmp_path / run_folder.METRICS)
    assert line.pop("seconds") >= 0
    assert line == {"kind": "step", "step": 7, **{name: value for name, value in logs.items() if name != "epoch"}}
    state.is_world_process_zero = False
    recorder.on_log(None, state, None, logs=logs)
    assert len(run_folder.metrics(tmp_path / run_folder.METRICS)) == 1
    for value in (float("nan"), float("inf")):
        with pytest.raises(Diverged, match=f"the loss was {value} at step 7"):
            recorder.on_log(None, state, None, logs={"loss": value})


class Rows:
    """A task whose examples are rows of numbers."""

    auto = "AutoModelForCausalLM"

    def examples(self, setting, seed, count):
        return [{"input_ids": torch.full((8,), (seed + n) % 60)} for n in range(count)]

    def collate(self, setting, examples):
        return {"setting": setting, "count": len(examples)}

    def positions(self, preset):
        return preset.length


def made_trainer(spec, folder, monkeypatch, preset=PRESET):
    monkeypatch.setattr(trainer_module, "find_task", lambda name: {"rows": Rows()}[name])
    run = Run(Work("rows", "gpt2", None, preset, 12), spec, 3)
    model = locant.swap(hf_models.make("gpt2", AutoModelForCausalLM), spec)
    return make_trainer(run, model, "the setting", training_arguments(run, folder))


def callbacks(made, kind):
    return [each for each in made.callback_handler.callbacks if isinstance(each, kind)]


def test_the_trainer_of_a_run(tmp_path, monkeypatch):
    made = made_trainer("learned", tmp_path, monkeypatch)
    assert len(made.train_dataset) == 12 * PRESET.batch
    assert int(made.train_dataset[0]["input_ids"][0]) == 3  # the seed
    assert made.data_collator([1, 2]) == {"setting": "the setting", "count": 2}
    assert [each.folder for each in callbacks(made, Recorder)] == [tmp_path]
    assert [each.last for each in callbacks(made, InvarianceCallback)] == [PRESET.length - 1]
    kinds = [type(each) for each in made.callback_handler.callbacks]
    assert kinds.index(Recorder) > kinds.index(InvarianceCallback)  # which adds to what is recorded
    assert not callbacks(made, PrinterCallback)
    assert not callbacks(made, Keeper)
    assert made.model_accepts_loss_kwargs is False
    assert not callbacks(made_trainer("alibi", tmp_path, monkeypatch), InvarianceCallback)  # no table
    keeping = made_trainer("alibi", tmp_path, monkeypatch, dataclasses.replace(PRESET, kept=2))
    assert [(each.folder, each.count) for each in callbacks(keeping, Keeper)] == [(tmp_path, 2)]


@pytest.mark.parametrize(
    ("deepspeed", "fsdp", "second", "kept", "words"),
    [
        (True, False, False, 0, "only FSDP 2 can shard a model"),
        (False, True, False, 0, "only FSDP 2 can shard a model"),
        (False, True, True, 2, "a sharded run cannot keep models"),
        (False, True, True, 0, None),
    ],
)
def test_sharded_runs(deepspeed, fsdp, second, kept, words, tmp_path, monkeypatch):
    whole = RunTrainer.__init__

    def sharded(self, *args, **rest):
        whole(self, *args, **rest)
        self.is_deepspeed_enabled, self.is_fsdp_enabled = deepspeed, fsdp
        monkeypatch.setattr(type(self.accelerator), "is_fsdp2", property(lambda self: second))

    monkeypatch.setattr(RunTrainer, "__init__", sharded)
    preset = dataclasses.replace(PRESET, kept=kept)
    if words is None:
        assert not callbacks(made_trainer("learned", tmp_path, monkeypatch, preset), InvarianceCallback)
    else:
        with pytest.raises(ValueError, match=words):
            made_trainer("learned", tmp_path, monkeypatch, preset)


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
