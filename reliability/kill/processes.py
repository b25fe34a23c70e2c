"""A command in a session of its own, so that all of its processes can be found and killed, and a list of them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from reliability.kill.subjects import Subject

ROOT = Path(__file__).parents[2]
PATIENCE = 300.0
"""Seconds after which a command counts as hanging."""
MOST = 12
"""Starts after which a command that is not done never will be."""


TICKS = os.sysconf("SC_CLK_TCK")


class Wrong(AssertionError):
    """A command did something that it must not do, whatever was done to it."""


class Command:
    """A running command. Its output goes to a file in the folder `logs` of its subject: its own disk may be full."""

    def __init__(self, subject: Subject, out: Path, environment: dict[str, str] | None = None) -> None:
        self.subject, self.out = subject, out
        out.parent.mkdir(parents=True, exist_ok=True)
        settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(environment or {})}
        with tempfile.NamedTemporaryFile("w", dir=subject.logs, prefix=f"{out.name} ", delete=False) as file:
            self.output = Path(file.name)
            self.process = subprocess.Popen(
                subject.line(out), stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=ROOT,
                env={**os.environ, **settings}, start_new_session=True,
            )  # fmt: skip
        self.started = time.monotonic()

    def said(self) -> str:
        """Returns what this command has printed."""
        return self.output.read_text(errors="replace")

    def running(self) -> bool:
        """Whether the command has not ended."""
        return self.process.poll() is None

    def work(self) -> float:
        """Returns the CPU seconds of its processes so far."""
        return sum(seconds for _, seconds in _session(self.process.pid).values())

    def wait(self) -> int:
        """Returns the exit code; raises Wrong if the command hangs."""
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise Wrong(f"it hangs: {self.said()[-300:]}") from None

    def kill_all(self) -> None:
        """Kills all processes of the command, and waits until they are gone."""
        for pid in _session(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def victims(self, who: str, chance: random.Random) -> tuple[str, list[int]]:
        """Returns what to kill and its processes. Before there is a worker, its fork server takes its place."""
        parents = {pid: parent for pid, (parent, _) in _session(self.process.pid).items()}
        if who == "both":
            return who, list(parents)
        servers = [pid for pid, parent in parents.items() if parent == self.process.pid]
        workers = [pid for pid, parent in parents.items() if parent in servers]
        if who == "worker" and workers:
            return who, [chance.choice(workers)]
        if who == "worker" and servers:
            return "fork server", [servers[-1]]
        return self.subject.victims[0], [self.process.pid]

    def check_alone(self) -> None:
        """Raises Wrong if processes of an ended command go on."""
        end = time.monotonic() + 30
        while left := _session(self.process.pid):
            if time.monotonic() > end:
                raise Wrong(f"{len(left)} of its processes go on after its end")
            time.sleep(0.05)


def _session(leader: int) -> dict[int, tuple[int, float]]:
    """Returns the processes of a session, each with its parent and the CPU seconds of it and its ended children."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                state, parent, _, session, *rest = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(session) == leader and state != "Z":
                    found[int(entry.name)] = (int(parent), sum(map(int, rest[7:11])) / TICKS)
    return found


def finish(subject: Subject, out: Path) -> int:
    """Gives the command again until it is done, at least once; returns how many times.

    A command that is killed right after it marked its folder as done leaves checkpoints, which the next one deletes.
    """
    said = ""
    for starts in range(1, MOST + 1):
        command = Command(subject, out)
        code = command.wait()
        command.check_alone()
        said = command.said()
        if "Traceback" in said:
            raise Wrong(f"a traceback: {said[-300:]}")
        if subject.done(out, code):
            return starts
    raise Wrong(f"not done after {MOST} starts: {said[-300:]}")
