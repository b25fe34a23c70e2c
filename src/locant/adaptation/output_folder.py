"""The folder of an adaptation.

adapt.json         model, scheme, text, budget, trained weights, seed, steps; at the end the table and the heads
metrics.jsonl      agreement during training
checkpoint-N/      where a killed training resumes; deleted at the end
model.safetensors  the adapted model, which `locant.load` opens, with its tokenizer
modules.json       if the original has one: how sentence-transformers makes vectors, with the folders of its modules
README.md          the model card
heads.png          curves of the heads before and after (drawn by `locant adapt`)
DONE               the adaptation is complete
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from locant.adaptation.card import card
from locant.adaptation.result import Adapted
from locant.adaptation.schedule import FEW, Pace
from locant.hf.saving import save_tokenizer
from locant.hf.sentence_folder import SentenceFolder
from locant.runs import files, run_folder
from locant.runs.budget import Budget

FILE = "adapt.json"


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
                steps = pace.steps(budget.seconds - pace.timing - fit_seconds)
                self.settings["steps"] = steps if steps >= FEW else 0
            files.write_json(self.path / FILE, self.settings)
        return int(self.settings["steps"])

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
        kept = {"readings": readings} if readings else {}
        files.write_json(self.path / FILE, {**self.settings, "table": table, "heads": heads, **kept})
        files.write(self.path / "README.md", card(done, self.settings, [] if source is None else source.kinds))

    def finish(self) -> None:
        """Marks the folder as done and deletes the checkpoints. Nothing is written after this."""
        files.write(self.path / run_folder.DONE, datetime.now(timezone.utc).isoformat(timespec="seconds") + "\n")
        run_folder.delete_checkpoints(self.path)


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
            run_folder.delete_checkpoints(path)
            raise ValueError(f"the adaptation in {path} is done; open it with locant.load, or choose a new folder")
        there = files.read_json(path / FILE) if (path / FILE).exists() else {}
        if "steps" in there:  # without it no training has begun, and there is nothing to resume
            if type(there["steps"]) is not int:
                raise ValueError(f"{path / FILE} is damaged: steps is {there['steps']!r}; choose a new folder")
            other = [
                f"{key}: {there.get(key)!r} there, {value!r} now"
                for key, value in settings.items()
                if there.get(key) != value
            ]
            if other:
                raise ValueError(f"{path} holds another adaptation ({'; '.join(other)}); choose a new folder")
            settings["steps"] = there["steps"]
        files.write_json(path / FILE, settings)
        yield OutputFolder(path, settings)


def _resumes(path: Path) -> bool:
    """Whether a folder has something that the same call would continue: a checkpoint, or a complete adaptation."""
    return (path / run_folder.DONE).exists() or run_folder.last_checkpoint(path) is not None
