"""Forked processes: work that runs apart, with a limit of time and memory."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MEMORY = 6 * 2**30
"""How much a process may allocate beyond what it starts with: a mutant may ask for all memory."""
STARTING = 300.0
"""Seconds that a process may take before it says which test it runs, and after the last one."""
PATIENCE = 3.0
"""Limits are CPU time: a busy machine makes no timeouts. A step that waits may take this many times its limit."""

TIMEOUT, CRASH = "timeout", "crash"


def run_apart(work: Callable[[Callable[[float], None]], Any]) -> Any:
    """Runs `work` in a forked process and returns its result; TIMEOUT or CRASH if it has none.

    `work` receives a function to call before each step, with the CPU seconds that this step may take.
    """
    process, connection = start_apart(lambda connection: connection.send(("result", work(_announce(connection)))))
    limit = STARTING
    try:
        while _answers(connection, process, limit):
            kind, value = connection.recv()
            if kind == "result":
                return value
            if kind == "error":
                raise RuntimeError(f"a forked process failed:\n{value}")
            limit = value
        return TIMEOUT
    except EOFError:
        return CRASH
    finally:
        connection.close()
        end(process)


def _answers(connection: Connection, process: int, limit: float) -> bool:
    """Waits for a message; whether one comes before the process has used `limit` CPU seconds, or waited for long."""
    start, used = time.monotonic(), _cpu_seconds(process)
    left = limit
    while not connection.poll(left):
        left = limit - (_cpu_seconds(process) - used)
        left = min(left, start + PATIENCE * limit - time.monotonic())
        if left <= 0:
            return False
        left = max(left, 0.1)
    return True


def _cpu_seconds(group: int) -> float:
    """The CPU time of the processes of a group, and of those that they have waited for; 0 without /proc."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(")")[2].split()  # from the state on: the name may contain anything
            if int(fields[2]) == group:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _announce(connection: Connection) -> Callable[[float], None]:
    return lambda seconds: connection.send(("step", seconds))


def start_apart(work: Callable[[Connection], None]) -> tuple[int, Connection]:
    """Starts `work` in a forked process, in a process group of its own; returns its id and a connection to it."""
    ours, theirs = Pipe()
    process = os.fork()
    if process:
        theirs.close()
        return process, ours
    try:
        os.setsid()
        ours.close()
        _be_quiet_and_small()
        work(theirs)
    except BaseException:  # of the machinery: what a test raises stays in pytest
        theirs.send(("error", traceback.format_exc()))
    finally:
        theirs.close()
        os._exit(0)  # without the exit handlers of the parent


def end(process: int) -> None:
    """Ends a process started here, and everything it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)


def _be_quiet_and_small() -> None:
    log = os.open(os.environ.get("MUTANTS_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, most))
