"""Where a reproduction happens: its folder, its data and its sizes.

reproduction.json   paper, preset, version, sizes and rules; a folder with others is refused
findings/A1.json    verdict, effects and tables of a claim

and of its steps, in the same folder, or for several papers in the folder above:

steps/NAME.json     whether a step is done, how long it took, and the numbers that claims read
runs/NAME/          a comparison, as `locant compare` makes it
models/NAME/        a fitted or adapted model
texts/NAME/         texts joined from several sources

Claims read steps/ alone. What else a step leaves is for later steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locant.papers.sources import find_source, name_of_source
from locant.runs import files

RUNS, MODELS, TEXTS, STEPS, FINDINGS = "runs", "models", "texts", "steps", "findings"


@dataclass(frozen=True)
class Place:
    """The folder of a reproduction, that of its steps, that of its data, and the sizes of one preset."""

    folder: Path
    work: Path  # of the steps, which several papers can share
    data: Path | None
    size: Any  # the dataclass of sizes in the paper's file

    def source(self, name: str) -> Path:
        """Returns the path of a data set or a model."""
        return find_source(name_of_source(name, self.size), self.data)

    def measured(self, name: str) -> dict[str, Any]:
        """Returns the numbers of a step that is done."""
        found: dict[str, Any] = files.read_json(self.mark(name))["numbers"]
        return found

    def mark(self, name: str) -> Path:
        """Returns the file in steps/ of a step."""
        return self.work / STEPS / f"{name}.json"

    def model(self, name: str) -> Path:
        """Returns the folder of the model of a `Fitting` or `Adapting` step."""
        return self.work / MODELS / name

    def runs(self, name: str) -> Path:
        """Returns the folder of the comparison of a `Training` step."""
        return self.work / RUNS / name
