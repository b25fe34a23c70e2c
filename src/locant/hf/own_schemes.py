"""Schemes of the user's own in the folder of a model: which code they need, and what to pass to open it.

The config names the code of each scheme, and the folder has a copy of a file. The copy is never run unless the user
names it: `locant.load(folder, imports="folder/my_schemes.py")`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from locant import imports, notation, schemes
from locant.runs import files
from locant.runs.untrusted import shortened


def described(specs: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns scheme -> its code, for the schemes in specs that are not of locant."""
    found = {}
    used = {name for spec in specs for name in notation.names(spec)}
    for name in sorted(used - schemes.CLASSES.keys() - schemes.MAP_CLASSES.keys()):
        cls = schemes.class_of(name)
        code = None if cls is None else imports.code_of(cls)
        if code is not None:
            found[name] = {"code": code.name, "sha256": code.digest}
        elif cls is not None and cls.__module__ != "__main__":
            found[name] = {"code": cls.__module__, "sha256": ""}
    return found


def save_code(specs: Iterable[str], folder: Path) -> None:
    """Copies the files with the schemes of the user's own into the folder of a model."""
    for name in described(specs):
        code = imports.code_of(schemes.class_of(name))
        if code is not None and code.content is not None:
            files.write(folder / code.name, code.content.decode("utf-8"))


def check(path: str | Path, planned: dict[str, Any]) -> None:
    """Raises ValueError if a scheme of a plan is not known but its code is; warns if it is known by other code."""
    for name, code in planned.get("imports", {}).items():
        source = code.get("code") if isinstance(code, dict) else None
        if not isinstance(source, str):
            raise ValueError(
                f"{path}: imports of the plan must name the code of {shortened(name)}, got {shortened(code)}"
            )
        cls = schemes.class_of(name)
        if cls is None:
            copy = Path(path) / Path(source).name
            what = copy if source.endswith(".py") and copy.is_file() else source
            raise ValueError(
                f"{path} uses the scheme {shortened(name)} of {shortened(source)}, and locant runs no code of a folder "
                f"by itself. If you trust it, pass imports={str(what)!r}"
            )
        known = imports.code_of(cls)
        if known is not None and code.get("sha256") and known.digest != code["sha256"]:
            warnings.warn(
                f"{path} was saved with another version of {shortened(source)} than {known.source}; if its scheme "
                f"{name} computes something else now, so does the model",
                stacklevel=2,
            )
