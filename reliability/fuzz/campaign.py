"""Runs many cases, in one process or several, and counts what came of them."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch

from reliability.fuzz.case import Case
from reliability.fuzz.check import COMPARED, FAILED, REFUSED, Outcome, run
from reliability.fuzz.draw import draw

BLOCK = 250
"""Cases between two lines of progress."""
CASES_PER_SECOND = 60
"""On one core of 2024; only for the estimate at the start."""
FIELDS = ("by", "name", "cases", COMPARED, REFUSED, FAILED, "seconds")


@dataclass(frozen=True)
class Ran:
    """One case that ran."""

    index: int
    case: Case
    outcome: Outcome
    seconds: float


@dataclass
class Row:
    """One line of the table."""

    cases: int = 0
    kinds: dict[str, int] = field(default_factory=lambda: dict.fromkeys((COMPARED, REFUSED, FAILED), 0))
    seconds: float = 0.0

    def add(self, ran: Ran) -> None:
        self.cases += 1
        self.kinds[ran.outcome.kind] += 1
        self.seconds += ran.seconds


@dataclass
class Counts:
    """Everything that is counted. A case counts once for every scheme of a sum."""

    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    failures: list[Ran] = field(default_factory=list)
    largest: float = 0.0  # error of a case that passed, as a share of what is allowed

    def add(self, ran: Ran) -> None:
        """Counts a case."""
        case = ran.case
        names = {("all", "all"), ("back end", case.impl), ("dtype", case.dtype), ("context", case.context)}
        names |= {("scheme", name) for name in case.scheme_names}
        names |= {("map", mapped[0]) for mapped in case.maps if mapped is not None}
        names |= {("scheme", "sum of several")} if "+" in case.spec else set()
        names |= {("feature", name) for name, has in FEATURES.items() if has(case)}
        if ran.outcome.kind == REFUSED:
            names.add(("refused", ran.outcome.what))
        for key in names:
            self.rows.setdefault(key, Row()).add(ran)
        if ran.outcome.kind == FAILED:
            self.failures.append(ran)
        else:
            self.largest = max(self.largest, ran.outcome.largest)

    def table(self) -> list[dict[str, object]]:
        """The rows, by kind and name."""
        order = ("all", "back end", "scheme", "map", "dtype", "context", "feature", "refused")
        keys = sorted(self.rows, key=lambda key: (order.index(key[0]), key[1]))
        return [
            {"by": by, "name": name, "cases": row.cases, **row.kinds, "seconds": round(row.seconds, 1)}
            for (by, name), row in ((key, self.rows[key]) for key in keys)
        ]


FEATURES: dict[str, Callable[[Case], bool]] = {
    "gradients": lambda c: bool(c.wanted) and c.context in ("plain", "autocast", "thread"),
    "gradients of parameters": lambda c: "p" in c.wanted and c.context in ("plain", "autocast", "thread"),
    "positions": lambda c: c.positions != "none",
    "mask": lambda c: c.mask != "none",
    "additive mask": lambda c: c.additive != "none",
    "causal": lambda c: c.causal,
    "window": lambda c: c.window is not None,
    "strides": lambda c: (c.q_layout, c.k_layout, c.v_layout) != ("plain",) * 3,
    "grouped heads": lambda c: c.groups > 1,
    "dropout": lambda c: c.dropout > 0,
    "softcap": lambda c: c.softcap is not None,
    "gradients of hidden states": lambda c: "x" in c.wanted and c.context in ("plain", "autocast", "thread"),
    "sinks": lambda c: c.sinks != "none",
    "weights": lambda c: c.need_weights,
    "calls before": lambda c: c.before != "nothing",
    "slices": lambda c: c.slices,
    "tile edges (100 tokens or more)": lambda c: max(c.lq, c.lk) >= 100,
}


def run_block(seed: int, first: int, count: int, new: bool = False) -> list[Ran]:
    """Runs `count` cases from number `first` on."""
    torch.set_num_threads(1)
    done = []
    for index in range(first, first + count):
        start = time.perf_counter()
        case = draw(seed, index, new)
        try:
            outcome = run(case)
        except Exception as error:  # of the fuzzer itself: show it, with the case
            outcome = Outcome(FAILED, f"the check raised {type(error).__name__}: {error}")
        done.append(Ran(index, case, outcome, time.perf_counter() - start))
    return done


def blocks(seed: int, first: int, cases: int, processes: int, new: bool = False) -> Iterator[list[Ran]]:
    """Runs cases in blocks and yields each when it is done."""
    parts = [(start, min(BLOCK, first + cases - start)) for start in range(first, first + cases, BLOCK)]
    if processes == 1:
        for start, count in parts:
            yield run_block(seed, start, count, new)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(run_block, seed, start, count, new) for start, count in parts]
        for finished in as_completed(waiting):
            yield finished.result()


def write(counts: Counts, path: Path) -> None:
    """Writes the table as csv."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(counts.table())
