"""File systems that are full or read-only. Both are mounts, because nothing else binds the superuser."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SIZE = 64 * 2**20
"""Bytes of the small disk."""


def can_mount(folder: Path) -> bool:
    """Whether this process may mount a file system."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _run("mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder))
    except (OSError, subprocess.CalledProcessError):
        return False
    _run("umount", str(folder))
    return True


class Disk:
    """A small disk that can be filled."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.filler = folder, folder / "filler"

    def fill(self, left: int) -> None:
        """Fills the disk up to `left` bytes."""
        about = os.statvfs(self.folder)
        size = about.f_bavail * about.f_frsize - left
        if size > 0:
            # The command goes on writing: the disk may be full before the file has its size.
            with self.filler.open("wb") as file, suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, size // about.f_frsize * about.f_frsize)

    def free(self) -> None:
        """Gives the space back."""
        self.filler.unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[Disk]:
    """Mounts a disk of SIZE bytes in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder))
    try:
        yield Disk(folder)
    finally:
        _unmount(folder)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Mounts a folder over itself, read-only."""
    _run("mount", "--bind", str(folder), str(folder))
    try:
        _run("mount", "-o", "remount,ro,bind", str(folder))
        yield
    finally:
        _unmount(folder)


def _unmount(folder: Path) -> None:
    """Unmounts as soon as the last threads of processes that have ended have let go of their files."""
    end = time.monotonic() + 30
    while subprocess.run(["umount", str(folder)], stderr=subprocess.DEVNULL).returncode:
        if time.monotonic() > end:
            raise OSError(f"{folder} cannot be unmounted")
        time.sleep(0.1)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
