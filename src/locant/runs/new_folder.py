"""A command that fails leaves no files and no folders behind, so that it can be repeated.

`undone_on_failure` deletes what a block wrote. `new_folder` also hides a folder until it is complete: a process that is
killed leaves no half-written folder under the name that was asked for.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ENOUGH = 4096
"""Bytes of the test file of `check_writable`: a full disk refuses them."""


class Undo:
    """Remembers what is at some paths, and deletes what was added since."""

    def __init__(self, *paths: Path) -> None:
        self.paths = [path.absolute() for path in paths]
        chains = [(path, *path.parents) for path in self.paths]
        self.missing = [each for chain in chains for each in chain if not os.path.lexists(each)]
        self.look()

    def look(self) -> None:
        """Remembers the content of the folders once more: what is there now is not deleted."""
        self.before = {path: set(path.iterdir()) for path in self.paths if path.is_dir()}

    def delete(self) -> None:
        """Deletes the files and folders that were not there. An error here must not hide the one that led here."""
        for path in self.paths:
            if path.is_dir() and not path.is_symlink():
                for entry in set(path.iterdir()) - self.before.get(path, set()):
                    _remove(entry)
            elif path in self.missing:
                _remove(path)
        for folder in sorted(self.missing, key=lambda path: -len(path.parts)):
            with suppress(OSError):  # not there, or another process has written into it
                folder.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


@contextmanager
def undone_on_failure(*paths: Path) -> Iterator[None]:
    """If the block raises, deletes what it added at these paths, and the folders above that it made."""
    undo = Undo(*paths)
    try:
        yield
    except BaseException:
        undo.delete()
        raise


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a folder to write into, which is at `path` when the block ends. If the block raises, nothing is there.

    A new folder is written beside `path` and renamed. An empty one is written in place: it may be a mount, which cannot
    be replaced. ValueError if `path` is anything else.
    """
    check_new(path)
    place = path if path.is_dir() else path.with_name(f".{path.name}.{os.getpid()}")
    with undone_on_failure(place):
        try:
            place.mkdir(parents=True, exist_ok=True)
            check_writable(place)
            yield place
            if place != path:
                place.rename(path)
        except OSError as problem:
            words = str(problem).replace(str(place), str(path))
            if problem.errno is None and str(path) not in words:  # not of a file: a hub that does not answer, say
                raise
            raise OSError(words if str(path) in words else f"{path} could not be written: {words}") from problem


def check_new(path: Path) -> None:
    """Raises ValueError unless a path is free, or an empty folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists and is not empty; name another folder")


def check_writable(path: Path) -> None:
    """Raises OSError unless a file can be written at `path`, or in the nearest folder above it that exists.

    It writes a temporary file. Permissions alone do not tell: root has all of them, also where nothing can be written.
    """
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if there != path.absolute() and not there.is_dir():
        raise NotADirectoryError(f"{path} cannot be written: {there} is not a folder")
    folder = there if there.is_dir() else there.parent
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".locant-") as file:
            file.write(bytes(ENOUGH))
            file.flush()
    except OSError as problem:
        reason = "the disk is full" if problem.errno == errno.ENOSPC else problem.strerror
        raise type(problem)(f"{path} cannot be written: {folder}: {reason}") from None
