"""The training of a run, with transformers' Trainer. What we add:

- examples in a fixed order, which depends on the seed alone
- checkpoints that count only when they are complete
- a learning rate of its own for the scheme, without weight decay
- one loss over several processes
- a file of metrics
- models kept on the way

Importing transformers' Trainer takes seconds. Only a process that trains imports this module.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from locant.analysis.invariance import InvarianceCallback, stacks
from locant.experiments.presets import Preset
from locant.experiments.tasks import Task, find_task
from locant.experiments.tasks.task import Setting
from locant.experiments.work import Diverged, Run
from locant.hf.trackers import report_last
from locant.runs import files, run_folder
from locant.schemes import Scheme

LOGS, CHECKPOINTS = 100, 10
"""How many times a run logs its loss, and how many checkpoints it writes."""


def training_arguments(run: Run, folder: Path) -> TrainingArguments:
    """Returns the arguments of the Trainer. With several processes (torchrun), this call connects them."""
    work, preset = run.work, run.work.preset
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if preset.batch % processes:
        raise ValueError(f"a batch of {preset.batch} does not divide evenly among {processes} processes")
    log = max(1, work.steps // LOGS)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=work.steps,
        per_device_train_batch_size=preset.batch // processes,
        learning_rate=preset.rate,
        lr_scheduler_type="cosine",
        warmup_steps=-(-work.steps // 10),
        weight_decay=preset.decay,
        max_grad_norm=1.0,
        train_sampling_strategy="sequential",  # the task orders the examples
        seed=run.seed,
        logging_steps=log,
        logging_nan_inf_filter=False,
        save_steps=-(-work.steps // CHECKPOINTS // log) * log,  # multiples of `log`: a checkpoint has no partial loss
        report_to=list(run.report_to) or "none",
        run_name=run.name,
        disable_tqdm=True,
        log_level="error",
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # one GPU per process: more would multiply the batch
    return arguments


def make_trainer(run: Run, model: PreTrainedModel, setting: Setting, arguments: TrainingArguments) -> Trainer:
    """Returns the Trainer of a run, with its examples and callbacks."""
    preset, task = run.work.preset, find_task(run.work.task)
    trainer = RunTrainer(
        task,
        preset,
        model=model,
        args=arguments,
        train_dataset=task.examples(setting, run.seed, run.work.steps * preset.batch),
        data_collator=lambda examples: task.collate(setting, examples),
    )
    if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2):
        raise ValueError("only FSDP 2 can shard a model: set `fsdp_version: 2` in the config of accelerate launch")
    trainer.remove_callback(PrinterCallback)
    if not trainer.is_fsdp_enabled and _has_table(model):  # with FSDP no process has the whole table
        trainer.add_callback(InvarianceCallback(last=task.positions(preset) - 1))
    if preset.kept:
        if trainer.is_fsdp_enabled:
            raise ValueError("a sharded run cannot keep models on the way; leave `kept` out of the preset")
        trainer.add_callback(Keeper(Path(str(arguments.output_dir)), preset.kept))
    trainer.add_callback(Recorder(Path(str(arguments.output_dir))))  # last: the callback above adds to the logs
    report_last(trainer)
    # The loss is the model's own mean. Some models accept the number of labels over all processes but ignore it.
    trainer.model_accepts_loss_kwargs = False
    return trainer


class RunTrainer(Trainer):
    """A Trainer with a learning rate for the scheme, and one loss over several processes."""

    def __init__(self, task: Task, preset: Preset, **rest: Any) -> None:
        self.task, self.preset = task, preset
        super().__init__(**rest)

    def create_optimizer(self, model: Any = None) -> Any:
        """Returns the optimizer. The scheme's parameters have their own learning rate and no weight decay."""
        if self.optimizer is None:
            whole: Any = self.model if model is None else model
            named = [(name, p) for name, p in whole.named_parameters() if p.requires_grad]
            decayed = set(self.get_decay_parameter_names(whole))
            owners = tuple(f"{name}." for name, part in whole.named_modules() if isinstance(part, Scheme))
            scheme = {name for name, _ in named if name.startswith(owners)}
            groups = [
                {"params": [p for n, p in named if n in decayed - scheme], "weight_decay": self.preset.decay},
                {"params": [p for n, p in named if n not in decayed | scheme], "weight_decay": 0.0},
                {"params": [p for n, p in named if n in scheme], "weight_decay": 0.0,
                 "lr": self.preset.scheme_rate or self.preset.rate},
            ]  # fmt: skip
            cls, options = self.get_optimizer_cls_and_kwargs(self.args, whole)
            self.optimizer = cls([group for group in groups if group["params"]], **options)
        return self.optimizer

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the mean over the labels of all processes. Each process has its own mean and its own label count."""
        if self.args.world_size == 1 or "labels" not in inputs:
            return super().compute_loss(model, inputs, *args, **kwargs)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        causal = self.task.auto == "AutoModelForCausalLM"  # the model shifts the labels: the first one has no loss
        own = (inputs["labels"][..., 1:] if causal else inputs["labels"]).ne(-100).sum()
        if not own:
            loss = 0 * outputs["logits"].sum()  # the mean over no labels is NaN; other processes have labels
        return loss * own * self.args.world_size / self.accelerator.reduce(own, "sum")


class Recorder(TrainerCallback):
    """Writes metrics.jsonl, marks complete checkpoints, and stops a run whose loss is NaN or infinite."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.start = folder, time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Appends one line per logged step."""
        if logs is None or "loss" not in logs:
            return
        if state.is_world_process_zero:
            row = {key: logs[key] for key in logs if key in ("loss", "grad_norm", "learning_rate") or "/" in key}
            done = {"kind": "step", "step": state.global_step, "seconds": time.perf_counter() - self.start}
            files.append(self.folder / run_folder.METRICS, {**done, **row})
        if not math.isfinite(float(logs["loss"])):
            raise Diverged(f"the loss was {logs['loss']} at step {state.global_step}")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Marks a checkpoint as complete when every process has written its part."""
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            run_folder.mark_checkpoint(self.folder, state.global_step)


class Keeper(TrainerCallback):
    """Keeps the model after 1/2, 1/4, 1/8 … of the steps, in folders that appear only when they are complete.

    A model is kept before the checkpoint of its step is written. So a run that resumes from a checkpoint already has
    the models of all earlier steps.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Deletes what a killed process has left unfinished."""
        if state.is_world_process_zero:
            for unfinished in (self.folder / run_folder.KEPT).glob(".step-*"):
                shutil.rmtree(unfinished)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Saves the model if this is one of the steps and it is not there."""
        step, last = state.global_step, state.max_steps
        path = run_folder.kept_model(self.folder, step)
        wanted = state.is_world_process_zero and step in run_folder.kept_steps(last, self.count)
        if wanted and not path.exists():
            temporary = path.with_name(f".{path.name}")
            model.save_pretrained(temporary)
            temporary.rename(path)


def _has_table(model: PreTrainedModel) -> bool:
    """Whether the model has a table of positions whose translation invariance can be measured during training."""
    try:
        return any(stack.table is not None for stack in stacks(model))
    except (ValueError, NotImplementedError, RuntimeError):
        return False
