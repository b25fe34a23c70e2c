"""Short self-distillation: trains a swapped model to match its original on unlabelled text, with transformers' Trainer.

The original is frozen. If only the scheme is trained, the original shares all other weights with the changed model, so
memory holds one copy.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from locant.adaptation.agreement import Agreement, mean_agreement
from locant.adaptation.batch import Batch, to_device
from locant.adaptation.preconditioning import ScaledAdamW, Scales, parameter_scales
from locant.adaptation.sample import Sampler
from locant.adaptation.windows import Tensors, Windows
from locant.hf.modes import cache_kept
from locant.hf.saving import in_words
from locant.hf.trackers import report_last
from locant.runs import files, run_folder

TOKENS = 1024
"""Tokens per training step."""
SCHEME_RATE = 5e-3
"""Learning rate of scheme parameters, in units of their scale."""
EVALUATIONS = 10
"""Approximate number of evaluations of agreement in one training, each with a checkpoint."""
EVERY = 10
"""Minimum number of steps between two evaluations. One evaluation costs about three steps."""
PATIENCE = 4
"""Training stops after this many evaluations without a better agreement."""


def frozen_copy(model: PreTrainedModel, *, shared: bool) -> PreTrainedModel:
    """Returns a copy of the model in eval mode; with `shared` its weights are those of the model."""
    memo: dict[int, Any] = {id(weight): weight for weight in model.parameters()} if shared else {}
    kept: PreTrainedModel = copy.deepcopy(model, memo).eval()
    if not shared:
        kept.requires_grad_(False)
    return kept


class Teacher:
    """The frozen original, which reads long texts in windows."""

    def __init__(self, model: PreTrainedModel, kind: Agreement, windows: Windows) -> None:
        self.model, self.kind, self.windows = model, kind, windows

    @torch.no_grad()
    def outputs(self, batch: Batch) -> Tensor:
        """Returns the outputs that agreement compares, [B, L, …]."""
        (found,) = self.windows.read(lambda short: (self.kind.outputs(self.model, short),), batch)
        return found

    @torch.no_grad()
    def loss_inputs(self, batch: Batch) -> Tensors:
        """Returns the tensors that the loss compares."""
        positions = self.kind.kl_positions(batch)
        if self.windows.fits(batch):
            return self.kind.loss_inputs(self.model, batch, positions)
        first, *rest = self.windows.read(lambda short: self.kind.loss_inputs(self.model, short, None), batch)
        return first if positions is None else first[:, positions], *rest


class TrainingBatches(Dataset[Batch]):
    """The batch of every step: a random length for each, and about `TOKENS` tokens."""

    def __init__(self, sampler: Sampler, kind: Agreement, lengths: list[int], steps: int, seed: int) -> None:
        order = torch.Generator().manual_seed(seed)
        chosen = [lengths[int(number)] for number in torch.randint(len(lengths), (steps,), generator=order)]
        self.batches = [
            kind.prepare(sampler.batch(max(1, TOKENS // length), length), seed + number)
            for number, length in enumerate(chosen)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Batch:
        return self.batches[number]


@dataclass(frozen=True)
class AgreementAtStep:
    """One evaluation during training: the agreement with the original after some steps."""

    step: int
    agreement: float
    seconds: float


def seconds_per_step(student: PreTrainedModel, teacher: Teacher, sampler: Sampler, lengths: list[int]) -> float:
    """Measures the time of a training step, as the mean over lengths; changes no weights.

    It runs three steps: one to warm up, one of the shortest and one of the longest sequences. The time per token grows
    linearly with the length of a sequence, so the others follow from these two.
    """
    groups, scales = _parameter_groups(student, 0.0)
    optimizer = ScaledAdamW([{**group, "lr": 0.0} for group in groups], scales)
    per_token = []
    for length in (lengths[0], lengths[0], lengths[-1]):
        start = time.perf_counter()
        batch = to_device(teacher.kind.prepare(sampler.batch(max(1, TOKENS // length), length), 0), student)
        loss = _loss(student, teacher, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for a GPU
        per_token.append((time.perf_counter() - start) / max(TOKENS, length))
    _, short, long = per_token
    slope = (long - short) / (lengths[-1] - lengths[0]) if len(lengths) > 1 else 0.0
    return sum((short + slope * (length - lengths[0])) * max(TOKENS, length) for length in lengths) / len(lengths)


def distill(
    student: PreTrainedModel,
    teacher: Teacher,
    training: TrainingBatches,
    held_out: tuple[list[Batch], list[Tensor]],
    *,
    out: Path,
    keep: bool,
    seed: int,
    report_to: tuple[str, ...] = (),
    on_evaluation: Callable[[AgreementAtStep], None] = lambda found: None,
) -> list[AgreementAtStep]:
    """Trains the parameters of `student` that require a gradient, and returns all evaluations.

    held_out   batches for evaluation, and the reduced outputs of the original for them.
    out        the folder of metrics and checkpoints. If it has a checkpoint, training resumes from it.
    keep       whether to write checkpoints.
    report_to  trackers that the Trainer reports loss and agreement to.
    on_evaluation
               called with each evaluation.
    """
    out.mkdir(parents=True, exist_ok=True)
    last = run_folder.last_checkpoint(out)
    run_folder.rewind(out / run_folder.METRICS, 0 if last is None else int(last.name.rpartition("-")[2]))
    evaluations = _Evaluations(student, teacher.kind, held_out, out, len(training), on_evaluation)
    batches: Dataset[Batch] = training
    if evaluations.stalled:  # an earlier process stopped early and was killed after that
        # Trainer does one step before it finds that none are left, so the data must end there too.
        evaluations.steps = evaluations.found[-1].step
        batches = Subset(training, range(evaluations.steps))
    # Scales are those of the fitted model, also if training resumes from a checkpoint.
    optimizer = ScaledAdamW(*_parameter_groups(student, teacher.kind.learning_rate))
    with cache_kept(student):
        trainer = _Distiller(
            teacher,
            optimizer,
            model=student,
            args=_arguments(student, teacher.kind.learning_rate, evaluations, report_to, keep=keep, seed=seed),
            train_dataset=batches,
            data_collator=lambda batches: batches[0],
            callbacks=[evaluations],
        )
        trainer.remove_callback(PrinterCallback)
        report_last(trainer)
        with in_words(out):
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
    student.eval()
    return evaluations.found


class _Evaluations(TrainerCallback):
    """Measures agreement during training, writes it to the metrics, and stops a training that no longer improves."""

    def __init__(
        self,
        student: PreTrainedModel,
        kind: Agreement,
        held_out: tuple[list[Batch], list[Tensor]],
        out: Path,
        steps: int,
        on_evaluation: Callable[[AgreementAtStep], None],
    ) -> None:
        self.student, self.kind, self.held_out, self.out, self.on_evaluation = (
            student,
            kind,
            held_out,
            out,
            on_evaluation,
        )
        self.steps, self.every = steps, max(EVERY, steps // EVALUATIONS)
        lines = run_folder.metrics(out / run_folder.METRICS)
        self.found = [AgreementAtStep(line["step"], line["agreement"], line["seconds"]) for line in lines]
        self.began = time.perf_counter() - (self.found[-1].seconds if self.found else 0.0)

    @property
    def stalled(self) -> bool:
        """Whether the best of the evaluations is `PATIENCE` or more evaluations back."""
        best = max(range(len(self.found)), key=lambda at: self.found[at].agreement, default=0)
        return len(self.found) - 1 - best >= PATIENCE

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Adds the agreement to what trackers get."""
        if logs is not None and self.found:
            logs["agreement"] = self.found[-1].agreement

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run_folder.mark_checkpoint(self.out, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every and state.global_step < self.steps:
            return
        batches, outputs = self.held_out
        agreement = mean_agreement(self.kind, outputs, self.student, batches)
        found = AgreementAtStep(state.global_step, agreement, time.perf_counter() - self.began)
        self.found.append(found)
        files.append(self.out / run_folder.METRICS, {"kind": "step", **vars(found)})
        self.on_evaluation(found)
        if self.stalled:
            control.should_training_stop = True


class _Distiller(Trainer):
    """Trainer with the loss against a teacher, and an optimizer that exists already."""

    def __init__(self, teacher: Teacher, optimizer: ScaledAdamW, **options: Any) -> None:
        super().__init__(**options)
        self.teacher, self.scaled_optimizer = teacher, optimizer

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            self.optimizer = self.scaled_optimizer
        return self.optimizer

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        model.eval()  # the original has no dropout either
        return _loss(model, self.teacher, inputs)


def _arguments(
    student: PreTrainedModel, learning_rate: float, evaluations: _Evaluations, report_to: tuple[str, ...], *,
    keep: bool, seed: int,
) -> TrainingArguments:  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(evaluations.out),
        max_steps=evaluations.steps,
        per_device_train_batch_size=1,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=evaluations.steps // 10,
        max_grad_norm=1.0,  # gradients are nearly always longer, so short and long sequences get the same weight
        train_sampling_strategy="sequential",
        seed=seed,
        logging_strategy="steps" if report_to else "no",
        logging_steps=evaluations.every,
        save_strategy="steps" if keep else "no",
        save_steps=evaluations.every,
        report_to=list(report_to) or "none",
        disable_tqdm=True,
        log_level="error",
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=student.device.type == "cpu",
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # one process, one GPU
    return arguments


def _loss(student: PreTrainedModel, teacher: Teacher, batch: Batch) -> Tensor:
    kind = teacher.kind
    return kind.loss(teacher.loss_inputs(batch), kind.loss_inputs(student, batch, kind.kl_positions(batch)), batch)


def _parameter_groups(student: PreTrainedModel, rate: float) -> tuple[list[dict[str, Any]], Scales]:
    """The groups of an optimizer, scheme parameters first, and the scales of the scheme parameters."""
    scales = parameter_scales(student)
    rest = [weight for weight in student.parameters() if weight.requires_grad and weight not in scales]
    groups: list[dict[str, Any]] = [{"params": list(scales), "lr": SCHEME_RATE}, {"params": rest, "lr": rate}]
    return [group for group in groups if group["params"]], scales
