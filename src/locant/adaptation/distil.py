"""Short self-distillation: a swapped model learns from what it was, on text without labels, by transformers' Trainer.

The original is frozen. Where only the scheme is trained it shares its weights with the changed model, so that there is
one copy in memory.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from locant.adaptation.agreement import Agreement, Lesson, agree
from locant.adaptation.sample import Sampler
from locant.adaptation.start import units
from locant.adaptation.windows import Batch, Windows
from locant.hf.modes import cache_kept
from locant.runs import files, run_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 1024
"""Tokens of a step."""
SCHEME_RATE = 5e-3
"""Learning rate of a scheme, in the units of `start.unit`."""
LOOKS, EVERY = 10, 10
"""How often the agreement is measured, and a checkpoint written, in a training; but not more often than after so many
steps, three of which a look takes as long as."""
PATIENCE = 4
"""Looks without a better agreement after which there is no use in going on."""


def frozen(model: PreTrainedModel, *, shared: bool) -> PreTrainedModel:
    """The model as it is now; with `shared` its weights are those of the model."""
    memo: dict[int, Any] = {id(weight): weight for weight in model.parameters()} if shared else {}
    kept: PreTrainedModel = copy.deepcopy(model, memo).eval()
    if not shared:
        kept.requires_grad_(False)
    return kept


class Original:
    """What the changed model is held to: the frozen model, which reads long texts in windows."""

    def __init__(self, model: PreTrainedModel, kind: Agreement, windows: Windows) -> None:
        self.model, self.kind, self.windows = model, kind, windows

    @torch.no_grad()
    def outputs(self, batch: Batch) -> Tensor:
        (found,) = self.windows.read(lambda short: (self.kind.outputs(self.model, short),), batch)
        return found

    @torch.no_grad()
    def lesson(self, batch: Batch) -> Lesson:
        places = self.kind.places(batch)
        if self.windows.at_once(batch):
            return self.kind.lesson(self.model, batch, places)
        first, *rest = self.windows.read(lambda short: self.kind.lesson(self.model, short, None), batch)
        return first if places is None else first[:, places], *rest


class Steps(Dataset[Batch]):
    """The batch of every step: all lengths of the ladder in turn, at random, each with as many tokens."""

    def __init__(self, sampler: Sampler, kind: Agreement, rungs: list[int], steps: int, seed: int) -> None:
        order = torch.Generator().manual_seed(seed)
        chosen = [rungs[int(number)] for number in torch.randint(len(rungs), (steps,), generator=order)]
        self.batches = [
            kind.prepare(sampler.batch(max(1, TOKENS // rung), rung), seed + number)
            for number, rung in enumerate(chosen)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Batch:
        return self.batches[number]


class InUnits(torch.optim.AdamW):
    """AdamW in which some parameters move in units of their own: Adam's steps have the size of the learning rate.

    Nothing decays: a curve must not be pulled to zero.
    """

    def __init__(self, groups: list[dict[str, Any]], units: dict[nn.Parameter, Tensor | float]) -> None:
        super().__init__(groups, weight_decay=0.0, fused=True)  # a seventh of the time, also on CPUs
        self.units = units

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        before = {parameter: parameter.clone() for parameter in self.units}
        loss = super().step(closure)
        for parameter, size in self.units.items():
            parameter.copy_(before[parameter] + (parameter - before[parameter]) * size)
        return loss


@dataclass(frozen=True)
class Look:
    """What is seen on the way: after so many steps, how near the model is to the original."""

    step: int
    agreement: float
    seconds: float


def seconds_of_a_step(student: PreTrainedModel, original: Original, sampler: Sampler, rungs: list[int]) -> float:
    """Measured: a step at each length, the second time it is done, with a rate of 0."""
    groups, sizes = _groups(student, 0.0)
    optimizer = InUnits([{**group, "lr": 0.0} for group in groups], sizes)
    total = 0.0
    for rung in rungs:
        for _ in range(2):
            batch = to(original.kind.prepare(sampler.batch(max(1, TOKENS // rung), rung), 0), student)
            start = time.perf_counter()
            loss = _loss(student, original, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()  # waits for a GPU
            took = time.perf_counter() - start
        total += took
    return total / len(rungs)


def distil(
    student: PreTrainedModel,
    original: Original,
    training: Steps,
    held_out: tuple[list[Batch], list[Tensor]],
    *,
    out: Path,
    keep: bool,
    seed: int,
    look: Callable[[Look], None] = lambda found: None,
) -> list[Look]:
    """Trains those parameters of `student` that want a gradient; goes on where it was stopped, if that was kept."""
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments

    kind, steps = original.kind, len(training)
    every = max(EVERY, steps // LOOKS)
    out.mkdir(parents=True, exist_ok=True)
    last = run_folder.last_checkpoint(out)
    run_folder.rewind(out / run_folder.METRICS, 0 if last is None else int(last.name.rpartition("-")[2]))
    looks = [Look(line["step"], line["agreement"], line["seconds"]) for line in files.lines(out / run_folder.METRICS)]
    began = time.perf_counter() - (looks[-1].seconds if looks else 0.0)
    batches: Dataset[Batch] = training
    if _stalled(looks):  # it had stopped, and was killed after that
        steps = looks[-1].step
        batches = Subset(training, range(steps))  # Trainer does a step before it sees that there is none to do

    groups, sizes = _groups(student, kind.rate)  # of the fitted model, also where training goes on from a checkpoint

    class Watch(TrainerCallback):
        """Measures, writes down, stops where nothing gets better."""

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            (out / f"checkpoint-{state.global_step}" / run_folder.WHOLE).touch()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % every and state.global_step < steps:
                return
            measured, outputs = held_out
            found = Look(state.global_step, agree(kind, outputs, student, measured), time.perf_counter() - began)
            looks.append(found)
            files.append(out / run_folder.METRICS, {"kind": "step", **vars(found)})
            look(found)
            if _stalled(looks):
                control.should_training_stop = True

    class Distiller(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                self.optimizer = InUnits(groups, sizes)
            return self.optimizer

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            model.eval()  # the original has no dropout either
            return _loss(model, original, inputs)

    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=kind.rate,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 10,
        max_grad_norm=1.0,  # gradients are nearly always longer: short and long sequences then have the same say
        train_sampling_strategy="sequential",
        seed=seed,
        logging_strategy="no",
        save_strategy="steps" if keep else "no",
        save_steps=every,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=student.device.type == "cpu",
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # one process, one GPU
    with cache_kept(student):
        trainer = Distiller(
            model=student,
            args=arguments,
            train_dataset=batches,
            data_collator=lambda batches: batches[0],
            callbacks=[Watch()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    student.eval()
    return looks


def _stalled(looks: list[Look]) -> bool:
    best = max(range(len(looks)), key=lambda at: looks[at].agreement, default=0)
    return len(looks) - 1 - best >= PATIENCE


def _loss(student: PreTrainedModel, original: Original, batch: Batch) -> Tensor:
    kind = original.kind
    return kind.loss(original.lesson(batch), kind.lesson(student, batch, kind.places(batch)), batch)


def _groups(student: PreTrainedModel, rate: float) -> tuple[list[dict[str, Any]], dict[nn.Parameter, Tensor | float]]:
    sizes = units(student)
    rest = [weight for weight in student.parameters() if weight.requires_grad and weight not in sizes]
    groups: list[dict[str, Any]] = [{"params": list(sizes), "lr": SCHEME_RATE}, {"params": rest, "lr": rate}]
    return [group for group in groups if group["params"]], sizes


def to(batch: Batch, model: PreTrainedModel) -> Batch:
    return {name: value.to(model.device) for name, value in batch.items()}
