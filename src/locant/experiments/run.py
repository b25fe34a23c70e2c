"""One run: one scheme, one seed. It says what it is, and does it, from wherever it was stopped.

Training is the Trainer of transformers. What is added: examples in a fixed order that depends on the seed alone,
checkpoints that are whole or do not count, a learning rate of its own for the scheme, and a file of metrics.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import platform
import re
import resource
import shutil
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from locant.experiments.arms import build
from locant.experiments.learned import store_curves
from locant.experiments.preset import Preset
from locant.experiments.tasks import task as find_task
from locant.experiments.tasks.task import Setting
from locant.runs import files, run_folder
from locant.schemes import Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

LOGS, CHECKPOINTS = 100, 10
"""How often a run logs, and how often it can be taken up again."""


@dataclass(frozen=True)
class Work:
    """What all runs of a comparison share."""

    task: str
    model: str  # a shape, or a trained model
    data: str | None
    preset: Preset
    steps: int
    seconds: float | None = None  # the budget that the steps were made from, where it was one of time

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Work:
        return cls(**{**data, "preset": Preset(**data["preset"])})


@dataclass(frozen=True)
class Run:
    work: Work
    scheme: str
    seed: int

    @property
    def name(self) -> str:
        """A file name: `tisa-kernels=5.s0`."""
        return f"{re.sub(r'[^A-Za-z0-9=+,._]', '-', self.scheme)}.s{self.seed}"


class Diverged(RuntimeError):
    """The loss is no number any more."""


def setting(work: Work, data: Path) -> Setting:
    """What a task needs, from the folder that was prepared for all runs."""
    from transformers import AutoTokenizer

    return Setting(work.preset, AutoTokenizer.from_pretrained(data), data)


def quiet() -> None:
    """Libraries keep their bars and advice to themselves: what matters is in the metrics."""
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def describe(run: Run) -> dict[str, Any]:
    import transformers

    import locant

    versions = {"locant": locant.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
                "python": platform.python_version()}  # fmt: skip
    return {
        "scheme": run.scheme,
        "seed": run.seed,
        **run.work.to_dict(),
        "versions": versions,
        "host": platform.node(),
        "process": os.getpid(),
        "threads": torch.get_num_threads(),
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
        "began": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def execute(run: Run, folder: Path, data: Path) -> None:
    """Trains, tests and keeps one run; where it was stopped before, it goes on.

    Every process of a run calls this (torchrun says how many there are). They train together; only the first one writes
    and tests.
    """
    began = time.perf_counter()
    torch.set_num_threads(run.work.preset.threads)
    quiet()
    arguments = _arguments(run, folder)  # several processes find each other here
    try:
        _execute(run, folder, data, arguments, began)
    finally:
        if arguments.world_size > 1:
            torch.distributed.destroy_process_group()


def _execute(run: Run, folder: Path, data: Path, arguments: TrainingArguments, began: float) -> None:
    from accelerate.utils import broadcast_object_list

    from locant.hf.modes import cache_kept

    main = arguments.process_index == 0
    task, here = find_task(run.work.task), setting(run.work, data)
    model = build(task, here, run.work.model, run.scheme, run.seed)
    # The first one looks and tells the others: on a shared disk each machine may see another state of it.
    [last] = broadcast_object_list([run_folder.last_checkpoint(folder) if main else None])
    if main:
        if not (folder / "run.json").exists():
            files.write_json(folder / "run.json", describe(run))
        run_folder.rewind(folder / run_folder.METRICS, _step(last))
    with cache_kept(model):
        trainer = _trainer(run, model, here, arguments)
        ready = time.perf_counter()
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
        trained = time.perf_counter()
    if trainer.is_fsdp_enabled:  # each process has a part of every weight
        weights = trainer.accelerator.get_state_dict(trainer.model)
        if main:
            model = build(task, here, run.work.model, run.scheme, run.seed)
            model.load_state_dict(weights)
            model.to(arguments.device)  # type: ignore[arg-type]
    if not main:
        return
    model.save_pretrained(folder)
    here.tokenizer.save_pretrained(folder)
    model.eval()
    for found in task.evaluate(model, here):
        files.append(folder / run_folder.METRICS, {"kind": "test", **dataclasses.asdict(found)})
    memory = _peak_memory()
    files.append(
        folder / run_folder.METRICS,
        {
            "kind": "cost",
            "seconds_per_step": _seconds_per_step(folder),
            "seconds": {"before": ready - began, "training": trained - ready, "test": time.perf_counter() - trained},
            "memory_mb": memory,
            "parameters": model.num_parameters(),
            "scheme_parameters": model.num_parameters() - _without_positions(run, here),
        },
    )
    store_curves(model.cpu(), folder, run.work.preset.length)
    files.write(folder / run_folder.DONE, datetime.now(timezone.utc).isoformat(timespec="seconds") + "\n")
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)


def _without_positions(run: Run, here: Setting) -> int:
    """Parameters of the same model without positions: what an arm has more than that are those of its scheme."""
    return build(find_task(run.work.task), here, run.work.model, "nope", run.seed).num_parameters()


def _step(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])


def _seconds_per_step(folder: Path) -> float:
    """The middle one of the times between two log steps: the first steps, and pauses, do not count."""
    rows = [line for line in files.lines(folder / run_folder.METRICS) if line["kind"] == "step" and "loss" in line]
    steps = [
        (after["seconds"] - before["seconds"]) / (after["step"] - before["step"])
        for before, after in itertools.pairwise(rows)
        if after["seconds"] > before["seconds"]  # not where a run was taken up again
    ]
    return sorted(steps)[len(steps) // 2] if steps else math.nan


def _peak_memory() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 2**20 if platform.system() == "Darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _arguments(run: Run, folder: Path) -> TrainingArguments:
    from transformers import TrainingArguments

    work, preset = run.work, run.work.preset
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if preset.batch % processes:
        raise ValueError(f"a batch of {preset.batch} does not go evenly into {processes} processes")
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
        train_sampling_strategy="sequential",  # the order is that of the examples
        seed=run.seed,
        logging_steps=log,
        logging_nan_inf_filter=False,
        save_steps=-(-work.steps // CHECKPOINTS // log) * log,  # whole log steps, so that no log is torn apart
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # one process, one GPU: the batch is not multiplied by what is there
    return arguments


def _trainer(run: Run, model: PreTrainedModel, here: Setting, arguments: TrainingArguments) -> Any:
    import transformers
    from accelerate import PartialState
    from transformers import Trainer, TrainerCallback

    work, preset, task = run.work, run.work.preset, find_task(run.work.task)
    folder = Path(str(arguments.output_dir))
    start = time.perf_counter()

    class Recorder(TrainerCallback):
        """Writes metrics.jsonl, and stops a run that has no loss any more."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs is None or "loss" not in logs:
                return
            if state.is_world_process_zero:
                row = {key: logs[key] for key in logs if key in ("loss", "grad_norm", "learning_rate") or "/" in key}
                done = {"kind": "step", "step": state.global_step, "seconds": time.perf_counter() - start}
                files.append(folder / run_folder.METRICS, {**done, **row})
            if not math.isfinite(float(logs["loss"])):
                raise Diverged(f"the loss was {logs['loss']} at step {state.global_step}")

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            PartialState().wait_for_everyone()  # each process has a part of it
            if state.is_world_process_zero:
                (folder / f"checkpoint-{state.global_step}" / run_folder.WHOLE).touch()

    class InOrder(Trainer):
        """The scheme's parameters learn at a rate of their own, and nothing pulls them towards zero."""

        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                whole: Any = self.model if model is None else model
                named = [(name, p) for name, p in whole.named_parameters() if p.requires_grad]
                decayed = set(self.get_decay_parameter_names(whole))
                owners = tuple(f"{name}." for name, part in whole.named_modules() if isinstance(part, Scheme))
                scheme = {name for name, _ in named if name.startswith(owners)}
                groups = [
                    {"params": [p for n, p in named if n in decayed - scheme], "weight_decay": preset.decay},
                    {"params": [p for n, p in named if n not in decayed | scheme], "weight_decay": 0.0},
                    {"params": [p for n, p in named if n in scheme], "weight_decay": 0.0,
                     "lr": preset.scheme_rate or preset.rate},
                ]  # fmt: skip
                cls, options = self.get_optimizer_cls_and_kwargs(self.args, whole)
                self.optimizer = cls([group for group in groups if group["params"]], **options)
            return self.optimizer

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            """The mean over the labels of all processes: each has the mean over its own, and some have more of them."""
            if self.args.world_size == 1 or "labels" not in inputs:
                return super().compute_loss(model, inputs, *args, **kwargs)
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            causal = task.auto == "AutoModelForCausalLM"  # the model shifts the labels, so that there is one less
            own = (inputs["labels"][..., 1:] if causal else inputs["labels"]).ne(-100).sum()
            if not own:
                loss = 0 * outputs["logits"].sum()  # a mean over nothing is no number; the others have some
            return loss * own * self.args.world_size / self.accelerator.reduce(own, "sum")

    trainer = InOrder(
        model=model,
        args=arguments,
        train_dataset=task.examples(here, run.seed, work.steps * preset.batch),
        data_collator=lambda examples: task.collate(here, examples),
    )
    if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2):
        raise ValueError("a model is sharded by FSDP 2 alone: `fsdp_version: 2` in the config of accelerate launch")
    trainer.remove_callback(transformers.PrinterCallback)
    if not trainer.is_fsdp_enabled and _has_table(model):  # a sharded table is whole in no process
        from locant.analysis.invariance import InvarianceCallback

        trainer.add_callback(InvarianceCallback(last=task.positions(preset) - 1))
    trainer.add_callback(Recorder())  # after what adds to the logs
    # The loss is the model's own mean: some models take the number of labels over all processes and leave it unused.
    trainer.model_accepts_loss_kwargs = False
    return trainer


def _has_table(model: PreTrainedModel) -> bool:
    """Whether there is a table of positions whose translation invariance can be followed."""
    from locant.analysis.invariance import stacks

    try:
        return any(stack.table is not None for stack in stacks(model))
    except (ValueError, NotImplementedError, RuntimeError):
        return False


def seconds_of_a_step(work: Work, scheme: str, data: Path, count: int) -> float:
    """The time of a training step here, for a budget in minutes: the middle one of a few."""
    torch.set_num_threads(work.preset.threads)
    quiet()
    task, here = find_task(work.task), setting(work, data)
    model = build(task, here, work.model, scheme, 0)
    if torch.cuda.is_available():
        model.cuda()  # type: ignore[call-arg]
    examples = task.examples(here, 0, work.preset.batch * count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model.train()
    times = []
    for number in range(count):
        start = time.perf_counter()
        rows = [examples[number * work.preset.batch + at] for at in range(work.preset.batch)]
        batch = {name: value.to(model.device) for name, value in task.collate(here, rows).items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for a GPU
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[len(times[2:]) // 2]
