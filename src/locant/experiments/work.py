"""What a run trains: the settings that all runs of a comparison share, plus one scheme and one seed."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from locant.experiments.presets import Preset


@dataclass(frozen=True)
class Work:
    """The settings that all runs of a comparison share."""

    task: str
    model: str  # a shape (gpt2, bert, …), or the folder or hub name of a trained model
    data: str | None
    preset: Preset
    steps: int
    seconds: float | None = None  # the time budget that `steps` was computed from, if there was one

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings for a JSON file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Work:
        """Returns the settings that `to_dict` wrote."""
        return cls(**{**data, "preset": Preset(**data["preset"])})


@dataclass(frozen=True)
class Run:
    """One scheme and one seed of a comparison."""

    work: Work
    scheme: str
    seed: int

    @property
    def name(self) -> str:
        """A file name: `tisa-kernels=5.s0`."""
        return f"{re.sub(r'[^A-Za-z0-9=+,._]', '-', self.scheme)}.s{self.seed}"


class Diverged(RuntimeError):
    """The loss became NaN or infinite."""
