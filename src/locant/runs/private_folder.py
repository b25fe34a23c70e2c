"""A folder in which only this user and root can have written.

What is loaded from a folder of another user runs as this one. So a folder is used only if the way to it is safe, by
the rule of OpenSSH's strict mode: every folder and symbolic link from the root on belongs to this user or to root, and
no other user can write there. A sticky folder such as /tmp may be on the way, because nobody can replace the files of
others in it; what follows it must again be this user's. The folder itself must belong to this user. A group counts as
other users, unless it is the user's own: many systems give every user a group of the same name and the umask 002.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
LINKS = 20
"""Links that lead to links, at most. The system has a limit of this kind too."""


def private_folder(folder: Path) -> Path:
    """Returns the path of a folder without links. Creates it with mode 0700 if it is not there.

    Raises PermissionError if another user can write in it or on the way to it, and OSError if it cannot be created.
    """
    for each in _way(folder.absolute()):
        if not os.path.lexists(each):
            with suppress(FileExistsError):  # another process of this user made it just now; the checks tell
                os.mkdir(each, 0o700)
        _check(each)
    real = folder.resolve()
    found = os.lstat(real)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{real} is not a folder")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{real} belongs to another user ({found.st_uid})")
    if _others_write(found):
        raise PermissionError(_writable(real))
    return real


def read_private(path: Path, others: int = OTHERS_WRITE) -> bytes | None:
    """Returns the content of a file; None unless it is a regular file of this user that nobody else can change.

    `others` are the permissions that nobody else may have. Links are not followed.
    """
    try:
        with open(path, "rb", opener=_open) as file:
            found = os.fstat(file.fileno())
            ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & others
            return file.read() if ours else None
    except OSError:
        return None


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # without O_NONBLOCK a pipe would wait for a writer


def _way(path: Path, links: int = LINKS) -> Iterator[Path]:
    """Every folder and link that the system passes on its way to a path, the targets of links included."""
    if not links:
        raise OSError(f"{path} is behind too many symbolic links")
    for each in [*reversed(path.parents), path]:
        yield each
        if each.is_symlink():
            yield from _way(each.parent / each.readlink(), links - 1)


def _check(path: Path) -> None:
    """Raises PermissionError if a user other than this one and root can replace what is below a path."""
    found = os.lstat(path)
    if found.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to another user ({found.st_uid})")
    shared = not stat.S_ISLNK(found.st_mode) and _others_write(found)
    if shared and not found.st_mode & stat.S_ISVTX:
        raise PermissionError(_writable(path))


def _others_write(found: os.stat_result) -> bool:
    """Whether a user other than the owner can write in a folder."""
    by_group = bool(found.st_mode & stat.S_IWGRP) and not _is_own_group(found.st_gid)
    return by_group or bool(found.st_mode & stat.S_IWOTH)


def _is_own_group(group: int) -> bool:
    """Whether a group has the name of this user and no other member."""
    import grp  # neither is on Windows, where this file is imported and not used
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:  # a user or group without a name
        return False
    return found.gr_name == user and set(found.gr_mem) <= {user}


def _writable(path: Path) -> str:
    return f"other users can write in {path} (chmod go-w {path})"
