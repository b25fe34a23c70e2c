"""A paper of our own with two claims about numbers that a step writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from locant.experiments.statistics import estimate
from locant.papers.claim import Claim, Measured, Paper, Part, Table
from locant.papers.place import Place
from locant.papers.rules import Absent, Criterion, Larger
from locant.papers.steps import Measuring, Step


@dataclass(frozen=True)
class Sizes:
    values: tuple[float, ...] = (1.0, 1.1, 1.2)


CALLS: list[str] = []
"""Which measurements were made, in order."""


def numbers(at: Place) -> dict[str, Any]:
    CALLS.append("numbers")
    return {"values": list(at.size.values)}


def fails(at: Place) -> dict[str, Any]:
    CALLS.append("fails")
    raise ValueError("there is no number")


def seconds(at: Place) -> float:
    return 1e9


NUMBERS = Measuring("numbers", numbers, seconds)


class Positive(Claim):
    """The numbers of one step."""

    id, says, place = "X1", "numbers are positive", "the abstract"
    quantity, limits = "the mean", "made up"
    criteria = (Criterion("mean", Larger(0.5)),)

    def steps(self, at: Place) -> list[Step]:
        return [NUMBERS]

    def measure(self, at: Place) -> Measured:
        values = at.measured("numbers")["values"]
        return Measured([Part("mean", "all", estimate(values))], {"values": Table(["value"], [[x] for x in values])},
                        ["It was measured."])  # fmt: skip


class Zero(Positive):
    """The same step."""

    id, says = "X2", "numbers are zero"
    criteria = (Criterion("mean", Absent(0.1)),)


class Broken(Positive):
    """A step that fails."""

    id, says = "X3", "there are numbers"
    sources = ("wikitext",)

    def steps(self, at: Place) -> list[Step]:
        return [NUMBERS, Measuring("fails", fails, seconds)]


@dataclass(frozen=True)
class Figures:
    FIGURES: dict[str, Any] = field(default_factory=dict)


PAPER = Paper("made", "A made-up paper", "Nobody 2020", (Positive(), Zero(), Broken()),
              {"quick": Sizes(), "small": Sizes((1.0, 1.1, 1.2, 1.3)), "paper": Sizes()})  # fmt: skip
