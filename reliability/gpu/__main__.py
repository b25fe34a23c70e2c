"""Proves what can be proved about the Triton kernels without a GPU.

TRITON_INTERPRET=1 python -m reliability.gpu equality --calls 500    random calls, about 0.6 s of CPU time each
python -m reliability.gpu compiled                                   compiles the kernels, about 25 minutes of CPU time
python -m reliability.gpu table                                      prints the compiled kernels as in docs/gpu.md

Written to reliability/results/gpu-equality.csv and gpu-compiled.csv. `compiled` goes on where it was interrupted;
delete the file to begin again. No number is a time on a GPU.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from dataclasses import asdict, fields
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
KEYS = ("capability", "head size", "terms", "kernel")


def equality(calls: int, seed: int, output: Path) -> int:
    """Runs random calls. Returns 1 if one of them is too far from the truth."""
    from reliability.gpu.equality import Outcome, run

    wrong, worst = 0, 0.0
    with output.open("w", newline="") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(Outcome)], lineterminator="\n")
        writer.writeheader()
        for number in range(seed, seed + calls):
            outcome = run(number)
            wrong += outcome.part > 1
            worst = max(worst, outcome.part)
            writer.writerow({name: f"{x:.3g}" if isinstance(x, float) else x for name, x in asdict(outcome).items()})
            file.flush()
            if outcome.part > 1:
                print(f"WRONG: {outcome}")
    print(f"{calls} calls, {wrong} wrong; the largest error was {worst:.2f} of what is allowed.")
    return 1 if wrong else 0


def compiled(output: Path) -> int:
    """Compiles what is not yet in the table. Returns 1 if a kernel spills."""
    from reliability.gpu.compiled import rows

    done = []
    if output.exists():
        with output.open(newline="") as file:
            done = list(csv.DictReader(file))
    spilled = sum(int(row["spilled bytes"]) > 0 for row in done)
    with output.open("a", newline="") as file:
        writer = None
        for row in rows({tuple(each[key] for key in KEYS) for each in done}):
            if writer is None:
                writer = csv.DictWriter(file, list(row), lineterminator="\n")
                if not done:
                    writer.writeheader()
            writer.writerow(row)
            file.flush()
            spilled += row["spilled bytes"] > 0
            print(*row.values(), flush=True)
    print(f"{spilled} kernels spill.")
    return 1 if spilled else 0


def main() -> int:
    """Exit code 0 if everything is as it should be."""
    parser = argparse.ArgumentParser(prog="python -m reliability.gpu", description=__doc__)
    parser.add_argument("what", choices=["equality", "compiled", "table"])
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted != (options.what == "equality"):
        parser.error(f"{options.what} needs TRITON_INTERPRET {'=1' if options.what == 'equality' else 'not set'}")
    output = options.output or RESULTS / f"gpu-{'compiled' if options.what == 'table' else options.what}.csv"
    if options.what == "table":
        from reliability.gpu.compiled import table

        with output.open(newline="") as file:
            print(table(list(csv.DictReader(file))))
        return 0
    if options.what == "equality":
        return equality(options.calls, options.seed, output)
    return compiled(output)


if __name__ == "__main__":
    sys.exit(main())
