"""`Mutant`: one fault in one source file, and its identity from one run to the next."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

MODULE_LEVEL = "(module)"
"""The function of a mutant outside of all functions."""


@dataclass(frozen=True)
class Mutant:
    """A source file with one fault."""

    path: str  # of the source file, from the root of the repository
    function: str  # qualified name of the outermost function or method around the fault, or MODULE_LEVEL
    line: int  # first line that differs
    old: str  # the lines that differ, as they are
    new: str  # and with the fault
    text: str  # the whole file with the fault
    version: str  # digest of the function without the fault: results are kept until it changes
    name: str = ""  # of a mutant from a list

    @property
    def key(self) -> str:
        """The identity: file, function and change, not the line number."""
        change = hashlib.sha256(f"{self.old}\0{self.new}\0{self.version}".encode()).hexdigest()[:10]
        return f"{self.path}:{self.function}:{change}"

    @property
    def runs_at_import(self) -> bool:
        """Whether the changed line runs when the module is imported, so that the module must be imported again."""
        return self.function == MODULE_LEVEL


def digest(text: str) -> str:
    """A short digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def changed_lines(before: str, after: str) -> tuple[int, str, str]:
    """The first line that differs, and the lines that differ in each text."""
    old, new = before.splitlines(), after.splitlines()
    first = 0
    while first < min(len(old), len(new)) and old[first] == new[first]:
        first += 1
    last = 0
    while last < min(len(old), len(new)) - first and old[-1 - last] == new[-1 - last]:
        last += 1
    return first + 1, "\n".join(old[first : len(old) - last]), "\n".join(new[first : len(new) - last])
