"""Executes runs in processes of this machine; `ray_cluster.py` does the same on a Ray cluster.

Each run has its own process. A run that dies affects no other, and its peak memory is its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from locant.experiments import fork_server
from locant.experiments.comparison import check_here
from locant.experiments.run import execute
from locant.experiments.timing import seconds_of_a_step
from locant.experiments.work import Diverged, Run, Work
from locant.runs import files, run_folder
from locant.runs.untrusted import first_line

ENDED = ("done", "failed")
SPACE = 2**20
"""A disk with fewer free bytes counts as full."""
FINISHED_IS_KEPT = "Finished runs are kept; give the same command again once this is fixed"


def do_run(run: Run, here: Path, data: Path) -> None:
    """Executes a run in this process, from the start or from its checkpoint. If it fails, writes the reason to FAILED.

    With several processes per run (torchrun), each process calls this, and the first one writes.
    """
    several, first = int(os.environ.get("WORLD_SIZE", 1)) > 1, int(os.environ.get("RANK", 0)) == 0
    if not first:
        if run_folder.state(here) not in ENDED:
            with contextlib.suppress(Diverged):  # every process raises it, and the first one writes it
                execute(run, here, data)
        return
    try:
        with run_folder.held(here):
            if run_folder.state(here) in ENDED:
                return
            try:
                execute(run, here, data)
            except Exception as problem:
                _write_failure(problem, here)
                if several and not isinstance(problem, Diverged):
                    raise  # so that torchrun ends the other processes, which wait for this one
    except run_folder.Busy:
        if several:
            raise
        # else another command executes it


def _write_failure(problem: Exception, here: Path) -> None:
    reason = first_line(problem)
    if shutil.disk_usage(here).free < SPACE:  # libraries describe a full disk in misleading words
        reason = f"the disk is full ({reason})"
    with contextlib.suppress(OSError):  # log.txt may be on the same full disk
        traceback.print_exception(problem)
    try:
        files.write_json(here / run_folder.FAILED, {"reason": reason, "final": isinstance(problem, Diverged)})
    except OSError as another:
        raise OSError(f"{here.name} failed ({reason}), and the reason cannot be stored ({another})") from problem


def do_run_apart(run: Run, here: Path, data: Path) -> None:
    """Executes a run in a process that has no other purpose: the output of libraries goes to log.txt."""
    here.mkdir(parents=True, exist_ok=True)
    with (here / "log.txt").open("a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        do_run(run, here, data)


def _run_process(run: Run, here: Path, data: Path, device: int, sender: Any) -> None:
    """The main function of a run's process. An OSError outside of the run is sent to the parent through `sender`."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if device >= 0:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(device)
    try:
        do_run_apart(run, here, data)
    except OSError as problem:
        sender.send(str(problem))
        sys.exit(1)


def _end_with_parent() -> None:
    """Ends this process when its parent ends. A killed command cannot end its runs, and the next one resumes them."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _answer(queue: Any, function: Callable[..., Any], *arguments: Any) -> None:
    """Puts the result of a function into a queue, and the text of its exception."""
    try:
        queue.put((function(*arguments), ""))
    except Exception as problem:
        queue.put((None, str(problem) or type(problem).__name__))


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LocalWorkers:
    """Runs processes on this machine, at most one per available core (or GPU)."""

    def __init__(self, threads: int) -> None:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError(
                f"this is one of {os.environ['WORLD_SIZE']} processes (torchrun or accelerate launch), which execute "
                f"one run together: use `locant train`; a comparison starts its processes itself"
            )
        self.context = fork_server.start()
        self.devices = torch.cuda.device_count()
        self.slots = self.devices or max(1, cores() // threads)

    def check(self, work: Work, schemes: Sequence[str], data: Path) -> None:
        """Raises a ValueError if a scheme cannot be trained.

        A forked process builds the models, because it already has transformers imported.
        """
        [(_, problem)] = self._call(check_here, (work, tuple(schemes), data), 1, ", ".join(schemes))
        if problem:
            raise ValueError(problem)

    def seconds_of_a_step(self, work: Work, scheme: str, data: Path) -> float:
        """Returns the time of a training step with all slots busy, as in the runs."""
        found = self._call(seconds_of_a_step, (work, scheme, data), self.slots, scheme)
        for _, problem in found:
            if problem:
                raise ValueError(f"{scheme} cannot be trained here: {problem}")
        return max(float(seconds) for seconds, _ in found)

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...], count: int, what: str) -> list[Any]:
        """Calls a function in `count` processes at once; returns its result and the text of its exception for each."""
        queue = self.context.SimpleQueue()
        group = [
            self.context.Process(target=_answer, args=(queue, function, *arguments), daemon=True) for _ in range(count)
        ]
        with fork_server.without_main():
            for process in group:
                process.start()
        for process in group:
            process.join()
        if any(process.exitcode for process in group):
            raise RuntimeError(f"{what} cannot be trained here: its process died")
        return [queue.get() for _ in group]

    def work(self, runs: list[tuple[Run, Path]], data: Path) -> Iterator[None]:
        """Executes the runs. Yields several times a second, so that the caller can update a progress bar."""
        waiting = list(reversed(runs))
        busy: dict[int, tuple[Any, Path, Any]] = {}
        try:
            while waiting or busy:
                for slot in range(self.slots):
                    if slot in busy or not waiting:
                        continue
                    run, here = waiting.pop()
                    receiver, sender = self.context.Pipe(duplex=False)
                    arguments = (run, here, data, slot if self.devices else -1, sender)
                    process = self.context.Process(target=_run_process, args=arguments, name=run.name)
                    with fork_server.without_main():
                        process.start()
                    sender.close()
                    busy[slot] = (process, here, receiver)
                for slot, (process, here, receiver) in list(busy.items()):
                    process.join(timeout=0.1)
                    if not process.is_alive():
                        del busy[slot]
                        _note_death(process, here, receiver)
                yield
        finally:
            for process, _, _ in busy.values():
                process.terminate()
                process.join()


def _note_death(process: Any, here: Path, receiver: Any) -> None:
    """Stores the reason of a process that ended before it could store it itself."""
    if not process.exitcode or run_folder.state(here) in ENDED:
        return
    problem = ""
    with contextlib.suppress(EOFError):  # it sent nothing
        problem = receiver.recv()
    if problem:
        raise OSError(f"{problem}. {FINISHED_IS_KEPT}")
    why = f"its process was killed by signal {-process.exitcode}" if process.exitcode < 0 else (
        f"its process ended with exit code {process.exitcode}"
    )  # fmt: skip
    hint = " (out of memory?)" if process.exitcode == -9 else "; see log.txt"
    files.write_json(here / run_folder.FAILED, {"reason": why + hint, "final": False})


def wait_for_others(runs: list[tuple[Run, Path]]) -> Iterator[None]:
    """Waits for runs that another command executes; yields twice a second.

    It ends when each run has ended or no other command holds its lock.
    """
    while any(run_folder.state(here) not in ENDED and _taken(here) for _, here in runs):
        time.sleep(0.5)
        yield


def _taken(here: Path) -> bool:
    try:
        with run_folder.held(here):
            return False
    except run_folder.Busy:
        return True
