"""What a claim of a paper is: our words for it, an experiment, criteria fixed beforehand, and what came out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from locant.experiments.statistics import Estimate
from locant.papers.rules import CONFIRMED, NOT_SHOWN, Criterion, Reached, together

if TYPE_CHECKING:
    from locant.papers.place import Place
    from locant.papers.steps import Step

Cell = str | float | None


@dataclass(frozen=True)
class Part:
    """One effect that a criterion judges, such as that of one table or one task."""

    asks: str  # the criterion: its `asks`
    name: str
    effect: Estimate


@dataclass(frozen=True)
class Table:
    """Numbers of a claim: the figure of its page is drawn from them, and they are written as csv."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def column(self, name: str) -> list[Any]:
        """Returns one column."""
        return [row[list(self.header).index(name)] for row in self.rows]

    def where(self, **wanted: Cell) -> Table:
        """Returns the rows whose columns have these values."""
        at = {list(self.header).index(name): value for name, value in wanted.items()}
        return Table(self.header, [row for row in self.rows if all(row[i] == value for i, value in at.items())])


@dataclass(frozen=True)
class Measured:
    """The result of a claim's experiment. The first part is the effect that the summary shows."""

    parts: Sequence[Part]
    tables: Mapping[str, Table] = field(default_factory=dict)
    sentences: Sequence[str] = ()  # what came out, for a reader


class Claim(ABC):
    """A claim of a paper. The subclass is the experiment; its docstring explains it."""

    id: ClassVar[str]
    says: ClassVar[str]  # the claim, in our words
    place: ClassVar[str]  # where the paper makes it
    quantity: ClassVar[str]  # what is measured, with its unit
    criteria: ClassVar[tuple[Criterion, ...]]
    limits: ClassVar[str]  # what the experiment cannot show
    sources: ClassVar[tuple[str, ...]] = ()  # data that it reads, names of `sources.SOURCES`

    @abstractmethod
    def steps(self, at: Place) -> list[Step]:
        """Returns the work to be done first, in order. Claims that return the same step share it."""

    @abstractmethod
    def measure(self, at: Place) -> Measured:
        """Returns the result, from the files of the steps. It takes seconds."""

    def verdict(self, found: Measured) -> str:
        """Returns confirmed, not shown or contradicted."""
        known = {criterion.asks for criterion in self.criteria}
        for part in found.parts:
            if part.asks not in known:
                raise ValueError(f"{self.id} has no criterion {part.asks!r}; it has: {', '.join(sorted(known))}")
        judged = {
            criterion: criterion.judge([part.effect for part in found.parts if part.asks == criterion.asks])
            for criterion in self.criteria
        }
        if any(isinstance(each.rule, Reached) and verdict != CONFIRMED for each, verdict in judged.items()):
            return NOT_SHOWN
        return together(list(judged.values()))


@dataclass(frozen=True)
class Paper:
    """A paper: its claims, and the sizes of its experiments by preset."""

    name: str
    title: str
    authors: str  # "Wennberg & Henter 2021, arXiv 2106.01950"
    claims: tuple[Claim, ...]
    sizes: Mapping[str, Any]  # preset -> dataclass of the paper's file

    def chosen(self, ids: Sequence[str]) -> tuple[Claim, ...]:
        """Returns the claims with these ids; all of them if there are none. ValueError for an unknown one."""
        known = {claim.id.lower(): claim for claim in self.claims}
        for each in ids:
            if each.lower() not in known:
                listed = ", ".join(claim.id for claim in self.claims)
                raise ValueError(f"{self.name} has no claim {each!r}; it has: {listed}")
        return tuple(known[each] for each in dict.fromkeys(map(str.lower, ids))) or self.claims
