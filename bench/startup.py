"""Start-up: the time before the command line answers, before locant can be used, and before a comparison trains.

    python bench/startup.py [--repeats 15] [--compares 5]

1. CPU seconds (user + system) of help, of a wrong option and of an unknown scheme, and their ratio to
   `python -c "import typer, rich"`. Target: ≤ 1.5.
2. CPU seconds of `import locant`, alone and with its first use, minus those of `import torch`. Target: ≤ 0.1.
3. Wall-clock seconds from the command `locant compare` to the first training step that it logs. Target: ≤ 8.

All in turn; median and quartiles. typer is only the yardstick; locant does not use it. Written to
bench/results/startup.csv.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import RESULTS, Spread, command_line, cpu_seconds, in_turn, print_versions, ratios, spread, write_csv

from locant.runs import files

YARDSTICK = "import typer, rich"
COMMANDS = ["--help", "compare --help", "check tisa --wrong", "check hunag4", "compare clm --schemes nope,rop -o out"]
IMPORTS = ["import locant", "import locant; locant.attend, locant.scheme"]


def seconds_to_first_step() -> float:
    """Returns the wall-clock time from `locant compare` to the first step in the metrics of a run."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out"
        command = [sys.executable, "-m", "locant", "compare", "clm", "--schemes", "learned,tisa", "--seeds", "1",
                   "--budget", "100steps", "-o", str(out)]  # fmt: skip
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            while not any(files.lines(path) for path in out.glob("runs/*/metrics.jsonl")):
                if process.poll() is not None:
                    assert process.stderr is not None
                    raise RuntimeError(f"the command ended before its first step: {process.stderr.read().decode()}")
                time.sleep(0.02)
            return time.perf_counter() - start
        finally:
            process.terminate()
            process.wait()


def row(what: str, found: Spread, ratio: float | None = None) -> dict[str, object]:
    """Prints one measurement, and returns its row of the csv file."""
    print(f"{what:62} {found}" + ("" if ratio is None else f"   {ratio:.2f} × {YARDSTICK}"), flush=True)
    numbers = {"median": round(found.median, 4), "q1": round(found.q1, 4), "q3": round(found.q3, 4)}
    return {"what": what, **numbers, "ratio": "" if ratio is None else round(ratio, 3)}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--compares", type=int, default=5, help="times that a comparison is started")
    arguments = parser.parse_args()
    print_versions("locant", "torch", "typer", "rich")
    measures = {YARDSTICK: cpu_seconds(sys.executable, "-c", YARDSTICK)}
    measures |= {line: cpu_seconds(sys.executable, "-m", "locant", *line.split()) for line in COMMANDS}
    times = in_turn(measures, arguments.repeats)
    rows = [row(f"CPU seconds, {YARDSTICK}", spread(times[YARDSTICK]), 1.0)]
    for line in COMMANDS:
        ratio = spread(ratios(times, line, YARDSTICK)).median
        rows.append(row(f"CPU seconds, locant {line}", spread(times[line]), ratio))
    codes = ["import torch", *IMPORTS]
    times = in_turn({code: cpu_seconds(sys.executable, "-c", code) for code in codes}, arguments.repeats)
    rows += [row(f"CPU seconds, {code}", spread(times[code])) for code in codes]
    for code in IMPORTS:
        more = [a - b for a, b in zip(times[code], times["import torch"], strict=True)]
        rows.append(row(f"CPU seconds, {code}, minus import torch", spread(more)))
    waits = [seconds_to_first_step() for _ in range(arguments.compares)]
    rows.append(row("seconds from locant compare to its first step", spread(waits)))
    write_csv(RESULTS / "startup.csv", rows)


if __name__ == "__main__":
    main()
