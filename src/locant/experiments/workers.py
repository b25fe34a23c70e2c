"""Who does the runs: processes of this machine, or a Ray cluster.

Each run is in a process of its own, so that one that dies takes no other with it and its peak memory is its own.
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
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from locant.experiments.comparison import TIMED_STEPS
from locant.experiments.run import Diverged, Run, Work, execute, seconds_of_a_step
from locant.runs import files, run_folder

ENDED = ("done", "failed")
SPACE = 2**20
"""Bytes; a disk with less is full."""
FINISHED_IS_KEPT = "Finished runs are kept; give the same command again when this is mended"


def do(run: Run, here: Path, data: Path) -> None:
    """One run from start or checkpoint to its end, in this process; what goes wrong is written down beside it.

    Where a run has several processes (torchrun), each calls this, and the first one writes.
    """
    several, first = int(os.environ.get("WORLD_SIZE", 1)) > 1, int(os.environ.get("RANK", 0)) == 0
    if not first:
        if run_folder.state(here) not in ENDED:
            with contextlib.suppress(Diverged):  # all of them see it, and the first one says it
                execute(run, here, data)
        return
    try:
        with run_folder.held(here):
            if run_folder.state(here) in ENDED:
                return
            try:
                execute(run, here, data)
            except Exception as problem:
                _write_down(problem, here)
                if several and not isinstance(problem, Diverged):
                    raise  # torchrun ends the others, which wait for this one
    except run_folder.Busy:
        if several:
            raise
        # else another comparer has it


def _write_down(problem: Exception, here: Path) -> None:
    reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
    if shutil.disk_usage(here).free < SPACE:  # libraries have strange words for it
        reason = f"the disk is full ({reason})"
    with contextlib.suppress(OSError):  # the log is on the same disk, which may be full
        traceback.print_exception(problem)
    try:
        files.write_json(here / run_folder.FAILED, {"reason": reason, "final": isinstance(problem, Diverged)})
    except OSError as another:
        raise OSError(f"{here.name} failed ({reason}), which cannot be written down ({another})") from problem


def do_apart(run: Run, here: Path, data: Path) -> None:
    """`do` in a process that is there for nothing else: what libraries print goes to log.txt."""
    here.mkdir(parents=True, exist_ok=True)
    with (here / "log.txt").open("a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        do(run, here, data)


def _in_process(run: Run, here: Path, data: Path, device: int, tell: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if device >= 0:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(device)
    try:
        do_apart(run, here, data)
    except OSError as problem:
        tell.send(str(problem))
        sys.exit(1)


def _end_with_parent() -> None:
    """A comparer that is killed cannot end its runs; they end themselves, so that the next one can go on with them."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _timed(queue: Any, work: Work, scheme: str, data: Path) -> None:
    try:
        queue.put(seconds_of_a_step(work, scheme, data, TIMED_STEPS))
    except Exception as problem:
        queue.put(f"{scheme} cannot be trained here: {problem}")


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Local:
    """Processes of this machine, as many at a time as it has cores for (or one per GPU)."""

    def __init__(self, threads: int) -> None:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError(
                f"this is one of {os.environ['WORLD_SIZE']} processes (torchrun or accelerate launch): they do one run "
                f"together, which is `locant train`; a comparison starts its processes itself"
            )
        self.devices = torch.cuda.device_count()
        self.slots = self.devices or max(1, cores() // threads)
        # A fork server has imported everything once, so that a run starts at once; where there is none, spawn.
        self.context: Any = multiprocessing.get_context("forkserver" if sys.platform != "win32" else "spawn")
        if sys.platform != "win32":
            self.context.set_forkserver_preload(["locant.experiments.preload"])
            forkserver.ensure_running()  # it imports while the data is prepared

    def seconds_of_a_step(self, work: Work, scheme: str, data: Path) -> float:
        """Measured as runs will be: with all slots busy."""
        queue = self.context.SimpleQueue()
        group = [
            self.context.Process(target=_timed, args=(queue, work, scheme, data), daemon=True)
            for _ in range(self.slots)
        ]
        for process in group:
            process.start()
        for process in group:
            process.join()
        if any(process.exitcode for process in group):
            raise RuntimeError(f"{scheme} cannot be trained here: its process died")
        found: list[float | str] = [queue.get() for _ in group]
        for each in found:
            if isinstance(each, str):
                raise ValueError(each)
        return max(map(float, found))

    def work(self, runs: list[tuple[Run, Path]], data: Path) -> Iterator[None]:
        """Does the runs; yields now and then, so that a bar can move."""
        waiting = list(reversed(runs))
        busy: dict[int, tuple[Any, Path, Any]] = {}
        try:
            while waiting or busy:
                for slot in range(self.slots):
                    if slot in busy or not waiting:
                        continue
                    run, here = waiting.pop()
                    told, tell = self.context.Pipe(duplex=False)
                    arguments = (run, here, data, slot if self.devices else -1, tell)
                    process = self.context.Process(target=_in_process, args=arguments, name=run.name)
                    process.start()
                    tell.close()
                    busy[slot] = (process, here, told)
                for slot, (process, here, told) in list(busy.items()):
                    process.join(timeout=0.1)
                    if not process.is_alive():
                        del busy[slot]
                        _note_death(process, here, told)
                yield
        finally:
            for process, _, _ in busy.values():
                process.terminate()
                process.join()


def _note_death(process: Any, here: Path, told: Any) -> None:
    """Of a process that could not write down itself why it ended."""
    if not process.exitcode or run_folder.state(here) in ENDED:
        return
    words = ""
    with contextlib.suppress(EOFError):  # it said nothing
        words = told.recv()
    if words:
        raise OSError(f"{words}. {FINISHED_IS_KEPT}")
    why = f"its process was killed by signal {-process.exitcode}" if process.exitcode < 0 else (
        f"its process ended with exit code {process.exitcode}"
    )  # fmt: skip
    hint = " (out of memory?)" if process.exitcode == -9 else "; see log.txt"
    files.write_json(here / run_folder.FAILED, {"reason": why + hint, "final": False})


def wait_for_others(runs: list[tuple[Run, Path]]) -> Iterator[None]:
    """Until runs that another comparer took are ended, or left alone."""
    while any(run_folder.state(here) not in ENDED and _taken(here) for _, here in runs):
        time.sleep(0.5)
        yield


def _taken(here: Path) -> bool:
    try:
        with run_folder.held(here):
            return False
    except run_folder.Busy:
        return True
