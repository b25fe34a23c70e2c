"""What a run trains: the settings that all runs of a comparison share, plus one scheme and one seed."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from locant.experiments.presets import Preset
from locant.runs.untrusted import shortened


def checked(data: Any, cls: Any) -> dict[str, Any]:
    """Returns `data` if it has the fields of a dataclass with values of their types; ValueError names what is wrong."""
    fields, types = {field.name: field for field in dataclasses.fields(cls)}, get_type_hints(cls)
    needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    if not isinstance(data, dict) or not needed <= data.keys() <= fields.keys():
        got = sorted(data) if isinstance(data, dict) else data
        raise ValueError(f"expected the entries {', '.join(fields)}; got {shortened(got)}")
    for name, value in data.items():
        allowed = get_args(types[name]) or (types[name],)
        if type(value) not in (*allowed, *([int] if float in allowed else [])):
            raise ValueError(f"{name} must be of the type {types[name]}, got {shortened(value)}")
    return data


@dataclass(frozen=True)
class Work:
    """The settings that all runs of a comparison share."""

    task: str
    model: str  # a shape (gpt2, bert, …), or the folder or hub name of a trained model
    data: str | None
    preset: Preset
    steps: int
    seconds: float | None = None  # the time budget that `steps` was computed from, if there was one
    imports: tuple[str, ...] = ()  # code of the user's own: modules, and names of files in the folder of imports

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings for a JSON file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Work:
        """Returns the settings that `to_dict` wrote; ValueError if they are others."""
        preset = Preset(**checked(data.get("preset"), Preset))
        imports = data.get("imports", [])
        if not isinstance(imports, list) or not all(isinstance(x, str) and "/" not in x for x in imports):
            raise ValueError(f"imports must be a list of names, got {shortened(imports)}")
        rest = {name: value for name, value in data.items() if name != "imports"}
        return cls(**{**checked({**rest, "preset": preset}, cls), "imports": tuple(imports)})


@dataclass(frozen=True)
class Run:
    """One scheme and one seed of a comparison."""

    work: Work
    scheme: str
    seed: int
    report_to: tuple[str, ...] = field(default=(), compare=False)  # trackers; they change nothing in the run

    @property
    def name(self) -> str:
        """A file name: `tisa-kernels=5.s0`."""
        return f"{re.sub(r'[^A-Za-z0-9=+,._]', '-', self.scheme)}.s{self.seed}"


class Diverged(RuntimeError):
    """The loss became NaN or infinite."""
