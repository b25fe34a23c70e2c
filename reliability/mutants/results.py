"""The results of mutants, in a csv file that grows row by row, so that an interrupted run continues."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reliability.mutants.mutant import Mutant

FILE = "reliability/results/mutants.csv"
COLUMNS = ("mutant", "status", "killed by", "change")

KILLED, TIMEOUT, SURVIVED, UNREACHED, EXCUSED = "killed", "timeout", "survived", "unreached", "excused"
"""`unreached`: no test runs the line. `excused`: it has a reason in reasons.py and was not run; it does not count as
noticed."""
FOUND = (KILLED, TIMEOUT)


@dataclass(frozen=True)
class Result:
    """What became of one mutant."""

    status: str
    by: str = ""  # the test that noticed it
    change: str = ""  # of a mutant that was not noticed


class Results:
    """All results so far. A later row of a mutant replaces an earlier one."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.by_key: dict[str, Result] = {}
        if file.exists():
            with file.open(newline="") as rows:
                for row in csv.DictReader(rows):
                    self.by_key[row["mutant"]] = Result(row["status"], row["killed by"], row["change"])

    def get(self, mutant: Mutant) -> Result | None:
        """The result of a mutant, if it has one."""
        return self.by_key.get(mutant.key)

    def add(self, mutant: Mutant, status: str, by: str) -> None:
        """Keeps a result, at once and on disk."""
        self.by_key[mutant.key] = Result(status, by, "" if status in FOUND else shown(mutant))
        new = not self.file.exists()
        with self.file.open("a", newline="") as rows:
            writer = csv.writer(rows, lineterminator="\n")
            if new:
                writer.writerow(COLUMNS)
            writer.writerow(_row(mutant.key, self.by_key[mutant.key]))

    def forget(self, mutants: Sequence[Mutant]) -> None:
        """Drops the results of survivors, so that they run again."""
        for mutant in mutants:
            found = self.get(mutant)
            if found is not None and found.status not in FOUND:
                del self.by_key[mutant.key]

    def rewrite(self, known: set[str]) -> None:
        """Writes the file anew, in order, with the mutants that still exist."""
        unfinished = self.file.with_suffix(".unfinished")
        with unfinished.open("w", newline="") as rows:
            writer = csv.writer(rows, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(_row(key, self.by_key[key]) for key in sorted(self.by_key) if key in known)
        unfinished.replace(self.file)


def _row(key: str, result: Result) -> tuple[str, str, str, str]:
    return key, result.status, result.by, result.change


def shown(mutant: Mutant) -> str:
    """The change on one line."""
    old, new = (" ".join(text.split()) for text in (mutant.old, mutant.new))
    return f"{mutant.name + ': ' if mutant.name else ''}{old} → {new}"
