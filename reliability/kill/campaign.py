"""Kills of a command at moments spread over its whole life, each followed by the same command until it is done."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reliability.kill.moments import Moment, file_appears, share_of_work
from reliability.kill.outcome import SAME, Case, judged
from reliability.kill.processes import Command, Wrong, finish
from reliability.kill.subjects import Subject

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
IN_A_ROW = (1, 1, 2, 3)
"""How many times the command of one folder is killed before it may end: one of these, by chance."""
PARTS = 10
"""Moments are drawn from each of these parts of a command's work in turn."""
DELAY = 0.1
"""Most seconds between the appearance of a file and the kill; every second kill comes at once."""


@dataclass(frozen=True)
class Reference:
    """A command that nothing disturbed: its seconds, its CPU seconds and its results."""

    subject: Subject
    seconds: float
    work: float
    results: dict[str, str]

    @classmethod
    def measured(cls, subject: Subject, folder: Path) -> Reference:
        """Runs the command twice; raises Wrong if the results differ, because nothing could then be compared."""
        found = []
        for name in ("whole", "again"):
            command, work = Command(subject, folder / subject.name / name), 0.0
            while command.running():
                work = max(work, command.work())
                time.sleep(0.01)
            if not subject.done(command.out, command.wait()):
                raise Wrong(f"{subject.name} fails undisturbed: {command.said()[-300:]}")
            found.append(cls(subject, time.monotonic() - command.started, work, subject.results(command.out)))
        first, second = found  # the first one reads everything from the disk
        if first.results != second.results:
            raise Wrong(f"two undisturbed runs of {subject.name} {judged(first.results, second.results)}")
        return second

    def outcome(self, out: Path) -> str:
        """Compares the results in a folder with those of the undisturbed command."""
        return judged(self.results, self.subject.results(out))


class Deck:
    """Draws all of its cards in random order, then all of them again, so that none is missed by chance."""

    def __init__(self, cards: Sequence[Any], chance: random.Random) -> None:
        self.order = self._shuffled(list(cards), chance)

    @staticmethod
    def _shuffled(cards: list[Any], chance: random.Random) -> Iterator[Any]:
        while True:
            chance.shuffle(cards)
            yield from cards

    def draw(self) -> Any:
        """Returns the next card."""
        return next(self.order)


class Plan:
    """What is done to a command: which signal to which of its processes, and when."""

    def __init__(self, reference: Reference, chance: random.Random) -> None:
        self.reference, self.chance = reference, chance
        subject = reference.subject
        self.ways = Deck([(sent, who) for sent in SIGNALS for who in subject.victims], chance)
        self.parts, self.files = Deck(range(PARTS), chance), Deck(list(subject.moments), chance)
        self.kinds = Deck([self._of_its_work, self._of_its_files], chance)

    def moment(self) -> Moment:
        """Returns a moment of its work or of its files, in turn."""
        moment: Moment = self.kinds.draw()()
        return moment

    def _of_its_work(self) -> Moment:
        return share_of_work((self.parts.draw() + self.chance.random()) / PARTS, self.reference.work)

    def _of_its_files(self) -> Moment:
        delay = self.chance.choice((0.0, DELAY * self.chance.random()))
        return file_appears(self.reference.subject, self.files.draw(), delay)


def kills(references: Sequence[Reference], count: int, chance: random.Random, folder: Path) -> Iterator[Case]:
    """Yields one case per kill. A command that ends before its moment comes does not count."""
    plans, number = Deck([Plan(reference, chance) for reference in references], chance), 0
    while count > 0:
        plan, number = plans.draw(), number + 1
        out = folder / plan.reference.subject.name / f"killed {number}"
        cases = killed_in_a_row(plan, min(chance.choice(IN_A_ROW), count), out)
        count -= len(cases)
        yield from cases


def killed_in_a_row(plan: Plan, times: int, out: Path) -> list[Case]:
    """Kills the command of one folder several times, lets it end, and returns the kills with the outcome."""
    subject, commands, found = plan.reference.subject, [], []
    try:
        while len(found) < times and not subject.done(out, None):
            commands.append(Command(subject, out))
            what = _kill(commands[-1], plan)
            commands[-1].wait()
            if what is None:
                break
            found.append(what)
        starts = finish(subject, out)
        outcome = plan.reference.outcome(out)
        for command in commands:
            command.check_alone()
    except Wrong as problem:
        starts, outcome = 0, str(problem)
    if not found and outcome != SAME:
        raise Wrong(f"a command that was not killed: {outcome}")
    return [Case("kill", subject.name, detail, moment, reached, starts, outcome) for detail, moment, reached in found]


def _kill(command: Command, plan: Plan) -> tuple[str, str, str] | None:
    """Waits for a moment and kills; returns what was killed, when, and what was there; None if the command ended."""
    moment = plan.moment()
    if not moment.wait(command):
        return None
    reached, (sent, wanted) = command.subject.reached(command.out), plan.ways.draw()
    who, victims = command.victims(wanted, plan.chance)
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sent)
    return f"{sent.name} to {who}", moment.name, reached
