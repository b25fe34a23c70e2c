"""The commands that are killed: `locant compare` and `locant adapt` on models of a few thousand parameters."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from locant.experiments.comparison import open_folder, where
from locant.report.comparison import PAGE, TABLES, comparison_page, write_comparison_page
from locant.report.page import write_page
from locant.runs import files, run_folder
from tests import bert, words
from tests.experiments import processes

STEPS = 40
TIMES = ("seconds", "seconds_per_step", "memory_mb")
"""Entries of the metrics that no two runs share."""
START = ("host", "process", "began")
"""Entries of run.json that belong to the process that started the run."""


class Subject(ABC):
    """A command and its results. `work` holds its inputs."""

    name: str
    victims: tuple[str, ...]
    moments: ClassVar[dict[str, str]]
    """Name of a moment -> pattern of the file whose appearance is this moment; in the order in which they appear."""

    def __init__(self, work: Path) -> None:
        self.work, self.logs = work, work / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def words(self) -> list[str]:
        """Returns the command without its folder."""

    def line(self, out: Path) -> list[str]:
        """Returns the command line."""
        return [sys.executable, "-m", "locant", *self.words(), "-o", str(out)]

    @abstractmethod
    def done(self, out: Path, code: int | None) -> bool:
        """Whether nothing is left to do in a folder; `code` is the exit code of the last command, None before one."""

    def reached(self, out: Path) -> str:
        """Returns the last of the moments that a folder has reached."""
        found = [name for name, pattern in self.moments.items() if any(out.glob(pattern))]
        return found[-1] if found else "nothing"

    def results(self, out: Path) -> dict[str, str]:
        """Returns a hash of each file, without times, process numbers and logs."""
        return _hashes(self.without_times(out))

    def without_times(self, out: Path) -> Path:
        """Returns a copy of a folder in which times and process numbers are constants."""
        return _without_times(out, self.work / "without times" / "out")


class Compare(Subject):
    """Two schemes, trained in two processes."""

    name, victims = "compare", ("comparer", "worker", "both")
    moments: ClassVar[dict[str, str]] = {
        "data": "data/train/*.arrow",
        "comparison.json": "comparison.json",
        "first step": "runs/*/metrics.jsonl",
        "half a checkpoint": "runs/*/checkpoint-*",
        "whole checkpoint": "runs/*/checkpoint-*/WHOLE",
        "model": "runs/*/model.safetensors",
        "DONE": "runs/*/DONE",
        "page": "report.html",
        "csv": "csv/*.csv",
    }

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        self.data = processes.text(work / "text.txt")

    def words(self) -> list[str]:
        return ["compare", "clm", "--schemes", "tisa,native", "--seeds", "1", "--budget", f"{STEPS}steps",
                "--preset", processes.PRESET, "--data", str(self.data)]  # fmt: skip

    def done(self, out: Path, code: int | None) -> bool:
        return code == 0 and all(run_folder.state(where(out, run)) == "done" for run in open_folder(out).runs())

    def results(self, out: Path) -> dict[str, str]:
        return {**super().results(out), "page and tables": "as the folder" if _is_current(out) else "out of date"}

    def without_times(self, out: Path) -> Path:
        copy = super().without_times(out)
        write_comparison_page(copy)  # page and tables contain times, so they are made anew
        return copy


def _is_current(out: Path) -> bool:
    """Whether page and tables are what the folder gives now, times included, with no file missing or left over."""
    with tempfile.TemporaryDirectory() as name:
        now = Path(name)
        write_page(comparison_page(out), now / PAGE, csv_folder=now / TABLES)
        tables = {path.name for folder in (out, now) for path in (folder / TABLES).glob("*")}
        return all(
            (out / each).exists() and (now / each).exists() and (out / each).read_bytes() == (now / each).read_bytes()
            for each in [PAGE, *(f"{TABLES}/{table}" for table in tables if table[0] != ".")]
        )


class Adapt(Subject):
    """A BERT with one layer, trained in the process of the command."""

    name, victims = "adapt", ("command",)
    moments: ClassVar[dict[str, str]] = {
        "adapt.json": "adapt.json",
        "half a checkpoint": "checkpoint-*",
        "whole checkpoint": "checkpoint-*/WHOLE",
        "model": "model.safetensors",
        "card": "README.md",
        "picture": "heads.png",
        "DONE": "DONE",
    }

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        self.model, self.text = bert.save(work / "model"), work / "lines.txt"
        self.text.write_text("\n".join(words.text()))

    def words(self) -> list[str]:
        return ["adapt", self.model, "tisa:kernels=2", "--text", str(self.text), "--budget", f"{STEPS}steps"]

    def done(self, out: Path, code: int | None) -> bool:
        return (out / run_folder.DONE).exists()  # from then on the command refuses the folder


def _hashes(folder: Path) -> dict[str, str]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _without_times(out: Path, copy: Path) -> Path:
    """Copies a folder. Times and process numbers become constants; logs, locks and temporary files are left out."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(out, copy, ignore=shutil.ignore_patterns(".*", "log.txt", PAGE, TABLES))
    for path in copy.rglob(run_folder.METRICS):
        rows = [_constant(row, TIMES) for row in files.lines(path)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path in copy.rglob("run.json"):
        path.write_text(json.dumps(_constant(files.read_json(path), START)))
    for path in copy.rglob(run_folder.DONE):
        path.write_text("then")
    return copy


def _constant(row: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    def same(value: Any) -> Any:
        if isinstance(value, dict):
            return dict.fromkeys(value, 1.0)
        return "then" if isinstance(value, str) else 1.0

    return {key: same(value) if key in keys else value for key, value in row.items()}
