"""File systems that are full or read-only. Both are mounts, because nothing else binds the superuser."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE, BLOCK = 2**26, 2**12
"""Bytes of the small disk, and of its blocks."""


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
        """Fills the disk up to `left` bytes, by ever smaller parts.

        The command writes at the same time. A part for which there is no room any more is not written at all.
        """
        part, size = SIZE, 0
        with self.filler.open("wb") as file:
            while part >= BLOCK:
                if self.available() < left + part or not _extended(file.fileno(), size, part):
                    part //= 2
                else:
                    size += part

    def available(self) -> int:
        """Returns the free bytes."""
        about = os.statvfs(self.folder)
        return about.f_bavail * about.f_frsize

    def free(self) -> None:
        """Gives the space back."""
        self.filler.unlink(missing_ok=True)


def _extended(file: int, size: int, part: int) -> bool:
    """Adds a part to a file of a size; returns whether there was room."""
    try:
        os.posix_fallocate(file, size, part)
    except OSError:
        return False
    return True


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
