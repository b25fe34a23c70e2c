"""The checks and the instruction sets that the kernel is built with."""

from __future__ import annotations

import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from locant.attention import build

OPENMP = Path(__file__).with_name("openmp.c")
CALLERS = 6
"""Threads that call the kernel at once under ThreadSanitizer."""


@dataclass(frozen=True)
class Check:
    """One way to watch the kernel while it runs."""

    name: str
    finds: str
    flags: tuple[str, ...]
    compiler: str = "gcc"
    wrapper: tuple[str, ...] = ()  # the command that runs the program
    callers: int = 0  # threads that call the kernel at once
    sources: tuple[Path, ...] = ()  # compiled with the driver
    install: str = "apt-get install gcc libc6-dev"


ADDRESS = Check(
    "address",
    "memory out of bounds or freed, undefined behaviour, leaks",
    ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fopenmp"),
)
THREAD = Check(
    "thread",
    f"data races within a call, and between {CALLERS} threads that call at once",
    ("-fsanitize=thread", "-fopenmp"),
    callers=CALLERS,
    sources=(OPENMP,),  # its functions take the place of those of libgomp
)
MEMCHECK = Check(
    "memcheck",
    "uninitialised reads, memory out of bounds, leaks",
    ("-g",),
    wrapper=("valgrind", "--quiet", "--error-exitcode=9", "--leak-check=full"),
    install="apt-get install gcc libc6-dev valgrind",
)
MEMORY = Check(
    "memory",
    "uninitialised reads",
    ("-fsanitize=memory", "-O1"),  # with -O3 clang takes many minutes
    compiler="clang",
    install="apt-get install clang",
)


@dataclass(frozen=True)
class Instructions:
    """An instruction set: compiler flags, and the flags of a CPU that has it in /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str] = frozenset()


SSE2 = Instructions("SSE2", ("-march=x86-64",))
AVX2 = Instructions("AVX2", ("-march=x86-64-v3",), frozenset({"avx2", "fma", "bmi2", "f16c", "movbe"}))
AVX512 = Instructions(
    "AVX-512",
    ("-march=x86-64-v4",),
    AVX2.needs | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
)
NATIVE = Instructions("this CPU", tuple(build.CPU))


@dataclass(frozen=True)
class Build:
    """A check of the kernel for one instruction set."""

    check: Check
    instructions: Instructions
    calls: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.check.name}, {self.instructions.name}"


def builds() -> list[Build]:
    """All builds of a full run. Valgrind does not know AVX-512; MemorySanitizer takes its place there.

    The numbers of calls follow their cost: a call takes 5 seconds under valgrind and 0.03 under AddressSanitizer.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return [Build(ADDRESS, NATIVE, 5000), Build(THREAD, NATIVE, 100), Build(MEMCHECK, NATIVE, 40)]
    return [
        *(Build(ADDRESS, instructions, 5000) for instructions in (SSE2, AVX2, AVX512)),
        *(Build(THREAD, instructions, 100) for instructions in (SSE2, AVX2, AVX512)),
        *(Build(MEMCHECK, instructions, 40) for instructions in (SSE2, AVX2)),
        Build(MEMORY, AVX512, 500),
    ]


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The flags of this CPU; empty if the system does not list them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())


def why_not(build: Build, has: frozenset[str] | None = None) -> str | None:
    """Why a build cannot run here, and what to do; None if it can. `has` are the flags of the CPU."""
    lacking = build.instructions.needs - (cpu_flags() if has is None else has)
    if lacking:
        return f"this CPU has no {', '.join(sorted(lacking))}; run on one that has"
    return why_no_check(build.check)


@cache
def why_no_check(check: Check) -> str | None:
    """Why a check is not available on this machine, and how to install it; None if it is."""
    for program in (check.compiler, *check.wrapper[:1]):
        if shutil.which(program) is None:
            return f"{program} is missing; {check.install}"
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "probe.c"), Path(folder, "probe")
        source.write_text("int main(void) { return 0; }")
        done = subprocess.run(command(check, (), [source], program), capture_output=True, text=True)
        if done.returncode == 0:
            done = subprocess.run([*wrapper(check), str(program)], capture_output=True, text=True)
    if done.returncode == 0:
        return None
    why = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    return f"a program built with {check.compiler} {check.flags[0]} does not run ({why}); {check.install}"


def command(check: Check, flags: tuple[str, ...], sources: list[Path], program: Path) -> list[str]:
    """The command that builds a program under a check."""
    files = [str(path) for path in (*sources, *check.sources)]
    return [check.compiler, "-g", "-std=gnu11", *flags, *files, "-o", str(program), *check.flags, "-lm", "-lpthread"]


def wrapper(check: Check) -> list[str]:
    """The command to put before a program that was built under a check."""
    return [*(_fixed_addresses() if check is THREAD else []), *check.wrapper]


@cache
def _fixed_addresses() -> tuple[str, ...]:
    """A command that loads a program at fixed addresses: ThreadSanitizer refuses some random ones."""
    fixed = ("setarch", platform.machine(), "-R")
    if shutil.which("setarch") and subprocess.run([*fixed, "true"], capture_output=True).returncode == 0:
        return fixed
    return ()
