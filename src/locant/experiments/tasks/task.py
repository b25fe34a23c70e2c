"""The interface of a task: training examples in a fixed order, a head for the model, and a test at several lengths."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from locant.experiments.presets import Preset

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


TOKENS_AT_ONCE = 8192
"""Tokens per test batch, padding included."""


@dataclass(frozen=True)
class Evaluation:
    """The scores of a trained model on test inputs of one length; or `refused`, the reason why it cannot read them."""

    length: int
    values: Mapping[str, float] = field(default_factory=dict)  # by the name of the metric
    by_position: tuple[tuple[int, float], ...] = ()  # first position of a range, mean score over it
    refused: str = ""
    noise: Mapping[str, float] = field(default_factory=dict)  # standard errors over test examples (bootstrap.py)


@dataclass(frozen=True)
class Setting:
    """The arguments that the methods of a task share: sizes, tokenizer, and the folder of the prepared data."""

    preset: Preset
    tokenizer: PreTrainedTokenizerBase
    folder: Path  # `prepare` writes into it, the other methods read from it


class Task(ABC):
    """A task. It has no state: everything comes from its `Setting`, so it is the same in every process."""

    name: str
    metric: str  # name of the score that ranks the schemes
    higher_is_better: bool
    presets: ClassVar[Mapping[str, Preset]]
    auto: ClassVar[str]  # the Auto class of transformers with the task's head
    shape: ClassVar[str]  # default model

    @abstractmethod
    def prepare(self, data: str | None, setting: Setting, count: int) -> str:
        """Reads the data, writes the examples into the folder, and returns a description: "2.1M tokens of …".

        No run reads more than `count` examples. Of a larger data set it may take `count`, evenly spaced.
        """

    @abstractmethod
    def examples(self, setting: Setting, seed: int, count: int) -> Dataset[dict[str, Tensor]]:
        """Returns `count` examples in training order, the same for every scheme.

        Example n depends on `seed` and n alone, so a resumed run reads the same examples as an uninterrupted one.
        """

    @abstractmethod
    def collate(self, setting: Setting, examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the examples as one batch for the model."""

    @abstractmethod
    def evaluate(self, model: PreTrainedModel, setting: Setting) -> Iterator[Evaluation]:
        """Yields the test scores, first at the training length, then at longer ones."""

    def head(self, setting: Setting) -> dict[str, Any]:
        """Returns the config entries that this task needs, such as the number of labels."""
        return {}

    def positions(self, preset: Preset) -> int:
        """Returns the tokens of the longest training example: a model made from scratch has as many positions."""
        return preset.length

    def tokenizer(self, data: str | None, preset: Preset) -> PreTrainedTokenizerBase:
        """Returns the tokenizer of a model made from scratch."""
        raise ValueError(f"{self.name} starts from a trained model; name one, by its folder or hub name")


def order(count: int, rows: int, seed: int) -> Tensor:
    """Returns [count] row numbers: every row once per epoch, each epoch in another order."""
    generator = torch.Generator().manual_seed(seed)
    epochs = [torch.randperm(rows, generator=generator) for _ in range(-(-count // rows))]
    return torch.cat(epochs)[:count]


def longest(model: PreTrainedModel) -> int | None:
    """Returns the longest input that a model can read; None for any length."""
    own: Any = model
    if hasattr(own, "longest_input"):  # a module of the user's own
        return own.longest_input  # type: ignore[no-any-return]
    from locant.hf.facts import limits  # imports transformers, which takes seconds

    return limits(model)[0]


def too_long(model: PreTrainedModel, length: int) -> str:
    """Returns the reason why a model cannot read inputs of this length; empty if it can."""
    limit = longest(model)
    return "" if limit is None or length <= limit else f"its positions end at {limit}"
