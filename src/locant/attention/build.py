"""Compiles `fused.c` into a library at first use, and caches it for the next process.

One call of a C compiler (`$CC`, or cc, gcc, clang), a few seconds; no torch headers, no build system. The library is
in `$LOCANT_CACHE` (~/.cache/locant). Its name is a hash of the source, the compiler, its flags and the CPU, so a change
of any of them makes a new build. `LOCANT_FUSED=0` disables the kernel.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from locant.runs import files

SOURCE = Path(__file__).with_name("fused.c")
FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC"]
CPU = ["-mcpu=native"] if platform.machine() in ("arm64", "aarch64") else ["-march=native"]
OPTIONAL = [[*CPU, "-fopenmp"], [*CPU], []]
"""Flags to try, in this order: some compilers have no OpenMP, some do not know the CPU they run on."""


@dataclass(frozen=True)
class Built:
    """A loaded library, or the reason why there is none."""

    library: ctypes.CDLL | None
    why: str  # how it was built, or why it was not
    path: Path | None = None
    command: str = ""
    seconds: float = 0.0  # that the build took; 0 if the library was in the cache


@cache
def build() -> Built:
    """The library of the kernel. The first call in a process loads it, and compiles it if the cache has none."""
    if os.environ.get("LOCANT_FUSED", "1") == "0":
        return Built(None, "switched off by LOCANT_FUSED=0")
    if sys.platform == "win32":
        return Built(None, "it needs gcc or clang, which locant does not use on Windows")
    compiler = find_compiler()
    if compiler is None:
        return Built(None, "no C compiler was found (tried $CC, cc, gcc, clang); install one, e.g. gcc")
    trouble = ""
    for optional in OPTIONAL:
        command = [*compiler, *FLAGS, *optional]
        try:
            return _load(command)
        except (OSError, subprocess.SubprocessError) as error:
            trouble = trouble or _message(error)
    return Built(None, f"{shlex.join(compiler)} could not build it: {trouble}")


def find_compiler() -> list[str] | None:
    """The command of a C compiler: `$CC`, or the first of cc, gcc and clang that is there; None if none is."""
    if os.environ.get("CC"):
        try:
            words = shlex.split(os.environ["CC"])
        except ValueError:
            return None
        return words if words and shutil.which(words[0]) else None
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def cache_folder() -> Path:
    """The folder that the library is cached in."""
    if os.environ.get("LOCANT_CACHE"):
        return Path(os.environ["LOCANT_CACHE"])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "locant"
    try:
        return Path.home() / ".cache" / "locant"
    except RuntimeError:  # the user has no home folder
        return Path(tempfile.gettempdir()) / f"locant-{os.getuid()}"


def _load(command: list[str]) -> Built:
    start = time.perf_counter()
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    key = "\0".join([SOURCE.read_text(), *command, version, _cpu()])
    name = f"fused-{hashlib.sha256(key.encode()).hexdigest()[:20]}.so"
    path = cache_folder() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not _intact(path):
            _compile(command, path)
            return Built(
                ctypes.CDLL(str(path)), "built and loaded", path, shlex.join(command), time.perf_counter() - start
            )
        return Built(ctypes.CDLL(str(path)), "built before and loaded", path, shlex.join(command))
    except PermissionError:
        pass
    except OSError:
        if path.parent.is_dir() and os.access(path.parent, os.W_OK):
            raise
    with tempfile.TemporaryDirectory(prefix="locant-") as folder:  # no cache; a loaded library needs no file
        path = Path(folder) / name
        _compile(command, path)
        why = f"built and loaded, but not cached: {cache_folder()} cannot be written"
        return Built(ctypes.CDLL(str(path)), why, None, shlex.join(command), time.perf_counter() - start)


def _compile(command: list[str], path: Path) -> None:
    with files.replacing(path) as unfinished:  # another process must never load half a library
        subprocess.run(
            [*command, str(SOURCE), "-o", str(unfinished), "-lm"], capture_output=True, text=True, timeout=120,
            check=True,
        )  # fmt: skip
        library = unfinished.read_bytes() if unfinished.exists() else b""
        if not library:
            raise OSError(f"{command[0]} wrote nothing")
        unfinished.chmod(0o755)  # for other users of the same cache
    files.write(_digest(path), hashlib.sha256(library).hexdigest())


def _digest(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _intact(path: Path) -> bool:
    """Whether the library is there, with the digest it was written with. Loading half a file would end the process."""
    if not path.exists() or not _digest(path).exists():
        return False
    return hashlib.sha256(path.read_bytes()).hexdigest() == _digest(path).read_text()


def _cpu() -> str:
    """The properties of the CPU that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "\n".join(dict.fromkeys(x for x in lines if x.startswith(("flags", "Features", "model name", "CPU part"))))


def _message(error: Exception) -> str:
    """The line of a compiler's output that names the error."""
    output = getattr(error, "stderr", None) or str(error)
    return next((line for line in output.splitlines() if "error" in line.lower()), output.strip()[:200])
