"""A training stage of an adaptation: transformers' Trainer, with evaluations, checkpoints and early stopping.

A stage has a loss and an evaluation. Distillation (distillation.py) and contrast (contrast.py) are stages.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from locant.adaptation.preconditioning import ScaledAdamW, Scales, parameter_scales
from locant.hf.modes import cache_kept
from locant.hf.saving import in_words
from locant.hf.trackers import report_last
from locant.runs import files, run_folder

SCHEME_RATE = 5e-3
"""Learning rate of scheme parameters, in units of their scale."""
EVALUATIONS = 10
"""Approximate number of evaluations in one training, each with a checkpoint."""
EVERY = 10
"""Minimum number of steps between two evaluations. One evaluation costs about three steps."""
PATIENCE = 4
"""Training stops after this many evaluations without a better one."""
BEST = "best.safetensors"
"""The trained weights at the best evaluation, in the folder of a stage that keeps them."""


@dataclass(frozen=True)
class AgreementAtStep:
    """One evaluation during training, after some steps."""

    step: int
    agreement: float  # with the original
    seconds: float
    retrieval: float | None = None  # nDCG@10 of held-out documents, in the contrastive stage


class Stage(ABC):
    """What a training stage minimizes, and how it is evaluated."""

    every = EVERY
    """Minimum number of steps between two evaluations."""
    keeps_best = False
    """Whether the weights at the best evaluation are written to the folder, as BEST."""

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """Of the weights that are no parameters of a scheme."""

    @abstractmethod
    def loss(self, student: PreTrainedModel, batch: Any) -> Tensor:
        """Returns the loss of a batch.

        A stage may add the gradients of a part of its loss to the parameters itself; that part is then a constant.
        """

    @abstractmethod
    def evaluate(self, student: PreTrainedModel) -> dict[str, float]:
        """Returns the measurements of an evaluation: the fields of AgreementAtStep beside step and seconds."""

    def quality(self, found: AgreementAtStep) -> float:
        """Returns the number by which evaluations are compared; more is better."""
        return found.agreement


def train(
    student: PreTrainedModel, stage: Stage, training: Dataset[Any], *, steps: int, out: Path, keep: bool, seed: int,
    report_to: tuple[str, ...] = (), on_evaluation: Callable[[AgreementAtStep], None] = lambda found: None,
) -> list[AgreementAtStep]:  # fmt: skip
    """Trains the parameters of `student` that require a gradient, and returns all evaluations.

    training   the batch of every step.
    out        the folder of metrics and checkpoints. If it has a checkpoint, training resumes from it.
    keep       whether to write checkpoints.
    report_to  trackers that the Trainer reports loss and evaluations to.
    on_evaluation
               called with each evaluation.
    """
    out.mkdir(parents=True, exist_ok=True)
    last = run_folder.last_checkpoint(out)
    run_folder.rewind(out / run_folder.METRICS, 0 if last is None else int(last.name.rpartition("-")[2]))
    evaluations = _Evaluations(student, stage, out, steps, on_evaluation)
    if evaluations.stalled:  # an earlier process stopped early and was killed after that
        # Trainer does one step before it finds that none are left, so the data must end there too.
        evaluations.steps = evaluations.found[-1].step
        training = Subset(training, range(evaluations.steps))
    # Scales are those of the start, also if training resumes from a checkpoint.
    optimizer = ScaledAdamW(*parameter_groups(student, stage.learning_rate))
    with cache_kept(student):
        trainer = _Trainer(
            stage,
            optimizer,
            model=student,
            args=_arguments(student, stage.learning_rate, evaluations, report_to, keep=keep, seed=seed),
            train_dataset=training,
            data_collator=lambda batches: batches[0],
            callbacks=[evaluations],
        )
        trainer.remove_callback(PrinterCallback)
        report_last(trainer)
        with in_words(out):
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
    student.eval()
    return evaluations.found


def seconds_of_step(student: PreTrainedModel, stage: Stage, batch: Any) -> float:
    """Returns the time of one training step; changes no weights."""
    groups, scales = parameter_groups(student, 0.0)
    optimizer = ScaledAdamW([{**group, "lr": 0.0} for group in groups], scales)
    start = time.perf_counter()
    loss = stage.loss(student, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss.item()  # waits for a GPU
    return time.perf_counter() - start


def trained_weights(student: PreTrainedModel) -> dict[str, Tensor]:
    """Returns a copy of the parameters that require a gradient."""
    return {name: weight.detach().clone().contiguous() for name, weight in student.named_parameters()
            if weight.requires_grad}  # fmt: skip


@torch.no_grad()
def set_weights(student: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Copies weights into the parameters of these names."""
    parameters = dict(student.named_parameters())
    for name, weight in weights.items():
        parameters[name].copy_(weight)


def best_weights(out: Path) -> dict[str, Tensor]:
    """Returns the weights at the best evaluation of the stage in a folder."""
    return load_file(out / BEST)


class _Evaluations(TrainerCallback):
    """Evaluates during training, writes the metrics, and stops a training that no longer improves."""

    def __init__(
        self, student: PreTrainedModel, stage: Stage, out: Path, steps: int,
        on_evaluation: Callable[[AgreementAtStep], None],
    ) -> None:  # fmt: skip
        self.student, self.stage, self.out, self.on_evaluation = student, stage, out, on_evaluation
        self.steps, self.every = steps, max(stage.every, steps // EVALUATIONS)
        lines = run_folder.metrics(out / run_folder.METRICS)
        self.found = [AgreementAtStep(**{name: value for name, value in line.items() if name != "kind"})
                      for line in lines]  # fmt: skip
        self.began = time.perf_counter() - (self.found[-1].seconds if self.found else 0.0)

    @property
    def best(self) -> int:
        """Which of the evaluations is the best: the first of equals."""
        return max(range(len(self.found)), key=lambda at: self.stage.quality(self.found[at]), default=0)

    @property
    def stalled(self) -> bool:
        """Whether the best of the evaluations is `PATIENCE` or more evaluations back."""
        return len(self.found) - 1 - self.best >= PATIENCE

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Adds the last evaluation to what trackers get."""
        if logs is not None and self.found:
            logs["agreement"] = self.found[-1].agreement
            if self.found[-1].retrieval is not None:
                logs["retrieval"] = self.found[-1].retrieval

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run_folder.mark_checkpoint(self.out, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every and state.global_step < self.steps:
            return
        measured = self.stage.evaluate(self.student)
        found = AgreementAtStep(step=state.global_step, seconds=time.perf_counter() - self.began, **measured)
        self.found.append(found)
        if self.stage.keeps_best and self.best == len(self.found) - 1:
            # Before the checkpoint of this step: a process that resumes from it will not make this evaluation again.
            with files.replacing(self.out / BEST) as temporary:
                save_file(trained_weights(self.student), temporary)
        entries = {name: value for name, value in vars(found).items() if value is not None}
        files.append(self.out / run_folder.METRICS, {"kind": "step", **entries})
        self.on_evaluation(found)
        if self.stalled:
            control.should_training_stop = True


class _Trainer(Trainer):
    """Trainer with the loss of a stage, and an optimizer that exists already."""

    def __init__(self, stage: Stage, optimizer: ScaledAdamW, **options: Any) -> None:
        super().__init__(**options)
        self.stage, self.scaled_optimizer = stage, optimizer

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            self.optimizer = self.scaled_optimizer
        return self.optimizer

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        model.eval()  # the original has no dropout either
        return self.stage.loss(model, inputs)


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


def parameter_groups(student: PreTrainedModel, rate: float) -> tuple[list[dict[str, Any]], Scales]:
    """Returns the groups of an optimizer, scheme parameters first, and the scales of the scheme parameters."""
    scales = parameter_scales(student)
    rest = [weight for weight in student.parameters() if weight.requires_grad and weight not in scales]
    groups: list[dict[str, Any]] = [{"params": list(scales), "lr": SCHEME_RATE}, {"params": rest, "lr": rate}]
    return [group for group in groups if group["params"]], scales
