"""A case: a hostile input, and the words that its refusal must contain."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Attack = Callable[[Path], object]
"""Writes a hostile input into an empty folder and gives it to locant."""


@dataclass(frozen=True)
class Case:
    """One hostile input."""

    name: str
    says: str  # the refusal must contain this
    attack: Attack


class Cases(list[Case]):
    """The cases of one area."""

    def __init__(self, area: str) -> None:
        super().__init__()
        self.area = area

    def add(self, name: str, says: str, attack: Attack) -> None:
        self.append(Case(f"{self.area}: {name}", says, attack))


@functools.cache
def template(kind: str, spec: str = "", keep_native: bool = False) -> Path:
    """A folder with a tiny model, swapped if there is a spec. It is made once and copied for each case."""
    import tempfile

    import locant
    from tests.hf_models import make

    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    model = make(kind)
    if spec:
        locant.swap(model, spec, keep_native=keep_native)
    model.save_pretrained(folder)
    return folder


def model_folder(folder: Path, kind: str = "bert", spec: str = "", keep_native: bool = False) -> Path:
    """Fills a folder with a copy of a template."""
    shutil.copytree(template(kind, spec, keep_native), folder, dirs_exist_ok=True)
    return folder


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a JSON file."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def setting(value: Any, *names: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one entry: setting(3, "a", 0, "b") sets data["a"][0]["b"]."""

    def change(data: Any) -> None:
        for name in names[:-1]:
            data = data[name]
        data[names[-1]] = value

    return change


def without(*names: Any) -> Callable[[dict[str, Any]], None]:
    """A change that deletes one entry."""

    def change(data: Any) -> None:
        for name in names[:-1]:
            data = data[name]
        del data[names[-1]]

    return change
