"""The command line: see `reliability.fuzz`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from reliability.fuzz.campaign import BLOCK, CASES_PER_SECOND, FIELDS, Counts, Ran, blocks, write
from reliability.fuzz.case import Case
from reliability.fuzz.check import FAILED, Outcome, run
from reliability.fuzz.draw import draw
from reliability.fuzz.shrink import shrink

RESULTS = Path(__file__).parent.parent / "results" / "fuzz.csv"
SHOWN = 10
"""Failures that are shrunk and printed; all are counted."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the cases of the command line; 1 if one fails."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    if options.case is not None:
        return _run_one(options.seed, options.case, options.new)
    seconds = options.cases / CASES_PER_SECOND / options.processes
    print(f"{options.cases} cases of seed {options.seed}; about {seconds / 60:.0f} min on free cores", flush=True)
    counts, done, start = Counts(), 0, time.perf_counter()
    for block in blocks(options.seed, options.first, options.cases, options.processes, options.new):
        for ran in block:
            counts.add(ran)
            if ran.outcome.kind == FAILED and len(counts.failures) <= SHOWN:
                print_failure(options.seed, ran, options.new)
        done += len(block)
        if done % (8 * BLOCK) == 0 or done == options.cases:
            _progress(done, options.cases, len(counts.failures), time.perf_counter() - start)
    _print_table(counts, time.perf_counter() - start)
    if options.output is not None:
        write(counts, options.output)
    return 1 if counts.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m reliability.fuzz", description="Random calls against a reference.")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case; to split a run or go on")
    parser.add_argument("--case", type=int, help="run this one case and show it")
    parser.add_argument("--new", action="store_true", help="only cases with a scheme of 2025–26 or a map")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS, help="csv file of the table")
    return parser


def _run_one(seed: int, index: int, new: bool) -> int:
    case = draw(seed, index, new)
    outcome = run(case)
    print(case)
    print(outcome)
    if outcome.kind == FAILED:
        print_failure(seed, Ran(index, case, outcome, 0.0), new)
    return 1 if outcome.kind == FAILED else 0


def print_failure(seed: int, ran: Ran, new: bool = False) -> None:
    """Prints what failed, and two lines that do it again with the smallest case found."""
    case, outcome = shrink(ran.case, ran.outcome)
    print(f"\nFAILED: case {ran.index} of seed {seed}: {ran.outcome.what}")
    print(f"again: python -m reliability.fuzz --seed {seed} --case {ran.index}{' --new' if new else ''}")
    print(f"smaller: {outcome.what}")
    print(reproducer(case), flush=True)


def reproducer(case: Case) -> str:
    """Two lines of Python that run a case and print its `Outcome`."""
    return f"from reliability.fuzz import Case, run\nprint(run({case!r}))"


def _progress(done: int, cases: int, failures: int, seconds: float) -> None:
    left = seconds / done * (cases - done)
    rate = f"{done / seconds:.0f} a second, {left / 60:.0f} min left"
    print(f"{done} of {cases} cases, {failures} failed, {rate}", flush=True)


def _print_table(counts: Counts, seconds: float) -> None:
    print()
    print(f"{'by':<10}{'name':<42}" + "".join(f"{name:>10}" for name in FIELDS[2:]))
    for row in counts.table():
        print(f"{row['by']:<10}{row['name']:<42}" + "".join(f"{row[name]!s:>10}" for name in FIELDS[2:]))
    print(f"\nlargest error of a case that passed: {counts.largest:.2f} of what is allowed; {seconds:.0f} s in all")


__all__ = ["Outcome", "main", "print_failure", "reproducer"]

if __name__ == "__main__":
    sys.exit(main())
