"""Six Python threads that call `locant.attend` at once: each must get the bits that one thread gets alone.

ctypes releases Python's lock while the kernel runs, so calls overlap. Run as a program it prints the differences; under
ThreadSanitizer (`under_sanitizer`) the kernel is instrumented, and Python and torch are not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier

import torch
from torch import Tensor

import locant
from locant.attention import build
from reliability.sanitize.broken import MISTAKES, break_kernel
from reliability.sanitize.checks import CALLERS, OPENMP, THREAD, why_no_check, wrapper
from reliability.sanitize.running import MINUTES, Outcome

ROOT = Path(__file__).parents[2]
SUPPRESSIONS = Path(__file__).with_name("threads.supp")
SPECS = (
    "tisa",
    "huang1:clip=9",
    "huang3:clip=9",
    "huang4:clip=40,heads=own",
    "shaw:clip=9",
    "rope+huang4:clip=9",
    "xl",
)
"""Every kind of table, shared and per head."""
ROUNDS = 2
"""Calls of each thread per job under ThreadSanitizer."""
ATTEMPTS = 3
"""Runs with a mistake, until it is reported: whether calls overlap at the memory that they share is chance."""
MORE_ROUNDS = 20
"""Calls of each thread per job without it."""


@dataclass(frozen=True)
class Job:
    """A call of `attend` on tensors that all threads share."""

    spec: str
    gradients: bool  # without them, the threads share the cached tables of the scheme
    packed: bool

    def make(self) -> Callable[[], list[Tensor]]:
        """A function that computes the output and, if wanted, every gradient."""
        torch.manual_seed(1)
        scheme = locant.scheme(self.spec, n_heads=4, head_dim=16, d_model=64)
        q, k, v = (torch.randn(2, heads, 150, 16, requires_grad=True) for heads in (4, 2, 2))
        pos = torch.cat([torch.arange(90), torch.arange(60)]) if self.packed else torch.arange(150)

        def compute() -> list[Tensor]:
            with torch.set_grad_enabled(self.gradients):
                out = locant.attend(q, k, v, scheme, q_pos=pos, k_pos=pos, causal=True, impl="fused")
            if not self.gradients:
                return [out]
            return [out.detach(), *torch.autograd.grad(out.square().sum(), [q, k, v, *scheme.parameters()])]

        return compute


JOBS = [Job(spec, gradients, packed) for spec in SPECS for gradients in (True, False) for packed in (True, False)]


def differences(jobs: list[Job], rounds: int) -> list[str]:
    """What differed from the results of one thread, call by call; empty if nothing did."""
    found = []
    for job in jobs:
        compute = job.make()
        alone = compute()
        barrier = Barrier(CALLERS)

        def repeat(
            compute: Callable[[], list[Tensor]] = compute, alone: list[Tensor] = alone, barrier: Barrier = barrier
        ) -> int:
            barrier.wait()
            return sum(not all(torch.equal(x, y) for x, y in zip(compute(), alone, strict=True)) for _ in range(rounds))

        with ThreadPoolExecutor(CALLERS) as pool:
            wrong = sum(future.result() for future in [pool.submit(repeat) for _ in range(CALLERS)])
        if wrong:
            found.append(f"{job}: {wrong} of {CALLERS * rounds} calls gave other bits than one thread alone")
    return found


def without_sanitizer() -> Outcome:
    """The kernel as users get it."""
    name = f"{CALLERS} Python threads"
    if build.build().library is None:
        return Outcome(name, not_run=f"there is no kernel: {build.build().why}")
    start = time.perf_counter()
    found = differences(JOBS, MORE_ROUNDS)
    return Outcome(name, len(JOBS) * CALLERS * MORE_ROUNDS, time.perf_counter() - start, tuple(found))


def under_sanitizer(kernel: Path = build.SOURCE) -> Outcome:
    """The same with a kernel that was built with ThreadSanitizer, in a process that has loaded its library."""
    name = f"{CALLERS} Python threads, thread"
    reason = why_no_check(THREAD)
    if reason is not None:
        return Outcome(name, not_run=reason)
    library = subprocess.run([THREAD.compiler, "-print-file-name=libtsan.so"], capture_output=True, text=True).stdout
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "CC": f"{THREAD.compiler} -g -fsanitize=thread {OPENMP} -Wl,-Bsymbolic",
            "LOCANT_CACHE": cache,
            "LD_PRELOAD": library.strip(),
            "TSAN_OPTIONS": f"exitcode=66 halt_on_error=1 suppressions={SUPPRESSIONS}",
            "OMP_NUM_THREADS": "3",
        }
        done = subprocess.run(
            [*wrapper(THREAD), sys.executable, "-m", __name__, str(kernel)], cwd=ROOT, env=environment,
            capture_output=True, text=True, timeout=60 * MINUTES,
        )  # fmt: skip
    output = done.stdout + done.stderr
    races = [line for line in output.splitlines() if line.startswith("SUMMARY: ThreadSanitizer")]
    if done.returncode and not races:
        races = output.splitlines()[-1:] or [f"exit code {done.returncode}"]
    return Outcome(name, len(JOBS) * CALLERS * ROUNDS, time.perf_counter() - start, tuple(dict.fromkeys(races)))


def self_check() -> Outcome:
    """Whether a kernel whose callers share memory is reported."""
    mistake = next(x for x in MISTAKES if x.name == "memory shared by all callers")
    name = f"self-check: {mistake.name} ({CALLERS} Python threads)"
    with tempfile.TemporaryDirectory() as folder:
        kernel = break_kernel(mistake, Path(folder))
        for _ in range(ATTEMPTS):
            outcome = under_sanitizer(kernel)
            if outcome.not_run:
                return replace(outcome, name=name)
            if any(mistake.reported in finding for finding in outcome.findings):
                return Outcome(name, good="reported")
    return Outcome(name, findings=(f"the check did not report this mistake: {outcome.findings}",))


def main() -> None:
    """Exits with the differences as its message. The first argument is the kernel to build."""
    build.SOURCE = Path(sys.argv[1])
    torch.set_num_threads(3)
    if build.build().library is None:
        sys.exit(f"there is no kernel: {build.build().why}")
    sys.exit("\n".join(differences(JOBS, ROUNDS)) or 0)


if __name__ == "__main__":
    main()
