"""`adapt`: fit, then learn from the original for a few minutes.

The folder of an adaptation:

adapt.json         what is done: model, scheme, text, budget, what is trained, seed, steps
metrics.jsonl      how near the model is to the original, as training goes on
checkpoint-N/      where one that was killed goes on; gone when it is done
model.safetensors  the adapted model, which `locant.load` opens, with its tokenizer
README.md          the model card: before and after
heads.png          where heads look, before and after (`locant adapt` draws it)
DONE
"""

from __future__ import annotations

import copy
import hashlib
import random
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
from locant.adaptation.agreement import Agreement, agree, agreement_for
from locant.adaptation.distil import EVERY, LOOKS, Look, Original, Steps, distil, frozen, seconds_of_a_step, to
from locant.adaptation.fitting import LENGTH as FITTED
from locant.adaptation.fitting import Fit, fit, silenced
from locant.adaptation.sample import Sampler, Text
from locant.adaptation.windows import Batch, Windows
from locant.analysis.distance import Layer, by_distance
from locant.hf.modes import evaluating
from locant.hf.plan import ANY_LENGTH, plan_of
from locant.hf.readout import native
from locant.hf.swapping import swap
from locant.runs import files, run_folder
from locant.runs.budget import Budget
from locant.schemes.base import Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH = 256
"""Tokens of the longest sequences that are trained on."""
WINDOW = 128
"""Tokens of the windows in which an encoder is shown what is longer than it can read: few were trained on much longer
texts, and what they say of them is worse for it. A causal model sees as much as it can."""
CAUSAL = 256
"""Tokens of the shortest sequences of a causal model, and of those it is fitted on: what it says of shorter ones is the
beginning of what it says of these."""
HELD_OUT, BLOCK, ROWS, TOKENS = 20, 16, 32, 4096
"""One block of lines in so many, of so many, is kept to measure agreement on: so many sequences, or tokens, of each
length."""
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

    @property
    def steps(self) -> int:
        """Steps that were trained."""
        return self.looks[-1].step if self.looks else 0

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
        self.curves[state] = by_distance(model, self.ids)
        near = 1.0 if state == "original" else agree(self.kind, self.outputs, model, self.batches)
        with evaluating(model), torch.no_grad():
            scores = {name: _number(name, score(model, self.tokenizer)) for name, score in self.scores.items()}
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

    Where it fails or is stopped, the model is put back as it was.

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
    sample.check(model, spec)
    sample.check_numbers(length, seed)
    tokenizer = sample.tokenizer_of(model, tokenizer)
    lines = sample.pieces(text)
    sample.check_words(model, tokenizer, lines)
    with _undisturbed(model):
        causal = sample.is_causal(model, tokenizer, lines)
        kind = agreement_for(model, tokenizer, causal=causal)
        swap(swap(model, spec), "native")  # whatever is wrong with the scheme, it is said now
    what = {"spec": spec, "model": model.name_or_path, "budget": budget, "train": train, "length": length,
            "seed": seed, "lines": len(lines), "text": _hash("\n".join(lines)), "weights": _weights_hash(model),
            "tokens": _hash(str(tokenizer(lines[:100], verbose=False)["input_ids"]))}  # fmt: skip
    with _folder(out, what) as where, _undisturbed(model):
        before = frozen(model, shared=train == "scheme")
        try:
            readable = sample.longest(model, length)
            window = readable if causal else min(readable, WINDOW)
            original = Original(before, kind, Windows(tokenizer, window, causal=causal, whole=readable))
            rungs = sample.ladder(length, CAUSAL) if causal else sample.ladder(length)
            measure = _measure(original, Sampler(tokenizer, held_out(lines), seed=seed), rungs, tokenizer, scores or {})
            say("the original")
            rows = [measure.row("original", before)]
            with silenced(model, readable):
                say("without positions")
                rows.append(measure.row("silenced", model))
            began = time.perf_counter()
            found = fit(model, spec, trained_on(lines), tokenizer=tokenizer, seed=seed, say=say,
                        length=CAUSAL if causal else FITTED, queries=train == "all" and _rotates(model))  # fmt: skip
            took = time.perf_counter() - began
            rows.append(measure.row("fitted", model))
            looks: list[Look] = []
            with _only(model, train) as anything:
                if anything:
                    say("timing a step")
                    steps = _steps(where, what, wanted, took, lambda: _pace(model, original, measure, lines, rungs))
                    sampler = Sampler(tokenizer, trained_on(lines), seed=seed + 1)
                    say("learning from the original")
                    looks = distil(
                        model, original, Steps(sampler, kind, rungs, steps, seed), (measure.batches, measure.outputs),
                        out=where, keep=out is not None, seed=seed, look=lambda found: look(found, steps),
                    )  # fmt: skip
            rows.append(measure.row("adapted", model))
            done = Adapted(model, spec, kind.name, rows, found, measure.curves, looks)
            if out is not None:
                _keep(done, tokenizer, where, what)
        except BaseException:  # also Ctrl-C: a model that is half changed must not be taken for the original
            swap(model, "native")
            if train == "all":
                model.load_state_dict(before.state_dict())
            raise
    return done


def held_out(lines: list[str]) -> list[str]:
    """Lines that are not trained on: one block in twenty, or the last line; of one line, this line."""
    return [line for number, line in enumerate(lines) if _is_held_out(number, len(lines))] or lines[-1:]


def trained_on(lines: list[str]) -> list[str]:
    """The others."""
    if len(lines) < HELD_OUT:
        return lines[:-1] or lines
    return [line for number, line in enumerate(lines) if not _is_held_out(number, len(lines))]


def _is_held_out(number: int, count: int) -> bool:
    """In blocks where there are lines enough: what is long must be one text here too."""
    block = BLOCK if count >= 2 * HELD_OUT * BLOCK else 1
    return number // block % HELD_OUT == HELD_OUT - 1


def _number(name: str, score: Any) -> float:
    try:
        return float(score)
    except (TypeError, ValueError):
        raise TypeError(f"the score {name} must be a number, got {score!r}") from None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _weights_hash(model: PreTrainedModel) -> str:
    """Of every number of a model."""
    found = hashlib.sha256()
    for name, weight in model.state_dict().items():
        found.update(name.encode() + weight.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _measure(
    original: Original, sampler: Sampler, rungs: list[int], tokenizer: Any, scores: Mapping[str, Score]
) -> Measure:
    kind, model = original.kind, original.model
    batches = [
        kind.prepare(to(sampler.batch(max(2, min(ROWS, TOKENS // rung)), rung), model), number)
        for number, rung in enumerate(rungs)
    ]
    outputs = [kind.keep(original.outputs(batch)) for batch in batches]
    ids = sampler.rows(LOOKED_AT, min(64, original.windows.whole)).to(model.device)
    return Measure(kind, batches, outputs, tokenizer, scores, ids)


@contextmanager
def _undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """What the caller had, and Trainer changes: random numbers, what transformers says, the model's mode."""
    import numpy as np
    import transformers

    modes, says = {part: part.training for part in model.modules()}, transformers.utils.logging.get_verbosity()
    states = random.getstate(), np.random.get_state()
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            transformers.utils.logging.set_verbosity(says)
            for part in model.modules():  # a scheme that is new, as the model
                part.training = modes.get(part, modes[model])


@contextmanager
def _folder(out: Path | str | None, what: dict[str, Any]) -> Iterator[Path]:
    """The folder of an adaptation, held by this process; a passing one where none was asked for."""
    if out is None:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)
        return
    where = Path(out)
    run_folder.check(where, FILE)
    with run_folder.held(where):
        if (where / run_folder.DONE).exists():
            raise ValueError(f"the adaptation in {where} is done; open it with locant.load, or name a new folder")
        there = files.read_json(where / FILE) if (where / FILE).exists() else {}
        if "steps" in there:  # before that nothing is lost
            other = [f"{key}: {there.get(key)!r} there, {value!r} now" for key, value in what.items()
                     if there.get(key) != value]  # fmt: skip
            if other:
                raise ValueError(f"{where} holds another adaptation ({'; '.join(other)}); name a new folder")
            what["steps"] = there["steps"]
        files.write_json(where / FILE, what)
        yield where


def _steps(
    where: Path, what: dict[str, Any], wanted: Budget, took: float, pace: Callable[[], tuple[float, float]]
) -> int:
    """Steps of a training: as many as fit into what is left of the time, found once and written down."""
    if "steps" not in what:
        what["steps"] = wanted.steps
        if wanted.seconds is not None:
            step, look = pace()
            left = wanted.seconds - took
            what["steps"] = max(1, int(left / (step + look / EVERY)), int((left - LOOKS * look) / step))
        files.write_json(where / FILE, what)
    return int(what["steps"])


def _pace(
    model: PreTrainedModel, original: Original, measure: Measure, lines: list[str], rungs: list[int]
) -> tuple[float, float]:
    """Seconds of a step, and of a look at how near the model is."""
    start = time.perf_counter()
    agree(measure.kind, measure.outputs, model, measure.batches)
    look = time.perf_counter() - start
    sampler = Sampler(measure.tokenizer, trained_on(lines))
    return seconds_of_a_step(model, original, sampler, rungs), look


def _rotates(model: PreTrainedModel) -> bool:
    """Whether positions are inside the content product, which then means little without them: queries are turned too.

    Where they are in a table, that makes for a better start and for no better end.
    """
    layers = [scheme for stack in native(model).stacks for scheme in stack.layers or []]
    return any(type(scheme).rotate is not Scheme.rotate for scheme in layers)


@contextmanager
def _only(model: PreTrainedModel, train: str) -> Iterator[bool]:
    """What is to be trained wants a gradient, and nothing else; whether there is anything."""
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
    stacks = native(model).stacks
    schemes = [scheme for stack in stacks for scheme in [stack.embed, *(stack.layers or [])] if scheme is not None]
    return sum(weight.numel() for weight in {w for scheme in schemes for w in scheme.parameters()})


def _keep(done: Adapted, tokenizer: Any, where: Path, what: dict[str, Any]) -> None:
    done.model.save_pretrained(where)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.model_max_length = getattr(done.model.config, "max_position_embeddings", ANY_LENGTH)
    tokenizer.save_pretrained(where)
    table = [vars(row) for row in done.rows]
    heads = [{**vars(head), "explained": head.explained} for head in done.fit.heads]
    files.write_json(where / FILE, {**what, "table": table, "heads": heads})
    files.write(where / "README.md", card.card(done, what))
    files.write(where / run_folder.DONE, datetime.now(timezone.utc).isoformat(timespec="seconds") + "\n")
    for checkpoint in where.glob("checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)
