"""Builds the driver of the kernel under a check and runs random calls."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from locant.attention import build
from reliability.sanitize.checks import Build, Check, Instructions, command, why_not, wrapper

DRIVER = Path(__file__).parents[2] / "tests" / "attention" / "fused_fuzz.c"
AT_ONCE = 100
"""Calls per run of the driver. It stops at the first finding; the next run goes on with other calls."""
OPTIMIZED = tuple(flag for flag in build.FLAGS if flag not in ("-shared", "-fPIC"))
"""As users get the kernel."""
MINUTES = 30


@dataclass(frozen=True)
class Outcome:
    """The result of one build, or why there is none."""

    name: str
    calls: int = 0
    seconds: float = 0.0
    findings: tuple[str, ...] = ()
    worst: float = 0.0  # the largest error, as a part of what rounding allows
    not_run: str = ""
    good: str = "nothing found"  # the result without findings


def run(planned: Build, seed: int) -> Outcome:
    """Runs the calls of a build; `seed` is that of its first call."""
    reason = why_not(planned)
    if reason is not None:
        return Outcome(planned.name, not_run=reason)
    start = time.perf_counter()
    findings, worst = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        program = compile_driver(planned.check, planned.instructions, Path(folder), OPTIMIZED)
        for first in range(0, planned.calls, AT_ONCE):
            done = call(planned.check, program, seed + first, min(AT_ONCE, planned.calls - first))
            if (finding := finding_in(done)) is not None:
                findings.append(finding)
            else:
                worst = max(worst, float(re.findall(r"worst error ([\d.]+)", done.stdout)[0]))
    return Outcome(planned.name, planned.calls, time.perf_counter() - start, tuple(findings), worst)


def compile_driver(
    check: Check, instructions: Instructions, folder: Path, flags: tuple[str, ...], kernel: Path = build.SOURCE
) -> Path:
    """The driver with a kernel, built under a check."""
    flags = (*flags, *instructions.flags, f'-DFUSED="{kernel}"')
    program = folder / "driver"
    done = subprocess.run(command(check, flags, [DRIVER], program), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{check.compiler} cannot build {DRIVER.name} for {check.name}: {done.stderr[:2000]}")
    return program


def call(check: Check, program: Path, seed: int, calls: int) -> subprocess.CompletedProcess[str]:
    """One run of the driver."""
    arguments = [str(seed), str(calls), *([str(check.callers)] if check.callers else [])]
    options = {"ASAN_OPTIONS": "detect_leaks=1", "TSAN_OPTIONS": "halt_on_error=1", "OMP_WAIT_POLICY": "passive"}
    return subprocess.run(
        [*wrapper(check), str(program), *arguments], capture_output=True, text=True, timeout=60 * MINUTES,
        env={**os.environ, **options},
    )  # fmt: skip


def finding_in(done: subprocess.CompletedProcess[str]) -> str | None:
    """The line of a run that names what was found; None if it ended well."""
    if done.returncode == 0 and "worst error" in done.stdout:
        return None
    lines = (done.stdout + done.stderr).splitlines()
    named = [line for line in lines if re.search(r"ERROR|WARNING|runtime error|expected|ninitialised|Invalid", line)]
    return (named or lines or [f"exit code {done.returncode}"])[0]
