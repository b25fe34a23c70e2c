"""Tiny comparisons, and the functions that tests call in other processes: runs that are killed, paused or starved.

This module does not import pytest: forks of the fork server import it, and every import costs them time.
"""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import torch

from locant.experiments import fork_server, ray_cluster, workers
from locant.experiments.comparison import DATA, Comparison, begin, open_folder, pending, where
from locant.experiments.work import Run
from locant.experiments.workers import LocalWorkers, do_run, wait_for_others
from locant.runs import files, run_folder
from locant.runs.budget import Budget

STEPS = 12  # every one is logged, every second one has a checkpoint
PRESET = "quick:length=16,longest=2,batch=4,layers=1,width=16,heads=2,vocabulary=300,evaluated=512"
SCHEMES = ["tisa", "huang4:clip=4", "native", "rope"]
PAUSE = STEPS // 3
"""A paused run stops after this many steps."""

run_process, do_run_on_ray = workers._run_process, ray_cluster._do_run


def text(path: Path) -> Path:
    """Writes a text that is tokenised in no time: a random walk over eight words."""
    words, state = ["one", "two", "three", "four", "five", "six", "seven", "eight"], 1
    with path.open("w") as file:
        for number in range(8000):
            state = (state * 1103515245 + 12345) % 2**31
            file.write(words[(state >> 16) % 8] + ("\n" if number % 12 == 11 else " "))
    return path


def compared(out: Path, schemes: list[str], *, steps: int = STEPS, preset: str = PRESET, **rest: Any) -> Comparison:
    """Begins a tiny comparison of one seed."""
    rest = {"data": None, "model": None, "seeds": [0], "task": "clm", **rest}
    if rest["data"] is None:
        rest["data"] = str(text(out.parent / "text.txt"))
    return begin(out, schemes=schemes, budget=Budget(steps=steps), preset=preset, calibrate=None, **rest)


def complete(out: Path, comparison: Comparison) -> None:
    """Does all runs that are left."""
    for _ in LocalWorkers(1).work([(run, where(out, run)) for run in pending(out, comparison)], out / DATA):
        pass


def numbers(here: Path) -> list[dict[str, Any]]:
    """The metrics of a run that an interruption must not change: all but times and memory."""
    rows = files.lines(here / run_folder.METRICS)
    return [
        {key: value for key, value in row.items() if key not in ("seconds", "seconds_per_step", "memory_mb")}
        for row in rows
    ]


def assert_same(here: Path, undisturbed: Path) -> None:
    """The run in `here` ended as one that nothing disturbed: to the last bit."""
    assert run_folder.state(here) == "done", (here / "log.txt").read_text()
    assert numbers(here) == numbers(undisturbed)
    assert (here / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
    assert not list(here.glob("checkpoint-*"))


# ---- runs that are killed ----


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(run: Run, here: Path, data: Path, moment: str, after: int, sender: Any) -> None:
    """A run whose process is killed by `kill -9` when `moment` comes, after it has come `after` times before."""
    count = iter(range(after, -1, -1))

    def now() -> bool:
        return next(count) == 0

    append, touch, save, rmtree = files.append, Path.touch, torch.save, shutil.rmtree
    if moment in ("step", "half a line", "test"):

        def appending(path: Path, line: dict) -> None:
            if line["kind"] == ("test" if moment == "test" else "step") and now():
                if moment == "half a line":
                    with path.open("a") as file:
                        file.write(json.dumps(line)[:20])
                die()
            append(path, line)

        files.append = appending
    elif moment == "half a checkpoint":

        def saving(thing: object, path: str, *args: object, **rest: object) -> None:
            if str(path).endswith("optimizer.pt") and now():
                save(thing, path)
                os.truncate(path, 1000)
                die()
            save(thing, path, *args, **rest)

        torch.save = saving
    elif moment == "whole checkpoint, unmarked":

        def touching(path: Path, *args: object, **rest: object) -> None:
            if path.name == run_folder.WHOLE and now():
                die()
            touch(path, *args, **rest)

        Path.touch = touching
    elif moment == "old checkpoint half deleted":

        def deleting(path: str, *args: object, **rest: object) -> None:
            if "checkpoint-" in str(path) and now():
                (Path(path) / "optimizer.pt").unlink()
                die()
            rmtree(path, *args, **rest)

        shutil.rmtree = deleting
    elif moment == "half a model":
        from transformers import PreTrainedModel

        pretrained = PreTrainedModel.save_pretrained

        def keeping(self: object, where: Path, *args: object, **rest: object) -> None:
            pretrained(self, where, *args, **rest)
            if Path(where) == here:
                os.truncate(here / "model.safetensors", 1000)
                die()

        PreTrainedModel.save_pretrained = keeping
    else:
        raise AssertionError(moment)
    run_process(run, here, data, -1, sender)


def starved(run: Run, here: Path, data: Path, most: int, sender: Any) -> None:
    """A run that can write no file beyond `most` bytes: the system refuses, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    run_process(run, here, data, -1, sender)


# ---- runs that wait to be killed from outside ----


def pause() -> None:
    """Makes a run of this process wait for ever after PAUSE steps. Its other threads go on."""
    append = files.append

    def appending(path: Path, line: dict) -> None:
        append(path, line)
        if line.get("step") == PAUSE:
            threading.Event().wait()

    files.append = appending


def pausing(name: str, run: Run, here: Path, data: Path, device: int, sender: Any) -> None:
    """The process of a run; the run of this name pauses."""
    if run.name == name:
        pause()
    run_process(run, here, data, device, sender)


def pausing_once_on_ray(run: Run, here: Path, data: Path) -> str:
    """A run on Ray; the first process of tisa pauses, the second one does not."""
    paused = here.with_suffix(".paused")
    if run.scheme == "tisa" and not paused.exists():
        here.parent.mkdir(parents=True, exist_ok=True)
        paused.touch()
        pause()
    return do_run_on_ray(run, here, data)


# ---- several processes per run ----


def together(out: Path, here: Path, die_at: int, environment: dict[str, str]) -> tuple[str, list[str]]:
    """One of the processes of a run; the first one may be killed after a step.

    Returns the class of the parameters after training, and the names of gloo's threads that are left.
    """
    import accelerate

    from locant.experiments import trainer as training

    os.environ |= environment
    append, make, begin_state = files.append, training.make_trainer, accelerate.state.AcceleratorState.__init__
    kinds: list[str] = []

    def appending(path: Path, line: dict) -> None:
        append(path, line)
        if line.get("step") == die_at:
            die()

    def beginning(self: Any, *args: Any, fsdp_plugin: Any = None, **rest: Any) -> None:
        begin_state(self, *args, fsdp_plugin=fsdp_plugin, **rest)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = accelerate.DistributedType.FSDP, fsdp_plugin
            accelerate.PartialState._shared_state["distributed_type"] = self.distributed_type

    def making(*args: Any) -> Any:
        trainer = make(*args)
        weak = weakref.proxy(trainer)  # nothing here keeps it alive

        def train(**rest: Any) -> None:
            training.RunTrainer.train(weak, **rest)
            kinds.append(type(next(weak.model.parameters())).__name__)

        trainer.train = train
        return trainer

    files.append = appending
    # accelerate has FSDP for GPUs and the like alone; torch has it for CPUs too. This is the switch that it leaves off.
    accelerate.state.AcceleratorState.__init__ = beginning
    training.make_trainer = making
    do_run(open_folder(out).runs()[0], here, out / DATA)
    assert not torch.distributed.is_initialized()
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return " ".join(kinds), [name for name in threads if "gloo" in name]


# ---- comparers ----


def comparer(out: Path, data: Path, limit: int, sender: Any) -> None:
    """A process that compares, with `limit` as in `starved`. Its runs are forks of itself.

    A fork server of its own would import everything again. The comparer that is killed has one: see below.
    """
    os.dup2(sender.fileno(), 1)
    os.dup2(sender.fileno(), 2)
    fork_server.start = lambda: multiprocessing.get_context("fork")
    compare(out, data, limit, comparers=0 if limit else 2)


def compare(out: Path, data: Path, limit: int = 0, comparers: int = 0) -> None:
    """Does what is left of a comparison of two seeds, and prints the processes that it started.

    It waits until as many comparers as `comparers` have begun.
    """
    if limit:
        begun = open_folder(out)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    else:
        begun = compared(out, SCHEMES[:3], data=str(data), seeds=[0, 1], check=lambda *arguments: None)
    out.with_suffix(f".{os.getpid()}").touch()
    while len(list(out.parent.glob(f"{out.name}.*"))) < comparers:
        time.sleep(0.01)
    started: set[int] = set()
    while runs := [(run, where(out, run)) for run in pending(out, begun)]:
        for steps in (LocalWorkers(1).work(runs, out / DATA), wait_for_others(runs)):
            for _ in steps:
                started |= {child.pid for child in multiprocessing.active_children()}
    print(*started, flush=True)


if __name__ == "__main__":  # python -m tests.experiments.processes OUT DATA NAME: a comparer whose run NAME pauses
    from tests.experiments import processes  # workers do not import the script that starts them

    workers._run_process = partial(processes.pausing, sys.argv[3])
    compare(Path(sys.argv[1]), Path(sys.argv[2]))
