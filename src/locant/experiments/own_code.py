"""Code of the user's own in a comparison: remembered in its folder, and imported in the processes of its runs.

    imports/my_schemes.py    a copy of each file, for the processes of runs and for other machines
    comparison.json          the names of files and modules

A comparison is continued only with the same code, and only if the user names that code again: a folder from somebody
else cannot run its copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from locant import imports
from locant.experiments.work import Work
from locant.imports import Code
from locant.runs import files

FOLDER = "imports"


def remember(out: Path, work: Work, needed: Sequence[Code], there: Sequence[str] = ()) -> Work:
    """Returns the settings with the code they need, and copies files; `there` is what the folder already remembers."""
    named = {code.name: code for code in needed}
    if len(named) < len({code.source for code in needed}):
        raise ValueError("two of the imported files have the same name; rename one")
    for name in there:
        copy = out / FOLDER / name
        content = copy.read_bytes() if name.endswith(".py") and copy.exists() else None
        if not imports.is_loaded(name, content):
            raise ValueError(_refusal(name, copy, changed=name in named))
    for code in named.values():
        copy = out / FOLDER / code.name
        if code.content is None:
            continue
        if code.name in there and copy.read_bytes() != code.content:
            raise ValueError(_refusal(code.name, copy, changed=True))
        files.write(copy, code.content.decode("utf-8"))
    return replace(work, imports=tuple(dict.fromkeys([*there, *named])))


def _refusal(name: str, copy: Path, *, changed: bool) -> str:
    if changed:
        return (
            f"{name} has changed since this comparison began, and its runs must not differ in their code. Name a new "
            f"folder, or pass the code it began with: imports='{copy}'. New schemes can be in a file "
            f"of their own"
        )
    what = copy if name.endswith(".py") else name
    return (
        f"this comparison uses code of its own, {name}, and locant runs no code of a folder by itself. If you trust "
        f"it, pass imports='{what}'"
    )


def load(work: Work, data: Path) -> None:
    """Imports the code of a comparison in the process of a run; `data` is the folder of its data."""
    imports.load([data.parent / FOLDER / name if name.endswith(".py") else name for name in work.imports])
