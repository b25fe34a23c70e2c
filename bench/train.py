"""The cost of training with locant: the scheme, the harness around the model, and the time to the first step.

    python bench/train.py [SPEC …] [--repeats 15]

1. A training step (forward, backward, AdamW) of the tiny GPT-2 of `--preset quick`, swapped, as a ratio to the same
   model with its native positions; all in turn, one thread; median ratio and quartiles. Target for bias schemes:
   ≤ 1.10.
2. Harness overhead: the share of the time of `execute` outside of the test and of forward, backward, clipping and
   optimizer. These are timed as they are called. Target: < 5 %.
3. Seconds from the command `locant compare` to its first logged step, as in bench/startup.py. Target: ≤ 8.

Written to bench/results/train.csv.
"""

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from measuring import RESULTS, command_line, in_turn, print_versions, ratios, spread, write_csv
from startup import seconds_to_first_step

from locant.experiments import arms, comparison
from locant.experiments.run import execute, load_setting, quiet
from locant.experiments.tasks import find_task
from locant.experiments.work import Run
from locant.runs import files, run_folder
from locant.runs.budget import Budget

SPECS = ["tisa:kernels=5", "t5", "alibi", "kerple", "rope", "nope", "huang4:clip=64"]
STEPS = 500  # of --preset quick


def prepared(out: Path, steps: int) -> comparison.Comparison:
    """Returns a comparison of one native model whose data is prepared."""
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

    def fastest_of_three(self) -> float:
        return min(self.step() for _ in range(3))


def measure_schemes(specs: list[str], repeats: int, rows: list[dict]) -> None:
    """Measures part 1."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        found = prepared(out, STEPS)
        steppers = {spec: Stepper(found, out, spec) for spec in ["native", *specs]}
        times = in_turn({spec: stepper.fastest_of_three for spec, stepper in steppers.items()}, repeats)
    print(f"a step with native positions: {1000 * spread(times['native']).median:.0f} ms")
    for spec in specs:
        add(rows, f"{spec}, step / native step", ratios(times, spec, "native"))


class Clock:
    """Counts the seconds inside some methods while it is active. A call inside another of these calls is part of it."""

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


def measure_harness(repeats: int, rows: list[dict]) -> None:
    """Measures part 2."""
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
    add(rows, f"share of a run of {STEPS} steps outside of model and test", shares)


def add(rows: list[dict], what: str, values: list[float]) -> None:
    """Prints one measurement, and adds its row of the csv file."""
    found = spread(values)
    print(f"{what:60} {found}", flush=True)
    rows.append({"what": what, "median": round(found.median, 4), "q1": round(found.q1, 4), "q3": round(found.q3, 4)})


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("specs", nargs="*", default=SPECS)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    print_versions("torch", threads=1)
    rows: list[dict] = []
    measure_schemes(arguments.specs, arguments.repeats, rows)
    measure_harness(3, rows)
    add(rows, "seconds from the command to the first step", [seconds_to_first_step() for _ in range(5)])
    write_csv(RESULTS / "train.csv", rows)


if __name__ == "__main__":
    main()
