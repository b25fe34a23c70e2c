"""`make kill`: runs all kills and the other scenarios, prints a table and writes reliability/results/kill.csv."""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from reliability.kill import __doc__ as about
from reliability.kill.campaign import Reference, kills
from reliability.kill.outcome import LEFT_OUT, SAME, Case, summary, write_csv
from reliability.kill.scenarios import all_cases
from reliability.kill.subjects import Adapt, Compare

RESULTS = Path(__file__).parents[1] / "results" / "kill.csv"


def main() -> int:
    """Runs everything; returns 1 if something differs."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--out", type=Path, help="a new folder to work in; by default a temporary one")
    options = parser.parse_args()
    # A process that was started in the background may ignore Ctrl-C, and its children would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    work = Path(tempfile.mkdtemp()) if options.out is None else options.out.absolute()
    work.mkdir(parents=True, exist_ok=True)
    start, chance, cases = time.monotonic(), random.Random(options.seed), []
    references = [Reference.measured(subject(work), work) for subject in (Compare, Adapt)]
    for each in references:
        print(
            f"{each.subject.name}: {len(each.results)} results in {each.seconds:.0f} s, {each.work:.0f} s of CPU time",
            flush=True,
        )
    for stage in (kills(references, options.kills, chance, work), all_cases(references, work)):
        for case in stage:
            cases.append(case)
            print(_line(len(cases), case), flush=True)
            write_csv(cases, RESULTS)
    print(f"\n{summary(cases)}\n\n{(time.monotonic() - start) / 60:.0f} minutes, seed {options.seed}")
    wrong = [case for case in cases if case.outcome != SAME and not case.outcome.startswith(LEFT_OUT)]
    if not wrong and options.out is None:
        shutil.rmtree(work)
    return 1 if wrong else 0


def _line(number: int, case: Case) -> str:
    told = ", ".join(filter(None, (case.detail, case.moment, case.reached)))
    return f"{number:3} {case.scenario}: {case.command}, {told}; {case.starts} more starts: {case.outcome}"


if __name__ == "__main__":
    sys.exit(main())
