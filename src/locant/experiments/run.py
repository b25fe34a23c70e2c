"""Executes one run: trains one scheme with one seed, from the start or from its last checkpoint, and tests it.

Functions import transformers and modules that load it: it takes seconds, and the command must start sooner.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import os
import platform
import resource
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from locant.experiments import arms, own_code
from locant.experiments.learned import store_curves
from locant.experiments.tasks import Task, find_task
from locant.experiments.tasks.task import Setting
from locant.experiments.work import Run, Work
from locant.runs import files, run_folder
from locant.runs.float32_products import fast_products
from locant.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer, TrainingArguments


def load_setting(work: Work, data: Path) -> Setting:
    """Returns the setting of the task, with the tokenizer from the folder of the prepared data."""
    from transformers import AutoTokenizer

    return Setting(work.preset, AutoTokenizer.from_pretrained(data, trust_remote_code=False), data)


def quiet() -> None:
    """Turns off progress bars and advice of libraries; the metrics have what matters."""
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def describe(run: Run) -> dict[str, Any]:
    """Returns the content of run.json: the settings of a run, versions, host and start time."""
    import transformers

    versions = {"locant": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
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
    """Trains and tests one run and stores it in `folder`. A run that was interrupted resumes from its last checkpoint.

    Every process of a run calls this; torchrun sets their number. They train together. The first process writes the
    files and runs the test.
    """
    from locant.experiments.trainer import training_arguments

    began = time.perf_counter()
    torch.set_num_threads(run.work.preset.threads)
    quiet()
    arguments = training_arguments(run, folder)
    try:
        with fast_products():
            _execute(run, folder, data, arguments, began)
    except Exception as problem:
        if arguments.world_size > 1:
            traceback.clear_frames(problem.__traceback__)  # their variables hold the Trainer
        raise
    finally:
        if arguments.world_size > 1:
            _leave_process_group()


def _leave_process_group() -> None:
    """Disconnects the processes of a run and ends the threads of the connection.

    The threads end only when the process group has no references. The Trainer holds one, in a reference cycle, so we
    collect garbage first. A thread of gloo that is left may drop the last reference to a tensor while the interpreter
    shuts down. Python before 3.14 then aborts: "terminate called without an active exception".
    """
    gc.collect()
    torch.distributed.destroy_process_group()


def _execute(run: Run, folder: Path, data: Path, arguments: TrainingArguments, began: float) -> None:
    from locant.experiments.trainer import make_trainer
    from locant.hf.modes import cache_kept

    first = arguments.process_index == 0
    own_code.load(run.work, data)
    task, setting = find_task(run.work.task), load_setting(run.work, data)
    model = arms.build(task, setting, run.work.model, run.scheme, run.seed)
    last = _last_checkpoint(folder, first)
    if first:
        if not (folder / "run.json").exists():
            files.write_json(folder / "run.json", describe(run))
        run_folder.rewind(folder / run_folder.METRICS, _step(last))
    with cache_kept(model):
        trainer = make_trainer(run, model, setting, arguments)
        ready = time.perf_counter()
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
        trained = time.perf_counter()
    model = _whole_model(run, trainer, task, setting, model)
    if not first:
        return
    model.save_pretrained(folder)
    setting.tokenizer.save_pretrained(folder)
    model.eval()
    for found in task.evaluate(model, setting):
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
            "scheme_parameters": model.num_parameters() - _parameters_without_positions(run, task, setting),
        },
    )
    store_curves(model.cpu(), folder, run.work.preset.length)
    files.write(folder / run_folder.DONE, datetime.now(timezone.utc).isoformat(timespec="seconds") + "\n")
    run_folder.delete_checkpoints(folder)


def _last_checkpoint(folder: Path, first: bool) -> Path | None:
    """Returns the checkpoint that the first process finds. On a shared disk the others may read an older state."""
    from accelerate.utils import broadcast_object_list

    [last] = broadcast_object_list([run_folder.last_checkpoint(folder) if first else None])
    return last  # type: ignore[no-any-return]


def _whole_model(run: Run, trainer: Trainer, task: Task, setting: Setting, model: PreTrainedModel) -> PreTrainedModel:
    """Returns the trained model. With FSDP each process has a part of every weight; the first process gets them all."""
    if not trainer.is_fsdp_enabled:
        return model
    weights = trainer.accelerator.get_state_dict(trainer.model)  # every process has to call this
    if trainer.args.process_index == 0:
        model = arms.build(task, setting, run.work.model, run.scheme, run.seed)
        model.load_state_dict(weights)
        model.to(trainer.args.device)  # type: ignore[arg-type]
    return model


def _parameters_without_positions(run: Run, task: Task, setting: Setting) -> int:
    """Returns the parameter count of the same model without positions."""
    return arms.build(task, setting, run.work.model, "nope", run.seed).num_parameters()


def _step(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])


def _seconds_per_step(folder: Path) -> float:
    """Returns the median time of a step between two logged ones. The first steps, and pauses, have little weight."""
    rows = [
        line for line in run_folder.metrics(folder / run_folder.METRICS) if line["kind"] == "step" and "loss" in line
    ]
    steps = [
        (after["seconds"] - before["seconds"]) / (after["step"] - before["step"])
        for before, after in itertools.pairwise(rows)
        if after["seconds"] > before["seconds"]  # the clock starts anew when a run resumes
    ]
    return sorted(steps)[len(steps) // 2] if steps else math.nan


def _peak_memory() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 2**20 if platform.system() == "Darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
