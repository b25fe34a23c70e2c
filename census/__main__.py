"""Checks the architectures and writes census.csv and docs/census.md."""

from __future__ import annotations

import argparse
import collections
import sys
import time
from pathlib import Path

import transformers

import locant
from census import page, table
from census.campaign import SECONDS_EACH, Result, quiet, run
from census.names import architectures
from census.outcome import WRONG

PAGE = Path(__file__).parent.parent / "docs" / "census.md"


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m census", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures; all of them if none is named")
    parser.add_argument("-o", type=Path, metavar="FOLDER", help="where to write the table and the page")
    parser.add_argument("--check", action="store_true", help="compare with the table instead of writing it")
    options = parser.parse_args()
    quiet()
    every = architectures()
    unknown = set(options.names) - {each.name for each in every}
    if unknown:
        sys.exit(f"no architecture of transformers is called {', '.join(sorted(unknown))}; names are model folders")
    chosen = [each for each in every if not options.names or each.name in options.names]
    print(f"locant of {Path(locant.__file__).parent}, transformers {transformers.__version__}")
    print(f"{len(chosen)} architectures, about {max(1, round(len(chosen) * SECONDS_EACH / 60))} min", flush=True)
    start, results = time.monotonic(), list[Result]()
    for result in run(chosen):
        results.append(result)
        print(f"{len(results)}/{len(chosen)} {result.architecture.name}: {result.verdict} {result.reason}", flush=True)
    counts = collections.Counter(result.verdict for result in results)
    print(", ".join(f"{verdict} {count}" for verdict, count in counts.most_common()), end="; ")
    print(f"{time.monotonic() - start:.0f} s")
    if options.check:
        gone = table.lost(results, table.read())
        sys.exit("\n".join(gone) if gone else 0)
    if options.o is not None:
        table.write(results, options.o / table.PATH.name)
        page.write(results, options.o / PAGE.name)
    elif not options.names:
        table.write(results)
        page.write(results, PAGE)
    sys.exit(bool(options.names) and counts[WRONG] > 0)  # a whole table records what is wrong; it does not fail


if __name__ == "__main__":
    main()
