"""Runs random calls of the kernel under every sanitizer, and writes reliability/results/sanitize.csv.

python -m reliability.sanitize              about 25 minutes of CPU time
python -m reliability.sanitize --part 0.1   a tenth of the calls
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from reliability.sanitize import broken, python_threads, running
from reliability.sanitize.checks import builds
from reliability.sanitize.running import Outcome

RESULTS = Path(__file__).parents[1] / "results" / "sanitize.csv"
SEEDS = 1_000_000
"""Each build has its own calls: its first seed is a multiple of this number."""


def outcomes(part: float, seed: int) -> Iterator[Outcome]:
    """The outcome of every check, as it comes in. The self-check comes first: without it the rest shows nothing."""
    yield from broken.self_check()
    yield python_threads.self_check()
    yield python_threads.without_sanitizer()
    yield python_threads.under_sanitizer()
    for index, planned in enumerate(builds()):
        calls = max(1, round(part * planned.calls))
        yield running.run(replace(planned, calls=calls), seed + SEEDS * (index + 1))


def row(outcome: Outcome) -> dict[str, str]:
    """An outcome as a row of the table."""
    status = f"not run: {outcome.not_run}" if outcome.not_run else "; ".join(outcome.findings[:3]) or outcome.good
    return {
        "check": outcome.name,
        "calls": str(outcome.calls),
        "seconds": f"{outcome.seconds:.0f}",
        "worst error": f"{outcome.worst:.2f}" if outcome.worst else "",
        "findings": str(len(outcome.findings)) if not outcome.not_run else "",
        "what": status,
    }


def main() -> None:
    """Exit code 1 if there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=float, default=1.0, help="of the calls of a full run")
    parser.add_argument("--seed", type=int, default=0, help="of the first call")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the csv file")
    options = parser.parse_args()
    found = []
    with options.output.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(row(Outcome(""))))
        table.writeheader()
        for outcome in outcomes(options.part, options.seed):
            found.append(outcome)
            cells = row(outcome)
            table.writerow(cells)
            file.flush()  # a run that is stopped keeps its rows
            print(f"{cells['check']:70} {cells['calls']:>7} calls {cells['seconds']:>5} s  {cells['what']}", flush=True)
    findings, skipped = sum(len(x.findings) for x in found), sum(bool(x.not_run) for x in found)
    print(f"{findings} findings; {skipped} of {len(found)} checks were not run")
    sys.exit(findings > 0)


if __name__ == "__main__":
    main()
