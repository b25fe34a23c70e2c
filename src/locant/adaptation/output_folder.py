"""The folder of an adaptation.

adapt.json         model, scheme, text, budget, trained weights, seed, steps; at the end the table and the heads
metrics.jsonl      agreement during training
fitted.safetensors the fit, for an adaptation that resumes; deleted at the end
checkpoint-N/      where a killed training resumes; deleted at the end
contrast/          the same for the contrastive stage, and its best state; deleted at the end
contrast.csv       retrieval and agreement by step of the contrastive stage, if there was one
model.safetensors  the adapted model, which `locant.load` opens, with its tokenizer
modules.json       if the original has one: how sentence-transformers makes vectors, with the folders of its modules
README.md          the model card
heads.png          curves of the heads before and after (drawn by `locant adapt`)
DONE               the adaptation is complete
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from locant.adaptation import fit_record
from locant.adaptation.card import card
from locant.adaptation.result import Adapted
from locant.adaptation.schedule import FEW, Pace
from locant.hf.saving import save_tokenizer
from locant.hf.sentence_folder import SentenceFolder
from locant.runs import files, run_folder
from locant.runs.budget import Budget
from locant.runs.csv_text import csv_lines

FILE = "adapt.json"
CONTRAST = "contrast"
CURVE = "contrast.csv"
CURVE_COLUMNS = ("step", "retrieval", "agreement", "seconds")
CONTRAST_STEPS = "contrast_steps"


@dataclass(frozen=True)
class OutputFolder:
    """The folder of an adaptation and its settings, the content of adapt.json."""

    path: Path
    settings: dict[str, Any]
    kept: bool = True  # False for a temporary folder

    @property
    def resumed(self) -> bool:
        """Whether the number of training steps is known, from a process that was interrupted."""
        return "steps" in self.settings

    def steps(self, budget: Budget, pace: Pace | None, fit_seconds: float) -> int:
        """Returns the number of training steps, which is computed once and then written to the folder.

        A time budget covers the timing of a step, the fit and the training; fewer than FEW steps are none.
        """
        if not self.resumed:
            self.settings["steps"] = budget.steps
            if budget.seconds is not None:
                assert pace is not None
                self.settings["steps"] = _none_if_few(pace.steps(budget.seconds - pace.timing - fit_seconds))
            files.write_json(self.path / FILE, self.settings)
        return int(self.settings["steps"])

    def contrast_steps(self, budget: Budget, pace: Callable[[], Pace], on_pace: Callable[[Pace, int], None]) -> int:
        """Returns the number of steps of the contrastive stage, which is computed once and then written to the folder.

        on_pace   called with the result of `pace` and the number of steps, if a time had to become steps.
        """
        if CONTRAST_STEPS not in self.settings:
            self.settings[CONTRAST_STEPS] = budget.steps
            if budget.seconds is not None:
                measured = pace()
                steps = _none_if_few(measured.steps(budget.seconds - measured.timing))
                self.settings[CONTRAST_STEPS] = steps
                on_pace(measured, steps)
            files.write_json(self.path / FILE, self.settings)
        return int(self.settings[CONTRAST_STEPS])

    def save(self, done: Adapted, tokenizer: Any, source: SentenceFolder | None) -> None:
        """Writes the model, its card and the results.

        source   the folder of the original, if it is of sentence-transformers: its other modules are copied.
        """
        done.model.save_pretrained(self.path)
        save_tokenizer(tokenizer, done.model, self.path)
        if source is not None:
            source.copy_to(self.path, done.model)
        table = [vars(row) for row in done.rows]
        heads = [{**vars(head), "explained": head.explained} for head in done.fit.heads]
        readings = [{name: value for name, value in vars(each).items() if name != "each"} for each in done.readings]
        kept: dict[str, Any] = {"readings": readings} if readings else {}
        if done.contrast is not None:
            kept["contrast_kept"] = done.contrast.kept.step
            rows = [vars(each) for each in done.contrast.evaluations]
            files.write(self.path / CURVE, csv_lines(CURVE_COLUMNS, rows))
        files.write_json(self.path / FILE, {**self.settings, "table": table, "heads": heads, **kept})
        files.write(self.path / "README.md", card(done, self.settings, [] if source is None else source.kinds))

    @property
    def contrast(self) -> Path:
        """The folder of the contrastive stage, as long as it lasts."""
        return self.path / CONTRAST

    def finish(self) -> None:
        """Marks the folder as done and deletes the checkpoints and the fit. Nothing is written after this."""
        files.write(self.path / run_folder.DONE, datetime.now(timezone.utc).isoformat(timespec="seconds") + "\n")
        _delete_unfinished(self.path)


@contextmanager
def opened(out: Path | str | None, settings: dict[str, Any]) -> Iterator[OutputFolder]:
    """Opens the folder of an adaptation, new or interrupted, and locks it; a temporary one if `out` is None."""
    if out is None:
        with tempfile.TemporaryDirectory() as name:
            yield OutputFolder(Path(name), settings, kept=False)
        return
    path = Path(out)
    run_folder.check(path, FILE)
    with run_folder.held(path, resumes=lambda: _resumes(path)):
        if (path / run_folder.DONE).exists():
            _delete_unfinished(path)
            raise ValueError(f"the adaptation in {path} is done; open it with locant.load, or choose a new folder")
        there = files.read_json(path / FILE) if (path / FILE).exists() else {}
        if "steps" in there:  # without it no training has begun, and there is nothing to resume
            known = {name: there[name] for name in ("steps", CONTRAST_STEPS) if name in there}
            for name, value in known.items():
                if type(value) is not int:
                    raise ValueError(f"{path / FILE} is damaged: {name} is {value!r}; choose a new folder")
            other = [
                f"{key}: {there.get(key)!r} there, {value!r} now"
                for key, value in settings.items()
                if there.get(key) != value
            ]
            if other:
                raise ValueError(f"{path} holds another adaptation ({'; '.join(other)}); choose a new folder")
            settings.update(known)
        files.write_json(path / FILE, settings)
        yield OutputFolder(path, settings)


def _resumes(path: Path) -> bool:
    """Whether a folder has something that the same call would continue: a checkpoint, or a complete adaptation."""
    checkpoints = [run_folder.last_checkpoint(folder) for folder in (path, path / CONTRAST)]
    return (path / run_folder.DONE).exists() or checkpoints != [None, None]


def _delete_unfinished(path: Path) -> None:
    """Deletes what only an adaptation that resumes needs."""
    run_folder.delete_checkpoints(path)
    (path / fit_record.FILE).unlink(missing_ok=True)
    shutil.rmtree(path / CONTRAST, ignore_errors=True)


def _none_if_few(steps: int) -> int:
    return steps if steps >= FEW else 0
