"""`adapt`: fit, then learn from the original for a few minutes.

The folder of an adaptation:

adapt.json         what is done: model, scheme, text, budget, what is trained, seed, steps
metrics.jsonl      how near the model is to the original, as training goes on
checkpoint-N/      where one that was killed goes on; gone when it is done
model.safetensors  the adapted model, which `locant.load` opens, with its tokenizer
README.md          the model card: before and after
DONE
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from locant.adaptation import card, sample
from locant.adaptation.agreement import Agreement, Batch, agree, agreement_for
from locant.adaptation.distil import Look, Original, Steps, distil, frozen, seconds_of_a_step
from locant.adaptation.fitting import Fit, fit, silenced
from locant.adaptation.sample import Sampler, Text
from locant.adaptation.windows import Windows
from locant.analysis.distance import Layer, by_distance
from locant.experiments import folder as files
from locant.experiments.comparison import Budget

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH, WINDOW = 256, 256
"""Tokens of the longest sequences that are trained on, and how many the original reads of them at a time at most."""
HELD_OUT, ROWS, TOKENS = 20, 32, 4096
"""One line in so many is kept to measure agreement on: so many sequences, or tokens, of each length."""
LOOKED_AT = 8
"""Sequences for the curves of the heads."""
TRAIN = ("scheme", "all")
FILE = "adapt.json"

Score = Callable[["PreTrainedModel", Any], float]
"""A task: from a model and its tokenizer to a number."""


@dataclass(frozen=True)
class Row:
    """A line of the table: the model in one of its states."""

    state: str  # original, silenced, fitted, adapted
    agreement: float
    parameters: int  # of its positions
    scores: dict[str, float]


@dataclass
class Adapted:
    """An adapted model, and how it became one."""

    model: PreTrainedModel
    spec: str
    measure: str  # what agreement is
    rows: list[Row]
    fit: Fit
    curves: dict[str, list[Layer]]  # attention by distance, in each state
    looks: list[Look] = field(default_factory=list)

    def __str__(self) -> str:
        return card.table(self.measure, self.rows)


@dataclass
class Measure:
    """What is measured of a model in each of its states."""

    kind: Agreement
    batches: list[Batch]
    outputs: list[Tensor]  # of the original
    tokenizer: Any
    scores: Mapping[str, Score]
    ids: Tensor  # a few sequences to look at attention with
    curves: dict[str, list[Layer]] = field(default_factory=dict)

    def row(self, state: str, model: PreTrainedModel) -> Row:
        from locant.hf.plan import evaluating

        self.curves[state] = by_distance(model, self.ids)
        near = 1.0 if state == "original" else agree(self.kind, self.outputs, model, self.batches)
        with evaluating(model), torch.no_grad():
            scores = {name: score(model, self.tokenizer) for name, score in self.scores.items()}
        return Row(state, near, _position_parameters(model), scores)


def adapt(
    model: PreTrainedModel,
    spec: str,
    text: Text,
    *,
    budget: str = "10min",
    train: str = "all",
    tokenizer: Any = None,
    out: Path | str | None = None,
    scores: Mapping[str, Score] | None = None,
    length: int = LENGTH,
    seed: int = 0,
    say: Callable[[str], None] = lambda stage: None,
    look: Callable[[Look, int], None] = lambda found, steps: None,
) -> Adapted:
    """Gives a model another position scheme, in place, and lets it learn to be what it was.

    text      prose without labels: a string, a list of strings, or a pathlib.Path of a file or folder.
    budget    time or steps: 10min, 90s, 500steps. Time is that of fitting and training.
    train     "scheme": the parameters of the scheme alone; "all": every weight.
    out       a folder to keep the model in; give it again after a kill to go on.
    scores    tasks to measure the model by in each of its states, by name.
    length    tokens of the longest sequences that are trained on. Where that is more than the original can read, it is
              held to what the original says window by window (windows.py).
    """
    if train not in TRAIN:
        raise ValueError(f"train must be one of {', '.join(TRAIN)}, got {train!r}")
    wanted = Budget.parse(budget)
    tokenizer = sample.tokenizer_of(model, tokenizer)
    lines = sample.pieces(text)
    learned = [line for number, line in enumerate(lines, 1) if number % HELD_OUT] or lines
    causal = sample.is_causal(model, tokenizer, lines)
    kind = agreement_for(model, tokenizer, causal=causal)
    windows = Windows(tokenizer, sample.longest(model, WINDOW), causal=causal)
    rungs = sample.ladder(length)
    what = {"spec": spec, "model": model.name_or_path, "budget": budget, "train": train, "length": length,
            "seed": seed, "lines": len(lines)}  # fmt: skip
    with _folder(out, what) as where:
        before = frozen(model, shared=train == "scheme")
        original = Original(before, kind, windows)
        kept = Sampler(tokenizer, held_out(lines), seed=seed)
        batches = [
            kind.prepare(_to(kept.batch(max(2, min(ROWS, TOKENS // rung)), rung), model), at)
            for at, rung in enumerate(rungs)
        ]
        outputs = [kind.keep(original.outputs(batch)) for batch in batches]
        ids = kept.rows(LOOKED_AT, min(64, windows.size)).to(model.device)
        measure = Measure(kind, batches, outputs, tokenizer, scores or {}, ids)
        say("the original")
        rows = [measure.row("original", before)]
        with silenced(model, windows.size):
            say("without positions")
            rows.append(measure.row("silenced", model))
        began = time.perf_counter()
        found = fit(model, spec, learned, tokenizer=tokenizer, seed=seed, say=say)
        took = time.perf_counter() - began
        rows.append(measure.row("fitted", model))
        sampler = Sampler(tokenizer, learned, seed=seed + 1)
        with _only(model, train) as anything:
            looks = []
            if anything:
                say("timing a step")
                steps = _steps(where, wanted, took, lambda: seconds_of_a_step(model, original, kind, sampler, rungs))
                training = Steps(Sampler(tokenizer, learned, seed=seed + 1), kind, rungs, steps, seed)
                say("learning from the original")
                looks = distil(model, original, kind, training, (batches, outputs), out=where, seed=seed,
                               look=lambda found: look(found, steps))  # fmt: skip
        rows.append(measure.row("adapted", model))
        done = Adapted(model, spec, kind.name, rows, found, measure.curves, looks)
        if out is not None:
            _keep(done, tokenizer, where)
    return done


def held_out(lines: list[str]) -> list[str]:
    """Lines that are not trained on."""
    return lines[HELD_OUT - 1 :: HELD_OUT] or lines


@contextmanager
def _folder(out: Path | str | None, what: dict[str, Any]) -> Iterator[Path]:
    """The folder of an adaptation, held by this process; a passing one where none was asked for."""
    if out is None:
        with tempfile.TemporaryDirectory() as name:
            files.write_json(Path(name) / FILE, what)
            yield Path(name)
        return
    where = Path(out)
    if where.is_dir() and any(where.iterdir()) and not (where / FILE).exists():
        raise ValueError(f"{where} holds something else; name a new folder")
    with files.held(where):
        if (where / files.DONE).exists():
            raise ValueError(
                f"{where} holds an adaptation that is done; open it with locant.load, or name a new folder"
            )
        if (where / FILE).exists():
            there = files.read_json(where / FILE)
            other = [f"{key}: {there.get(key)!r} there, {value!r} now" for key, value in what.items()
                     if there.get(key) != value]  # fmt: skip
            if other:
                raise ValueError(f"{where} holds another adaptation ({'; '.join(other)}); name a new folder")
        else:
            files.write_json(where / FILE, what)
        yield where


def _steps(where: Path, wanted: Budget, took: float, seconds: Callable[[], float]) -> int:
    """Steps of a training: as many as fit into what is left of the time, found once and written down."""
    what = files.read_json(where / FILE)
    if "steps" not in what:
        left = max(0.0, (wanted.seconds or 0.0) - took)
        what["steps"] = wanted.steps or max(1, int(left / seconds()))
        files.write_json(where / FILE, what)
    return int(what["steps"])


@contextmanager
def _only(model: PreTrainedModel, train: str) -> Iterator[bool]:
    """What is to be trained wants a gradient, and nothing else; whether there is anything."""
    from locant.hf.plan import plan_of

    plan = plan_of(model)
    assert plan is not None
    scheme = {id(parameter) for part in plan.schemes() for parameter in part.parameters()}
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    for parameter in before:
        parameter.requires_grad_(train == "all" or id(parameter) in scheme)
    try:
        yield any(parameter.requires_grad for parameter in before)
    finally:
        for parameter, flag in before.items():
            parameter.requires_grad_(flag)


def _position_parameters(model: PreTrainedModel) -> int:
    from locant.hf.readout import native

    stacks = native(model).stacks
    schemes = [scheme for stack in stacks for scheme in [stack.embed, *(stack.layers or [])] if scheme is not None]
    return sum(weight.numel() for weight in {w for scheme in schemes for w in scheme.parameters()})


def _to(batch: Batch, model: PreTrainedModel) -> Batch:
    return {name: value.to(model.device) for name, value in batch.items()}


def _keep(done: Adapted, tokenizer: Any, where: Path) -> None:
    done.model.save_pretrained(where)
    tokenizer.save_pretrained(where)
    what = files.read_json(where / FILE)
    what["table"] = [vars(row) for row in done.rows]
    what["heads"] = [{**vars(head), "explained": head.explained} for head in done.fit.heads]
    files.write_json(where / FILE, what)
    files.write(where / "README.md", card.card(done, what))
    files.write(where / files.DONE, datetime.now(timezone.utc).isoformat(timespec="seconds") + "\n")
    for checkpoint in where.glob("checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)
