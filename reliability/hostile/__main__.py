"""Runs the hostile inputs, each in a process of its own, and prints how each was refused."""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from reliability.hostile import configs, plans, runs, strings, texts, weights
from reliability.hostile.case import Case, template

CASES: list[Case] = [*plans.CASES, *configs.CASES, *weights.CASES, *strings.CASES, *texts.CASES, *runs.CASES]
SECONDS, BYTES = 2.0, 2**30
"""Limits of a case: time of the processor, so that a busy machine changes nothing, and growth of the memory in use."""
ADDRESSES = 4 * 2**30
"""Growth of the address space at which the system stops a case; it protects this machine."""
PATIENCE = 30.0
"""Seconds after which a case that waits for something is killed."""
REFUSALS = (ValueError, TypeError, OSError, NotImplementedError)


@dataclass(frozen=True)
class Outcome:
    """How one case ended."""

    name: str
    problem: str  # empty if it was refused as it should be
    message: str
    seconds: float
    megabytes: float


def run(cases: list[Case]) -> Iterator[Outcome]:
    """Runs the cases in a fork of this process. A case that kills or blocks it is noted, and a new fork goes on."""
    while cases:
        done = 0
        for outcome in _run_some(cases):
            done += 1
            yield outcome
        cases = cases[done:]


def _run_some(cases: list[Case]) -> Iterator[Outcome]:
    """Runs cases in one fork, up to the first that kills or blocks it."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _attack(cases, folder, writer)
    os.close(writer)
    try:
        for case in cases:
            line = _line(reader)
            if not line:
                os.kill(child, signal.SIGKILL)
                yield Outcome(case.name, f"the process died or was blocked for {PATIENCE:.0f} s", "", PATIENCE, 0)
                return
            kind, message, seconds, grown, extra = json.loads(line)
            problem = extra or _problem(case, kind, message, seconds, grown)
            yield Outcome(case.name, problem, message, seconds, grown / 2**20)
    finally:
        os.close(reader)
        os.waitpid(child, 0)
        shutil.rmtree(folder, ignore_errors=True)


def _line(reader: int) -> bytes:
    """The next line that the child writes; nothing if it ends or waits for too long."""
    line, end = b"", time.monotonic() + PATIENCE
    while not line.endswith(b"\n") and select.select([reader], [], [], max(0, end - time.monotonic()))[0]:
        character = os.read(reader, 1)
        if not character:
            return b""
        line += character
    return line if line.endswith(b"\n") else b""


def _attack(cases: list[Case], folder: Path, writer: int) -> None:
    """In the child: attacks, and writes of each case the class and text of its error, its time and its memory."""
    address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (address_space + ADDRESSES, resource.RLIM_INFINITY))
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    for number, case in enumerate(cases):
        here = folder / str(number)
        (here / "input").mkdir(parents=True)
        os.chdir(here)
        before, memory = time.process_time(), _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        kind, message = "", "nothing was refused"
        try:
            case.attack(here / "input")
        except REFUSALS as problem:
            kind, message = "refusal", str(problem)
        except BaseException as problem:
            kind, message = type(problem).__name__, str(problem)
        extra = "foreign code was run" if list(here.rglob("was-run")) else ""
        result = kind, message[:2000], time.process_time() - before, _memory("VmHWM") - memory, extra
        os.write(writer, json.dumps(result).encode() + b"\n")
        shutil.rmtree(here, ignore_errors=True)
    os._exit(0)


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def _problem(case: Case, kind: str, message: str, seconds: float, grown: int) -> str:
    if kind != "refusal":
        return f"expected a refusal, got {kind or message}"
    if case.says not in message:
        return f"the refusal does not say {case.says!r}"
    if "MemoryError" in message or "allocate memory" in message:
        return "it ran out of memory"
    slow = [f"it took {seconds:.1f} s"] if seconds > SECONDS else []
    large = [f"it took {grown / 2**20:.0f} MiB"] if grown > BYTES else []
    return ", ".join(slow + large)


def main() -> None:
    """Runs the cases that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m reliability.hostile", description=__doc__)
    parser.add_argument("--only", default="", help="run the cases with this in their name")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each case")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a fork has no threads
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        tempfile.tempdir = folder  # everything that a case makes goes with it
        for spec in ("", plans.TISA, "alibi"):
            template("bert", spec)  # here, and not in the fork, where the first case would pay for it
        outcomes = []
        for outcome in run([case for case in CASES if options.only in case.name]):
            outcomes.append(outcome)
            if options.json:
                print(json.dumps(asdict(outcome)), flush=True)
            elif outcome.problem or options.only:
                state = f"FAILED ({outcome.problem})" if outcome.problem else "refused"
                print(f"{outcome.name}: {state}\n    {outcome.message[:300]}", flush=True)
        tempfile.tempdir = None
    failed = sum(bool(outcome.problem) for outcome in outcomes)
    if not options.json:
        print(f"{len(outcomes) - failed} of {len(outcomes)} refused in words", end="; ")
        print(f"slowest {max(x.seconds for x in outcomes):.2f} s, largest {max(x.megabytes for x in outcomes):.0f} MiB")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
