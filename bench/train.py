"""What training through locant costs: the scheme, the harness around the model, and the wait for the first step.

    python bench/train.py [SPEC …] [--repeats 15]

1. A training step (forward, backward, AdamW) of the tiny GPT-2 of `--preset quick`, swapped, against the same model
   with its native positions; all in turn, one thread; median ratio and quartiles. Wanted for bias schemes: ≤ 1.10.
2. What a run spends outside of the model: of the time of `execute`, what is neither its test nor forward, backward,
   clipping or optimizer, which are timed as they are called. Wanted: < 5 %.
3. Seconds from the command `locant compare` to its first logged step. Wanted: ≤ 10.

Written to bench/results/train.csv.
"""

import argparse
import csv
import functools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from locant.experiments import arms, comparison
from locant.experiments.run import execute, load_setting, quiet
from locant.experiments.tasks import find_task
from locant.experiments.work import Run
from locant.runs import files, run_folder
from locant.runs.budget import Budget

RESULTS = Path(__file__).parent / "results" / "train.csv"
SPECS = ["tisa:kernels=5", "t5", "alibi", "kerple", "rope", "nope", "huang4:clip=64"]
STEPS = 500  # of --preset quick


def prepared(out: Path, steps: int) -> comparison.Comparison:
    return comparison.begin(
        out, task="clm", schemes=["native"], data=None, model=None, seeds=[0], preset="quick",
        budget=Budget(steps=steps), calibrate=lambda *_: 1.0,
    )  # fmt: skip


class Stepper:
    """Bare training steps of one arm."""

    def __init__(self, found: comparison.Comparison, out: Path, spec: str) -> None:
        self.here, self.job = load_setting(found.work, out / comparison.DATA), find_task("clm")
        self.model = arms.build(self.job, self.here, "gpt2", spec, seed=0).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.examples = self.job.examples(self.here, 0, found.work.steps * found.work.preset.batch)
        self.batch = found.work.preset.batch
        self.at = 0

    def step(self) -> float:
        rows = [self.examples[self.at * self.batch + n] for n in range(self.batch)]
        self.at = (self.at + 1) % (len(self.examples) // self.batch)
        batch = self.job.collate(self.here, rows)
        start = time.perf_counter()
        self.model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def schemes(specs: list[str], repeats: int, rows: list[dict]) -> None:
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        found = prepared(out, STEPS)
        steppers = {spec: Stepper(found, out, spec) for spec in ["native", *specs]}
        for stepper in steppers.values():
            for _ in range(3):
                stepper.step()
        times: dict[str, list[float]] = {spec: [] for spec in steppers}
        for _ in range(repeats):
            for spec, stepper in steppers.items():
                times[spec].append(min(stepper.step() for _ in range(3)))
    print(f"a step with native positions: {1000 * statistics.median(times['native']):.0f} ms")
    for spec in specs:
        ratios = sorted(a / b for a, b in zip(times[spec], times["native"], strict=True))
        add(rows, f"{spec}, step / native step", ratios)


class Clock:
    """Seconds in some methods while it runs, whoever calls them; of calls inside of calls the outer one counts."""

    def __init__(self, *methods: tuple[Any, str]) -> None:
        self.methods, self.seconds, self.inside = methods, 0.0, False

    def __enter__(self) -> "Clock":
        self.before = [getattr(owner, name) for owner, name in self.methods]
        for (owner, name), method in zip(self.methods, self.before, strict=True):
            setattr(owner, name, self.timed(method))
        return self

    def __exit__(self, *error: Any) -> None:
        for (owner, name), method in zip(self.methods, self.before, strict=True):
            setattr(owner, name, method)

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return method(*args, **kwargs)
            self.inside, start = True, time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.inside, self.seconds = False, self.seconds + time.perf_counter() - start

        return call


def harness(repeats: int, rows: list[dict]) -> None:
    steps = [(transformers.Trainer, "compute_loss"), (accelerate.Accelerator, "backward"),
             (accelerate.Accelerator, "clip_grad_norm_"), (torch.optim.AdamW, "step")]  # fmt: skip
    shares = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as name:
            out = Path(name)
            run = Run(prepared(out, STEPS).work, "native", 0)
            start = time.perf_counter()
            with Clock(*steps) as clock:
                execute(run, out / "run", out / comparison.DATA)
            whole = time.perf_counter() - start
            (cost,) = (line for line in files.lines(out / "run" / run_folder.METRICS) if line["kind"] == "cost")
            shares.append((whole - cost["seconds"]["test"] - clock.seconds) / whole)
    add(rows, f"share of a run of {STEPS} steps outside of model and test", sorted(shares))


def start_up(repeats: int, rows: list[dict]) -> None:
    waits = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "out"
            command = [sys.executable, "-m", "locant", "compare", "clm", "--schemes", "learned,tisa", "--seeds", "1",
                       "--budget", "100steps", "-o", str(out)]  # fmt: skip
            start = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            while not any(files.lines(path) for path in out.glob("runs/*/metrics.jsonl")):
                if process.poll() is not None:
                    raise RuntimeError(f"the command ended before its first step: {process.stderr.read().decode()}")
                time.sleep(0.02)
            waits.append(time.perf_counter() - start)
            process.terminate()
            process.wait()
    add(rows, "seconds from the command to the first step", sorted(waits))


def add(rows: list[dict], what: str, ordered: list[float]) -> None:
    low, middle, high = ordered[len(ordered) // 4], statistics.median(ordered), ordered[3 * len(ordered) // 4]
    print(f"{what:60} {middle:7.3f}  (quartiles {low:.3f} … {high:.3f})", flush=True)
    rows.append({"what": what, "median": round(middle, 4), "q1": round(low, 4), "q3": round(high, 4)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", default=SPECS)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    print(f"torch {torch.__version__}, 1 thread")
    rows: list[dict] = []
    schemes(arguments.specs, arguments.repeats, rows)
    harness(3, rows)
    start_up(5, rows)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"written: {RESULTS}")


if __name__ == "__main__":
    main()
