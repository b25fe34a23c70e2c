"""Compiles `fused.c` into a library at first use, and caches it for the next process.

One call of a C compiler (`$CC`, or cc, gcc, clang), a few seconds; no torch headers, no build system. The library is
in `$LOCANT_CACHE` (~/.cache/locant). Its name is a hash of the source, the compiler, its flags and the CPU, so a change
of any of them makes a new build. `LOCANT_FUSED=0` disables the kernel.

A library in the cache runs as the user who loads it, so it must be one that this user built:

- The folder is private (`private_folder`): no other user can write in it or on the way to it. It is made with mode
  0700. Users do not share a cache.
- The library is a regular file of this user that nobody else can write.
- Beside it is a tag, an HMAC of the library and of everything it was built from. The key is in the folder and only this
  user can read it. A half-written library, or one that was put there with a checksum of its own, has the wrong tag and
  is built again.

Where the folder cannot be used, a folder of this user beside the temporary files takes its place, under the same rules.
Where neither can, the library is built in a temporary folder with mode 0700, for this process alone. `locant doctor`
states the reason.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import os
import platform
import secrets
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from locant.runs import files
from locant.runs.new_folder import check_writable
from locant.runs.private_folder import private_folder, read_private

SOURCE = Path(__file__).with_name("fused.c")
FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC"]
CPU = ["-mcpu=native"] if platform.machine() in ("arm64", "aarch64") else ["-march=native"]
OPTIONAL = [[*CPU, "-fopenmp"], [*CPU], []]
"""Flags to try, in this order: some compilers have no OpenMP, some do not know the CPU they run on."""
KEY_BYTES = 32


@dataclass(frozen=True)
class Built:
    """A loaded library, or the reason why there is none."""

    library: ctypes.CDLL | None
    why: str  # how it was built, or why it was not
    path: Path | None = None  # in the cache; None if it is not cached
    command: str = ""
    seconds: float = 0.0  # that the build took; 0 if the library was in the cache
    trouble: str = ""  # why the cache folder is not used


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


def cache_folder() -> Path | None:
    """The folder that the library is cached in; None for a user without a home folder."""
    if os.environ.get("LOCANT_CACHE"):
        return Path(os.environ["LOCANT_CACHE"])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "locant"
    if os.environ.get("HOME") == "":  # it would be a folder in the root of the file system
        return None
    try:
        return Path.home() / ".cache" / "locant"
    except RuntimeError:
        return None


def fallback_folder() -> Path:
    """The folder that takes the place of a cache folder that cannot be used."""
    return Path(tempfile.gettempdir()) / f"locant-{os.geteuid()}"


def _load(command: list[str]) -> Built:
    """Returns the library that a command builds, from the cache or newly built."""
    start = time.perf_counter()
    origin = _origin(command)
    name, words = f"fused-{hashlib.sha256(origin).hexdigest()[:20]}.so", shlex.join(command)
    troubles: list[str] = []
    for place in (cache_folder(), fallback_folder()):
        try:
            path = _checked(place) / name
            if _is_ours(path, origin):
                return Built(ctypes.CDLL(str(path)), "built before and loaded", path, words, 0.0, "; ".join(troubles))
            check_writable(path.parent)
        except OSError as problem:
            troubles.append(str(problem))
            continue
        library = _compile(command, path)
        _write_private(_tag_file(path), _tag(library, origin, _key(path.parent)))
        seconds = time.perf_counter() - start
        return Built(ctypes.CDLL(str(path)), "built and loaded", path, words, seconds, "; ".join(troubles))
    return _load_uncached(command, name, "; ".join(troubles), start)


def _origin(command: list[str]) -> bytes:
    """Everything that the library depends on: the source, the compiler, its flags and the CPU."""
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    return "\0".join([SOURCE.read_text(), *command, version, _cpu()]).encode()


def _load_uncached(command: list[str], name: str, reason: str, start: float) -> Built:
    """Builds the library for this process alone. A loaded library needs no file."""
    with tempfile.TemporaryDirectory(prefix="locant-") as made:
        path = private_folder(Path(made)) / name
        _compile(command, path)
        why = f"built and loaded, but not cached: {reason}"
        return Built(ctypes.CDLL(str(path)), why, None, shlex.join(command), time.perf_counter() - start, reason)


def _checked(folder: Path | None) -> Path:
    if folder is None:
        raise FileNotFoundError("this user has no home folder; set LOCANT_CACHE to a folder of this user")
    return private_folder(folder)


def _compile(command: list[str], path: Path) -> bytes:
    """Builds the library and returns its bytes."""
    with files.replacing(path) as unfinished:  # another process must never load half a library
        subprocess.run(
            [*command, str(SOURCE), "-o", str(unfinished), "-lm"], capture_output=True, text=True, timeout=120,
            check=True,
        )  # fmt: skip
        library = unfinished.read_bytes() if unfinished.exists() else b""
        if not library:
            raise OSError(f"{command[0]} wrote nothing")
        unfinished.chmod(0o700)  # whatever the umask is
    return library


def _is_ours(path: Path, origin: bytes) -> bool:
    """Whether the library is there, whole, and built by this user from `origin`."""
    library, tag = read_private(path), read_private(_tag_file(path))
    if library is None or tag is None:
        return False
    return hmac.compare_digest(tag, _tag(library, origin, _key(path.parent)))


def _tag_file(path: Path) -> Path:
    return path.with_suffix(".tag")


def _tag(library: bytes, origin: bytes, key: bytes) -> bytes:
    """Binds a library to what it was built from. Without the key nobody can make a tag."""
    return hmac.digest(key, hashlib.sha256(origin).digest() + library, "sha256")


def _key(folder: Path) -> bytes:
    """The secret of a cache folder, made at first use.

    If two processes make it at once, the last one stays; a library with a tag of the other is built again.
    """
    path = folder / "key"
    key = read_private(path, others=stat.S_IRWXG | stat.S_IRWXO)
    if key is not None and len(key) == KEY_BYTES:
        return key
    key = secrets.token_bytes(KEY_BYTES)
    _write_private(path, key)
    return key


def _write_private(path: Path, content: bytes) -> None:
    with files.replacing(path) as unfinished:
        unfinished.touch(0o600)
        unfinished.write_bytes(content)


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
