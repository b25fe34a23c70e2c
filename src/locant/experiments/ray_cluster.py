"""Executes runs on a Ray cluster, as `workers.LocalWorkers` does on one machine.

Each run is a Ray task in its own process. It requests one CPU per thread and, if the cluster has GPUs, one GPU. Ray
replaces a process or a machine that dies, and the run resumes from its last checkpoint. All machines must have the
output folder under the same path, and the same Python with locant.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from locant.experiments.comparison import check_here
from locant.experiments.timing import seconds_of_a_step
from locant.experiments.work import Run, Work
from locant.experiments.workers import ENDED, FINISHED_IS_KEPT, do_run_apart
from locant.runs import files, run_folder

RETRIES = 5
"""How many processes of one run may die before it counts as failed."""
PATIENCE = 10.0
"""Seconds to wait for an answer of the cluster. Ray itself would wait for minutes."""


class RayCluster:
    """A Ray cluster: `host:6379` or `auto` for one that this machine is part of, `local` to start one here."""

    def __init__(self, address: str, threads: int) -> None:
        # The future default of Ray, which leaves GPUs visible to tasks that request none. Setting it avoids a warning.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
        except ImportError:
            raise ModuleNotFoundError("a Ray cluster needs Ray: pip install 'locant[ray]'") from None
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
        # One call per process: threads, peak memory and output belong to the run alone.
        return self.ray.remote(max_calls=1)(function).options(name=name, max_retries=RETRIES, **self.needs)

    def check(self, work: Work, schemes: Sequence[str], data: Path) -> None:
        """Raises ValueError where a scheme cannot be trained. It builds the models in this process."""
        check_here(work, schemes, data)

    def seconds_of_a_step(self, work: Work, scheme: str, data: Path) -> float:
        """Returns the time of a training step on the slowest machine, with all slots busy, as in the runs."""
        task = self._task(_timed, f"timing {scheme}")
        found = self.ray.get([task.remote(work, scheme, data.resolve()) for _ in range(self.slots)])
        for each in found:
            if isinstance(each, str):
                raise ValueError(each)
        return max(map(float, found))

    def work(self, runs: list[tuple[Run, Path]], data: Path) -> Iterator[None]:
        """Executes the runs. Yields several times a second, so that the caller can update a progress bar."""
        busy = {self._task(_do_run, run.name).remote(run, here.resolve(), data.resolve()): here for run, here in runs}
        try:
            while busy:
                for ended in self.ray.wait(list(busy), timeout=0.2)[0]:
                    self._note_end(ended, busy.pop(ended))
                yield
        finally:
            for task in busy:
                self.ray.cancel(task, force=True)

    def _note_end(self, ended: Any, here: Path) -> None:
        """Stores the reason of a run whose processes ended before they could; raises for a problem of the machine."""
        try:
            problem = self.ray.get(ended)
        except self.ray.exceptions.RayError as error:
            if run_folder.state(here) in ENDED:
                return
            reason = str(error).strip().splitlines()[-1]
            files.write_json(here / run_folder.FAILED, {"reason": reason, "final": False})
        else:
            if problem:
                raise OSError(f"{problem}. {FINISHED_IS_KEPT}")


def _do_run(run: Run, here: Path, data: Path) -> str:
    """Executes a run on a machine of the cluster. Returns a problem of the machine, not of the run; empty if none."""
    if not data.is_dir():
        return f"{socket.gethostname()} cannot find {data}: all machines of the cluster must share the output folder"
    _preload()
    try:
        do_run_apart(run, here, data)
    except OSError as problem:
        return f"{socket.gethostname()}: {problem}"
    return ""


def _timed(work: Work, scheme: str, data: Path) -> float | str:
    try:
        _preload()
        return seconds_of_a_step(work, scheme, data)
    except Exception as problem:
        return f"{scheme} cannot be trained on {socket.gethostname()}: {problem}"


def _preload() -> None:
    """Imports everything a run needs, as the fork server does: without garbage collection it takes less time."""
    import locant.experiments.preload  # noqa: F401


def _connect(ray: Any, address: str) -> None:
    own: dict[str, Any] = {}
    if address == "local":
        own = {"include_dashboard": False}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    elif address != "auto":
        _check_address(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
    except (OSError, RuntimeError, ValueError) as problem:
        reason = str(problem.__cause__ or problem).strip().splitlines()[-1]  # such as a missing token
        raise ConnectionError(f"no Ray cluster at {address}: {reason}") from None


def _check_address(address: str) -> None:
    """Raises ConnectionError unless a server at the address speaks HTTP/2, as Ray does: both sides send settings."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ValueError(f"the address of a Ray cluster must be host:6379, auto or local; got {address!r}")
    if os.environ.get("RAY_USE_TLS") == "1":
        return  # it would not answer without encryption
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    try:
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(hello)
            answer = connection.recv(9)
    except OSError as problem:
        raise ConnectionError(f"no Ray cluster at {address}: {problem or type(problem).__name__}") from None
    if answer[3:4] != b"\x04":
        raise ConnectionError(f"no Ray cluster at {address}: another kind of server answers there")
