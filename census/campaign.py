"""Runs architectures, each in a fork of its own with a time limit, so that none can stop or crash the census."""

from __future__ import annotations

import json
import os
import select
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import transformers

from census.checks import CHECKS, check
from census.names import Architecture
from census.outcome import ERROR, OK, REFUSED, WRONG, Outcome
from census.subject import Subject

SECONDS = 60.0
"""Time limit of one architecture."""
SECONDS_EACH = 1.5
"""An architecture on one core of 2024; only for the estimate at the start."""
FIRST = next(iter(CHECKS))
RIGHT, PARTLY, NOT_SWAPPED, ACCIDENT = "right", "partly", REFUSED, ERROR
"""Verdicts of an architecture beside WRONG: swapped and right in every check; swapped, but a check was refused; refused
in words; an accidental error."""
MAY_BE_REFUSED = ("read", "law", "fit")
"""Checks that a swapped model may refuse and still be right: they need positions that can be read."""


@dataclass(frozen=True)
class Result:
    """What came of one architecture."""

    architecture: Architecture
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """RIGHT, WRONG, NOT_SWAPPED or ACCIDENT. That positions cannot be read is not a fault of a swap."""
        states = [outcome.state for outcome in self.outcomes.values()]
        if WRONG in states:
            return WRONG
        if ERROR in states:
            return ACCIDENT
        if self.outcomes[FIRST].state != OK:
            return NOT_SWAPPED
        needed = [outcome.state for name, outcome in self.outcomes.items() if name not in MAY_BE_REFUSED]
        return PARTLY if REFUSED in needed else RIGHT

    @property
    def reason(self) -> str:
        """Why it is not right, or what is to be known about it."""
        order = sorted(self.outcomes, key=lambda name: name in MAY_BE_REFUSED)
        for state in (WRONG, ERROR, REFUSED, OK):
            for name in order:
                outcome = self.outcomes[name]
                if outcome.state == state and outcome.reason and not (state == OK and name == "read"):
                    return outcome.reason if name == FIRST else f"{name}: {outcome.reason}"
        return ""


def quiet() -> None:
    """Silences transformers, which warns of tiny configs; one thread, because a fork has no others."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")


def run(architectures: list[Architecture], seconds: float = SECONDS) -> Iterator[Result]:
    """Yields the result of each architecture, in order."""
    for architecture in architectures:
        start = time.monotonic()
        line = _in_fork(architecture, seconds)
        spent = time.monotonic() - start
        if line:
            outcomes = {name: Outcome(*entry) for name, entry in json.loads(line).items()}
        else:
            why = f"no answer within {seconds:.0f} s" if spent >= seconds else "the process died"
            outcomes = {FIRST: Outcome(ERROR, why)}
        yield Result(architecture, outcomes, spent)


def _in_fork(architecture: Architecture, seconds: float) -> bytes:
    """The outcomes as JSON; nothing if the fork died or took too long."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(architecture, writer)
    os.close(writer)
    answer, end = b"", time.monotonic() + seconds
    try:
        while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
            piece = os.read(reader, 1 << 16)
            if not piece:
                break
            answer += piece
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)  # it has answered, or it never will
        os.waitpid(child, 0)
    return answer if answer.endswith(b"\n") else b""


def _child(architecture: Architecture, writer: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    warnings.simplefilter("ignore")  # a program that forks may have made errors of them
    try:
        found = check(Subject(architecture))
    except BaseException as problem:  # the model could not be built or run
        found = {FIRST: Outcome(ERROR, f"not built: {type(problem).__name__}: {problem}"[:300])}
    text = json.dumps({name: (outcome.state, outcome.reason) for name, outcome in found.items()})
    os.write(writer, text.encode() + b"\n")
    os._exit(0)
