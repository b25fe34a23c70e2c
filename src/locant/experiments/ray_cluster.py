"""The runs of a comparison on a Ray cluster, which does what `workers.Local` does on one machine.

Each run is a Ray task in a process of its own, with as many CPUs as a run has threads, and a GPU where there are any. A
process or a machine that dies is replaced by Ray, and the run goes on from its last checkpoint. All machines must see
the output folder under the same path, and have the same Python with locant in it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from locant.experiments.comparison import TIMED_STEPS
from locant.experiments.run import Run, Work, seconds_of_a_step
from locant.experiments.workers import ENDED, FINISHED_IS_KEPT, do_apart
from locant.runs import files, run_folder

RETRIES = 5
"""How often the processes of one run may die, before it is reported as failed."""
PATIENCE = 10.0
"""Seconds that a cluster has to answer. Ray itself would try for minutes."""


class Ray:
    """A Ray cluster: `host:6379` or `auto`, which this machine is in, or `local`, which is started here."""

    def __init__(self, address: str, threads: int) -> None:
        # Ray leaves GPUs alone where none is asked for, and does not warn that it will some day.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
        except ImportError:
            raise ModuleNotFoundError("--ray needs Ray: pip install 'locant[ray]'") from None
        self.ray: Any = ray
        if not ray.is_initialized():
            _connect(ray, address)
        free = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = int(sum(node.get("GPU", 0) for node in free))
        self.slots = gpus or sum(int(node.get("CPU", 0)) // threads for node in free)
        if not self.slots:
            raise ValueError(
                f"no machine of the Ray cluster at {address} has the {threads} CPUs of a run (preset: threads)"
            )
        self.needs = {"num_cpus": threads, "num_gpus": 1 if gpus else 0}

    def _task(self, function: Any, name: str) -> Any:
        # One call per process: threads, peak memory and what is printed are the run's own.
        return self.ray.remote(max_calls=1)(function).options(name=name, max_retries=RETRIES, **self.needs)

    def seconds_of_a_step(self, work: Work, scheme: str, data: Path) -> float:
        """Measured as runs will be, with all slots busy; the slowest machine counts."""
        task = self._task(_timed, f"timing {scheme}")
        found = self.ray.get([task.remote(work, scheme, data.resolve()) for _ in range(self.slots)])
        for each in found:
            if isinstance(each, str):
                raise ValueError(each)
        return max(map(float, found))

    def work(self, runs: list[tuple[Run, Path]], data: Path) -> Iterator[None]:
        """Does the runs; yields now and then, so that a bar can move."""
        busy = {self._task(_done, run.name).remote(run, here.resolve(), data.resolve()): here for run, here in runs}
        try:
            while busy:
                for ended in self.ray.wait(list(busy), timeout=0.2)[0]:
                    self._note_end(ended, busy.pop(ended))
                yield
        finally:
            for task in busy:
                self.ray.cancel(task, force=True)

    def _note_end(self, ended: Any, here: Path) -> None:
        try:
            words = self.ray.get(ended)
        except self.ray.exceptions.RayError as problem:  # the run could not say it itself
            if run_folder.state(here) in ENDED:
                return
            reason = str(problem).strip().splitlines()[-1]
            files.write_json(here / run_folder.FAILED, {"reason": reason, "final": False})
        else:
            if words:
                raise OSError(f"{words}. {FINISHED_IS_KEPT}")


def _done(run: Run, here: Path, data: Path) -> str:
    """A run, on a machine of the cluster; what is wrong with the machine, not with the run, comes back as words."""
    if not data.is_dir():
        return f"{socket.gethostname()} does not see {data}: all machines of the cluster must share the output folder"
    try:
        do_apart(run, here, data)
    except OSError as problem:
        return f"{socket.gethostname()}: {problem}"
    return ""


def _timed(work: Work, scheme: str, data: Path) -> float | str:
    try:
        return seconds_of_a_step(work, scheme, data, TIMED_STEPS)
    except Exception as problem:
        return f"{scheme} cannot be trained on {socket.gethostname()}: {problem}"


def _connect(ray: Any, address: str) -> None:
    own: dict[str, Any] = {}
    if address == "local":
        own = {"include_dashboard": False}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    elif address != "auto":
        _answers(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
    except (OSError, RuntimeError, ValueError) as problem:
        reason = str(problem.__cause__ or problem).strip().splitlines()[-1]  # such as a token that the cluster wants
        raise ConnectionError(f"no Ray cluster at --ray {address}: {reason}") from None


def _answers(address: str) -> None:
    """Whether something at an address speaks as Ray does, which is HTTP/2: both sides begin with their settings."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ValueError(f"--ray must be host:6379, auto or local; got {address!r}")
    if os.environ.get("RAY_USE_TLS") == "1":
        return  # it will not speak to us
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    try:
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(hello)
            answer = connection.recv(9)
    except OSError as problem:
        raise ConnectionError(f"no Ray cluster at --ray {address}: {problem or type(problem).__name__}") from None
    if answer[3:4] != b"\x04":
        raise ConnectionError(f"no Ray cluster at --ray {address}: something else answers there")
