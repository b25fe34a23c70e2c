"""The lines that differ from another revision."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", re.MULTILINE)


def base_revision(root: Path) -> str:
    """The revision to compare with: where this branch left main; on main itself the commit before."""
    found = _git(root, "merge-base", "main", "HEAD").strip()
    return found if found != _git(root, "rev-parse", "HEAD").strip() else "HEAD~"


def changed_lines(root: Path, path: str, since: str) -> set[int]:
    """The lines of a file, as it is on disk, that are new or different since a revision."""
    diff = _git(root, "diff", "--unified=0", since, "--", path)
    lines: set[int] = set()
    for first, count in HUNK.findall(diff):
        lines |= set(range(int(first), int(first) + int(count or 1)))
    return lines


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout
