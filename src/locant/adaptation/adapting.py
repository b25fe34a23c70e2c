"""`adapt`: fits a new scheme to a trained model, then distills the model from its original.

Four states of the model are measured: original, silenced (without positions), fitted, adapted.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from locant.adaptation import checks, output_folder, sample, schedule
from locant.adaptation.agreement import Agreement, StateAgreement, agreement_for
from locant.adaptation.by_length import rows_by_length
from locant.adaptation.contrast import Contrast, Contrasted, Documents, contrast_stage, held_out_documents
from locant.adaptation.distillation import Teacher, TrainingBatches, distill, frozen_copy, seconds_per_step
from locant.adaptation.evaluator import Evaluator
from locant.adaptation.fit_record import keep_fit, kept_fit
from locant.adaptation.fitting import LENGTH as FIT_LENGTH
from locant.adaptation.fitting import Fit, fit
from locant.adaptation.output_folder import OutputFolder
from locant.adaptation.part import Part, part_of
from locant.adaptation.result import Adapted
from locant.adaptation.running_text import RunningText
from locant.adaptation.sample import Sampler, Text
from locant.adaptation.schedule import FEW, Pace
from locant.adaptation.scores import LongEmbed, Score
from locant.adaptation.silencing import silenced
from locant.adaptation.training import AgreementAtStep
from locant.adaptation.windows import Windows
from locant.hf import trackers
from locant.hf.plan import plan_of
from locant.hf.readout import native
from locant.hf.sentence_folder import SentenceFolder, sentence_folder
from locant.hf.swapping import exchange
from locant.runs.budget import Budget
from locant.runs.float32_products import fast_products

LENGTH = 256
"""Tokens of the longest training sequences."""
WINDOW = 128
"""Tokens of the windows in which the original of an encoder reads longer texts, if no folder of sentence-transformers
says what its authors let it read. Few encoders were trained on much longer texts, and outputs for those are worse.
A causal original reads windows as long as it can."""
CAUSAL_LENGTH = 256
"""Tokens of the shortest training sequences of a causal model, and of those it is fitted on. Its outputs for a shorter
sequence are the first outputs for a longer one."""
FIT_SHARE = 1 / 3
"""The part of a time budget that the fit may take."""
HELD_OUT = 20
"""One block of lines in this many is held out to measure agreement."""
BLOCK = 16
"""Lines per block, so that long held-out sequences are one text too."""


@fast_products()
def adapt(
    model: PreTrainedModel,
    spec: str,
    text: Text,
    *,
    budget: str = "10min", contrast: str | None = None, train: str = "all", tokenizer: Any = None,
    out: Path | str | None = None, scores: Mapping[str, Score] | None = None,
    length: int = LENGTH, seed: int = 0, pooling: str | None = None, report_to: str | Sequence[str] = (),
    on_stage: Callable[[str], None] = lambda stage: None,
    on_evaluation: Callable[[AgreementAtStep, int], None] = lambda found, steps: None,
    on_result: Callable[[Adapted], None] = lambda done: None,
) -> Adapted:  # fmt: skip
    """Gives a model another position scheme, in place, and trains it to match its original outputs.

    text      unlabelled prose: a string, a list of strings, or a pathlib.Path of a file or folder.
    budget    time or steps: 10min, 90s, 500steps. Time covers fitting and training, not measuring (schedule.py).
    contrast  time or steps of a second training, of encoders that make one vector per text (contrast.py).
    train     "scheme": the parameters of the scheme alone; "all": every weight.
    out       a folder for the model. After an interruption, pass it again to resume.
    scores    tasks by name, each a function of a model (or encoder) and its tokenizer, measured in each state of it.
    length    tokens of the longest training sequences. The original reads texts that are too long for it in windows
              (windows.py), and the adapted model is trained to match those outputs.
    pooling   how an encoder makes one vector of a text: mean, cls, lasttoken, … (pooling.py). By default as
              modules.json in the folder of the model (`model.name_or_path`) says; by the mean if there is none.
    report_to trackers that transformers' Trainer reports to: tensorboard, wandb, ….
    on_stage  called with the name of each stage.
    on_evaluation
              called with each evaluation during training, and the number of all steps.
    on_result called with the result before `out` is marked as done. If the process is killed in it, the next one
              calls it again.

    Of an encoder-decoder only the encoder is changed (part.py). If it fails or is interrupted, the model is restored.
    """
    checks.check_train(train)
    wanted, second = Budget.parse(budget), None if contrast is None else Budget.parse(contrast)
    checks.check_model(model, spec)
    checks.check_numbers(length, seed)
    reported = trackers.checked(report_to)
    tokenizer, lines = sample.tokenizer_of(model, tokenizer), sample.pieces(text)
    source = sentence_folder(model.name_or_path or "")
    checks.check_scores(model, scores or {}, source)
    with _caller_state_kept(model):
        part = part_of(model)
        checks.check_vocabulary(part.model, tokenizer, lines)
        causal = sample.is_causal(part.model, tokenizer, lines)
        kind = agreement_for(part.model, tokenizer, causal=causal, source=source, pooling=pooling)
        if second is not None:
            checks.check_contrast(part.model, kind, causal=causal)
        _try(part, spec)
    documents = None if second is None else held_out_documents(tokenizer, held_out(lines), length, seed)
    settings = {"spec": spec, "model": model.name_or_path, "budget": budget, "contrast": contrast, "train": train,
        "length": length, "seed": seed, "pooling": _pooling(kind), **_identity(part, tokenizer, lines)}  # fmt: skip
    with output_folder.opened(out, settings) as folder, _caller_state_kept(model):
        original = frozen_copy(part.model, shared=train == "scheme")
        with _restored_on_failure(part, original, train):
            windows = _windows(tokenizer, sample.longest(part.model, length), source, causal=causal)
            lengths = sample.ladder(length, CAUSAL_LENGTH if causal and not kind.short_texts else sample.SHORTEST)
            stages = _Stages(part, spec, lines, tokenizer, train, seed, Teacher(original, kind, windows), lengths,
                             folder, source, reported, on_stage, on_evaluation, on_result, documents)  # fmt: skip
            return stages.run(wanted, second, scores or {})


def _try(part: Part, spec: str) -> None:
    """Swaps a model and back: a wrong scheme raises before anything takes time."""
    try:
        exchange(part.model, spec)
    finally:
        part.restore()


@contextmanager
def _restored_on_failure(part: Part, original: PreTrainedModel, train: str) -> Iterator[None]:
    """Puts the positions and weights of a model back if anything is raised, KeyboardInterrupt included.

    A partly changed model must not pass for the original.
    """
    try:
        yield
    except BaseException:
        part.restore()
        if train == "all":
            part.model.load_state_dict(original.state_dict())
        raise


def _windows(tokenizer: Any, readable: int, source: SentenceFolder | None, *, causal: bool) -> Windows:
    """How an original that can read `readable` tokens reads texts of any length."""
    # New folders of sentence-transformers leave the length to the tokenizer.
    stated = WINDOW if source is None else source.max_seq_length or tokenizer.model_max_length
    window = readable if causal else min(readable, stated)
    return Windows(tokenizer, window, causal=causal, whole=readable)


@dataclass
class _Stages:
    """The stages of an adaptation, with the inputs that they share."""

    part: Part
    spec: str
    lines: list[str]
    tokenizer: Any
    train: str
    seed: int
    teacher: Teacher
    lengths: list[int]
    folder: OutputFolder
    source: SentenceFolder | None
    report_to: tuple[str, ...]
    on_stage: Callable[[str], None]
    on_evaluation: Callable[[AgreementAtStep, int], None]
    on_result: Callable[[Adapted], None]
    documents: Documents | None  # held-out ones, for the contrastive stage

    @property
    def model(self) -> PreTrainedModel:
        return self.part.model

    def run(self, budget: Budget, contrast: Budget | None, scores: Mapping[str, Score]) -> Adapted:
        sampler = Sampler(self.tokenizer, held_out(self.lines), seed=self.seed)
        evaluator = Evaluator.create(self.teacher, sampler, self.lengths, scores)
        if self.part.notice is not None:
            self.on_stage("encoder alone: the decoder keeps its own positions")
        if self.folder.settings["pooling"] is not None:
            self.on_stage(f"pooling: {self.folder.settings['pooling']}")
        given = self.folder.settings["budget"]
        pace = self.pace(evaluator) if budget.seconds is not None and not self.folder.resumed else None
        states = "four" if contrast is None else "five"
        self.on_stage(schedule.before_fit(given, pace, evaluator.seconds, len(scores), states))
        self.on_stage("measuring the original")
        rows = [evaluator.row("original", self.teacher.model, agreement=1.0)]
        with silenced(self.model, self.teacher.windows.whole):
            self.on_stage("measuring the model without positions")
            rows.append(evaluator.row("silenced", self.model))
        start = time.perf_counter()
        found = self.fit(budget)
        fit_seconds = time.perf_counter() - start
        rows.append(evaluator.row("fitted", self.model))
        steps, notices = self.steps(budget, pace, fit_seconds)
        evaluations = self.distill(evaluator, steps) if steps else []
        if evaluations:  # the last one was made at the end
            rows.append(evaluator.row("adapted", self.model, agreement=evaluations[-1].agreement))
        contrasted, more = (None, []) if contrast is None else self.contrast(evaluator, contrast)
        if contrasted is not None and contrasted.kept.step:
            rows.append(evaluator.row("contrasted", self.model))
        lengths = rows_by_length(self.model, self.teacher, evaluator.batches, evaluator.outputs)
        self.part.join()
        kind = self.teacher.kind.name if self.part.notice is None else f"{self.teacher.kind.name}, encoder alone"
        readings = [each for score in scores.values() if isinstance(score, LongEmbed) for each in score.readings]
        done = Adapted(self.part.whole, self.spec, kind, rows, found.of_part(self.part), evaluator.curves, evaluations,
                       [*notices, *more], lengths, readings, contrasted)  # fmt: skip
        if self.folder.kept:
            self.folder.save(done, self.tokenizer, self.source)
        self.on_result(done)
        self.folder.finish()
        return done

    def fit(self, budget: Budget) -> Fit:
        """Fits the model; a resumed adaptation reads the fit that its folder has."""
        found = kept_fit(self.folder.path, self.model, self.spec) if self.folder.resumed else None
        if found is not None:
            return found
        found = fit(
            self.model,
            self.spec,
            trained_on(self.lines),
            tokenizer=self.tokenizer,
            seed=self.seed,
            on_stage=self.on_stage,
            length=CAUSAL_LENGTH if self.teacher.windows.causal else FIT_LENGTH,
            queries=self.train == "all" and _rotates(self.model),
            seconds=None if budget.seconds is None else FIT_SHARE * budget.seconds,
        )
        if self.folder.kept:
            keep_fit(self.folder.path, found, self.teacher.model)
        return found

    def steps(self, budget: Budget, pace: Pace | None, fit_seconds: float) -> tuple[int, list[str]]:
        """Returns the number of training steps, and notices if the model is fitted only."""
        with _only_trained(self.part, self.train) as anything:
            if not anything:
                return 0, [f"the model is fitted only: {self.spec} has no parameters to train"]
        given, steps = self.folder.settings["budget"], self.folder.steps(budget, pace, fit_seconds)
        if pace is not None and steps:
            self.on_stage(schedule.after_fit(given, fit_seconds, steps))
        if pace is not None and not steps:
            return 0, [schedule.too_few(given, pace, fit_seconds)]
        few = f"{steps} {'step is' if steps == 1 else 'steps are'} too few to adapt a model: take it as fitted only"
        return steps, [few] if steps < FEW else []

    def distill(self, evaluator: Evaluator, steps: int) -> list[AgreementAtStep]:
        with _only_trained(self.part, self.train):
            sampler = Sampler(self.tokenizer, trained_on(self.lines), seed=self.seed + 1)
            self.on_stage("training")
            return distill(
                self.model,
                self.teacher,
                TrainingBatches(sampler, self.teacher.kind, self.lengths, steps, self.seed),
                (evaluator.batches, evaluator.outputs),
                out=self.folder.path,
                keep=self.folder.kept,
                seed=self.seed,
                report_to=self.report_to,
                on_evaluation=lambda found: self.on_evaluation(found, steps),
            )

    def contrast(self, evaluator: Evaluator, budget: Budget) -> tuple[Contrasted | None, list[str]]:
        """Runs the contrastive stage; returns its result, and notices if it changed nothing."""
        assert self.documents is not None
        given, whole, notices = self.folder.settings["contrast"], self.teacher.windows.whole, list[str]()
        lines = trained_on(self.lines)
        # Longer texts have no better teacher than windows, which this stage is to surpass.
        short = [at for at, length in enumerate(self.lengths) if length <= whole] or [0]
        held_out = [evaluator.batches[at] for at in short], [evaluator.outputs[at] for at in short]

        def sequences(steps: int) -> TrainingBatches:
            sampler, lengths = Sampler(self.tokenizer, lines, seed=self.seed + 2), [self.lengths[at] for at in short]
            return TrainingBatches(sampler, self.teacher.kind, lengths, steps, self.seed + 1)

        def on_pace(pace: Pace, steps: int) -> None:
            if not steps:
                notices.append(schedule.too_few_to_contrast(given, pace))
            self.on_stage(schedule.before_contrast(given, pace, steps))

        with _only_trained(self.part, self.train) as anything:
            if not anything:
                return None, [f"there was no contrastive stage: {self.spec} has no parameters to train"]
            self.on_stage("contrast")
            found = contrast_stage(
                self.model,
                Contrast(self.teacher, self.documents, held_out),
                RunningText(self.tokenizer, lines, self.lengths[-1]),
                sequences,
                steps=lambda pace: self.folder.contrast_steps(budget, pace, on_pace),
                out=self.folder.contrast,
                keep=self.folder.kept,
                seed=self.seed,
                report_to=self.report_to,
                on_evaluation=self.on_evaluation,
            )
        return found, notices if found is None else found.notices

    def pace(self, evaluator: Evaluator) -> Pace | None:
        """Times a training step, with the scheme as it is before the fit; None if there is nothing to train."""
        self.on_stage("timing a step")
        start = time.perf_counter()
        sampler = Sampler(self.tokenizer, trained_on(self.lines))
        with torch.random.fork_rng(devices=[]):
            exchange(self.model, self.spec)
            try:
                with _only_trained(self.part, self.train) as anything:
                    if not anything:
                        return None
                    step = seconds_per_step(self.model, self.teacher, sampler, self.lengths)
            finally:
                self.part.restore()
        return Pace(step, evaluator.seconds, time.perf_counter() - start)


def held_out(lines: list[str]) -> list[str]:
    """Returns the lines that measure agreement: one block in twenty.

    The last line if there are fewer than twenty; if there is only one, that line.
    """
    return [line for number, line in enumerate(lines) if _is_held_out(number, len(lines))] or lines[-1:]


def trained_on(lines: list[str]) -> list[str]:
    """Returns the lines that are not held out."""
    if len(lines) < HELD_OUT:
        return lines[:-1] or lines
    return [line for number, line in enumerate(lines) if not _is_held_out(number, len(lines))]


def _is_held_out(number: int, count: int) -> bool:
    block = BLOCK if count >= 2 * HELD_OUT * BLOCK else 1
    return number // block % HELD_OUT == HELD_OUT - 1


def _pooling(kind: Agreement) -> str | None:
    """How vectors are made, and who said so; None if the model is compared by its predictions."""
    if type(kind) is not StateAgreement:
        return None
    return f"{kind.pooling} ({kind.pooling.origin})"


def _identity(part: Part, tokenizer: Any, lines: list[str]) -> dict[str, Any]:
    """What an interrupted adaptation is recognized by: hashes of its text, weights and tokens."""
    tokens = tokenizer(lines[:100], verbose=False)["input_ids"]
    encoder = {} if part.notice is None else {"part": "encoder"}
    return {"lines": len(lines), "text": _hash("\n".join(lines)), "weights": _weights_hash(part.whole),
            "tokens": _hash(str(tokens)), **encoder}  # fmt: skip


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _weights_hash(model: PreTrainedModel) -> str:
    """A hash of all weights and their names."""
    found = hashlib.sha256()
    for name, weight in model.state_dict().items():
        found.update(name.encode() + weight.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


@contextmanager
def _caller_state_kept(model: PreTrainedModel) -> Iterator[None]:
    """Restores the state that Trainer changes: random numbers, the log level of transformers, train or eval modes."""
    modes, verbosity = {part: part.training for part in model.modules()}, transformers.utils.logging.get_verbosity()
    states = random.getstate(), np.random.get_state()
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            transformers.utils.logging.set_verbosity(verbosity)
            for part in model.modules():  # a new scheme gets the mode of the model
                part.training = modes.get(part, modes[model])


def _rotates(model: PreTrainedModel) -> bool:
    """Whether the model's own positions rotate queries and keys. The fit then has to change the queries too.

    In models with a position table, changing the queries improves the fit but not the adapted model.
    """
    return any(scheme.rotates for stack in native(model).stacks for scheme in stack.layers or [])


@contextmanager
def _only_trained(part: Part, train: str) -> Iterator[bool]:
    """Requires gradients of the weights to train, and of no others; yields whether there are any."""
    plan = plan_of(part.model)
    assert plan is not None
    trained = part.own() if train == "all" else {weight for each in plan.schemes() for weight in each.parameters()}
    before = {parameter: parameter.requires_grad for parameter in part.model.parameters()}
    for parameter in before:
        parameter.requires_grad_(parameter in trained)
    try:
        yield any(parameter.requires_grad for parameter in before)
    finally:
        for parameter, flag in before.items():
            parameter.requires_grad_(flag)
