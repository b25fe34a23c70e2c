"""What a task is: examples in the order they are trained on, a head for the model, and a test at several lengths."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from locant.experiments.preset import Preset

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


TOKENS_AT_ONCE = 8192
"""Tokens of a test batch, padding included."""


@dataclass(frozen=True)
class Evaluation:
    """What a trained model does on test inputs of one length; `refused` says why where it cannot read them."""

    length: int
    values: Mapping[str, float] = field(default_factory=dict)  # by the name of the metric
    by_position: tuple[tuple[int, float], ...] = ()  # the score over the tokens from this position to the next one
    refused: str = ""


@dataclass(frozen=True)
class Setting:
    """What the methods of a task need to know: sizes, and what the text was prepared with."""

    preset: Preset
    tokenizer: PreTrainedTokenizerBase
    folder: Path  # holds what `prepare` wrote


class Task(ABC):
    """A task. Stateless: what it needs stands in its `Setting`, so that a run in another process does the same."""

    name: str
    metric: str  # the score that schemes are ranked by
    higher_is_better: bool
    presets: ClassVar[Mapping[str, Preset]]
    auto: ClassVar[str]  # the class of transformers that has the task's head
    shape: ClassVar[str]  # of the model where none is named

    @abstractmethod
    def prepare(self, data: str | None, setting: Setting, count: int) -> str:
        """Reads `--data`, writes what runs need into the folder, and says what it is: "2.1M tokens of …".

        No run sees more than `count` examples: where there are more, as many, from all over, are enough.
        """

    @abstractmethod
    def examples(self, setting: Setting, seed: int, count: int) -> Dataset[dict[str, Tensor]]:
        """`count` examples in the order they are trained on, the same for every scheme.

        Example n depends on `seed` and n alone: a run that is taken up again in the middle sees what it would have.
        """

    @abstractmethod
    def collate(self, setting: Setting, examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Examples as one batch for the model."""

    @abstractmethod
    def evaluate(self, model: PreTrainedModel, setting: Setting) -> Iterator[Evaluation]:
        """The test, at the length it was trained at first, then at longer ones."""

    def head(self, setting: Setting) -> dict[str, Any]:
        """What the config of a model must say for this task, such as the number of labels."""
        return {}

    def positions(self, preset: Preset) -> int:
        """Tokens of the longest training example: positions that a model made from scratch has."""
        return preset.length

    def tokenizer(self, data: str | None, preset: Preset) -> PreTrainedTokenizerBase:
        """The tokenizer of a model made from scratch."""
        raise ValueError(f"{self.name} starts from a trained model: name one with --model")


def order(count: int, rows: int, seed: int) -> Tensor:
    """[count] numbers of rows: every row once in each round, each round in another order."""
    generator = torch.Generator().manual_seed(seed)
    rounds = [torch.randperm(rows, generator=generator) for _ in range(-(-count // rows))]
    return torch.cat(rounds)[:count]


def longest(model: PreTrainedModel) -> int | None:
    """The longest input that a model reads, None for any."""
    from locant.hf.facts import limits

    return limits(model)[0]


def too_long(model: PreTrainedModel, length: int) -> str:
    """Why a model cannot read inputs of this length; empty where it can."""
    limit = longest(model)
    return "" if limit is None or length <= limit else f"its positions end at {limit}"
