"""Writes folders of comparisons as runs leave them, from invented numbers."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from locant.experiments.comparison import Comparison, where
from locant.experiments.presets import SCRATCH
from locant.experiments.results import outcomes, table
from locant.experiments.work import Run, Work

STEPS = 40
PRESET = replace(SCRATCH["quick"], length=128)
LENGTHS = (128, 256, 512, 1024)
ABOUT = "70,524 tokens of a text, tested on 65,536 others"
VERSIONS = {"locant": "0.1.0", "torch": "2.9.0", "transformers": "5.0.0", "python": "3.11.7"}


def begin(out: Path, schemes: list[str], seeds: int = 3, task: str = "clm") -> Comparison:
    comparison = Comparison(Work(task, "gpt2", None, PRESET, STEPS), tuple(schemes), tuple(range(seeds)), ABOUT)
    out.mkdir(parents=True, exist_ok=True)
    (out / "comparison.json").write_text(json.dumps(comparison.to_dict()))
    return comparison


def folder_of(out: Path, comparison: Comparison, scheme: str, seed: int) -> Path:
    here = where(out, Run(comparison.work, scheme, seed))
    here.mkdir(parents=True, exist_ok=True)
    about = {"scheme": scheme, "seed": seed, "versions": VERSIONS, "began": f"2026-01-0{seed + 1}T12:00:00+00:00"}
    (here / "run.json").write_text(json.dumps(about))
    return here


def begun(out: Path, comparison: Comparison, scheme: str, seed: int, score: float = 4.0, upto: int = STEPS) -> Path:
    """A run that has logged `upto` steps: its loss falls from 8 to its score; schemes with a table also log R²."""
    here = folder_of(out, comparison, scheme, seed)
    rows: list[dict[str, Any]] = []
    for step in range(2, upto + 1, 2):
        row = {"kind": "step", "step": step, "seconds": step / 4, "loss": score + (8 - score) * math.exp(-step / 8)}
        if scheme.startswith("learned"):
            row |= {
                "invariance/gram": 0.5,
                "invariance/off_diagonal": step / 100,
                "invariance/head_1": 0.125 + seed / 8,
            }
        rows.append(row)
    write(here, rows)
    return here


def finish(
    out: Path,
    comparison: Comparison,
    scheme: str,
    seed: int,
    score: float,
    *,
    rise: float = 0.0,
    last: int | None = None,
) -> Path:
    """A run that is done. Each doubling of the length adds `rise` to its score; `last` is where its positions end."""
    here = begun(out, comparison, scheme, seed, score)
    task_metric = "loss" if comparison.work.task in ("clm", "mlm") else "accuracy"
    for at, length in enumerate(LENGTHS):
        if last is not None and length > last:
            test = {"length": length, "values": {}, "by_position": [], "refused": f"its positions end at {last}"}
        else:
            parts = [[start, score + rise * max(0, start - 112) / 112] for start in range(0, length, 16)]
            test = {"length": length, "values": {task_metric: score + rise * at}, "by_position": parts, "refused": ""}
        write(here, [{"kind": "test", **test}])
    scheme_parameters = 16_384 if last is not None else 0
    cost = {
        "kind": "cost", "seconds_per_step": 0.25, "seconds": {"before": 0.5, "training": 10.0, "test": 2.0},
        "memory_mb": 700.4, "parameters": 1_000_000 + scheme_parameters, "scheme_parameters": scheme_parameters,
    }  # fmt: skip
    write(here, [cost])
    (here / "DONE").write_text("2026-01-05T12:00:00+00:00\n")
    return here


def fail(out: Path, comparison: Comparison, scheme: str, seed: int, reason: str, *, final: bool = True) -> Path:
    here = begun(out, comparison, scheme, seed, upto=10)
    (here / "FAILED").write_text(json.dumps({"reason": reason, "final": final}))
    return here


def write(here: Path, rows: list[dict[str, Any]]) -> None:
    with (here / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def rows_of(out: Path, comparison: Comparison) -> list[Any]:
    return table(comparison, outcomes(out, comparison))


SCORES = {"learned": [4.0, 4.2, 4.1], "nope": [4.2, 4.1, 4.15], "tisa": [3.5, 3.8, 3.65], "alibi": [3.7, 3.95, 3.7]}
"""By hand, with t = 4.302653 for three seeds: half an interval is t·s/√3.

learned  4.1    s 0.1   ± 0.24841
nope     4.15   s 0.05  ± 0.12421   minus learned  +0.2 −0.1 +0.05: +0.05, s 0.15, ± 0.37262: no difference shown
tisa     3.65   s 0.15  ± 0.37262   minus learned  −0.5 −0.4 −0.45: −0.45, s 0.05, ± 0.12421: better
alibi    3.7833                     minus learned  −0.3 −0.25 −0.4: −0.31667, s 0.076376, ± 0.18973: better
tisa minus alibi                    −0.2 −0.15 −0.05: −0.13333, s 0.076376, ± 0.18973: no difference shown
"""
RISES = {"nope": 0.5, "tisa": 0.125, "alibi": -0.0625}


def whole(out: Path, seeds: int = 3, schemes: tuple[str, ...] = ("learned", "nope", "tisa", "alibi")) -> Comparison:
    """All runs done; the learned table ends at 128."""
    comparison = begin(out, list(schemes), seeds)
    for scheme in schemes:
        for seed in range(seeds):
            last = 128 if scheme == "learned" else None
            finish(out, comparison, scheme, seed, SCORES[scheme][seed], rise=RISES.get(scheme, 0.0), last=last)
    return comparison
