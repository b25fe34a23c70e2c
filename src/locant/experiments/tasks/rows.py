"""Tokenised texts as rows of a table on disk, for fine-tuning tasks.

Rows are as long as their text. A batch is padded on the right to its longest row.

datasets and tokenizers are optional and take seconds to import: the functions that need them import them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from locant.experiments.tasks.task import TOKENS_AT_ONCE, order

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INPUTS = ("input_ids", "token_type_ids")
"""Columns that go to the model; the attention mask follows from their lengths."""
GROUP = 8
"""Training batches whose examples are sorted by length together. At 8 a sixth of GLUE's tokens or less is padding."""


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of a table, in a given order."""

    def __init__(self, table: Any, order: Tensor) -> None:
        self.table, self.order = table.with_format("numpy"), order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        row = self.table[int(self.order[number])]
        return {name: torch.as_tensor(value) for name, value in row.items()}


def training_rows(table: Any, count: int, batch: int, seed: int) -> Rows:
    """Returns `count` rows of a table in training order; the rows of a batch have similar lengths.

    Every row comes once per epoch. The examples of GROUP batches of an epoch are sorted by length and cut into batches,
    which are shuffled. Row n depends on seed, batch and n alone.
    """
    lengths = torch.tensor([len(ids) for ids in table["input_ids"]])
    rows, batches = len(table), -(-count // batch) + GROUP  # more than needed: the last group is whole, too
    chosen = order(batches * batch, rows, seed).view(batches, batch)
    generator = torch.Generator().manual_seed(seed)
    found, at = [], 0
    while at * batch < count:
        whole = (rows - at * batch % rows) // batch  # batches until the epoch ends
        group = chosen[at : at + max(1, min(GROUP, whole))]
        if whole:  # else a batch that spans two epochs stands alone
            together = group.flatten()
            group = together[lengths[together].argsort(stable=True)].view_as(group)
        found.append(group[torch.randperm(len(group), generator=generator)])
        at += len(group)
    return Rows(table, torch.cat(found).flatten()[:count])


def write_rows(
    path: Path, texts: dict[str, list[Any]], encode: Callable[[dict[str, list[Any]]], dict[str, Any]]
) -> int:
    """Tokenises texts in batches into the table of one file, and returns the number of rows."""
    from datasets import Dataset as Table

    # datasets replaces the file atomically. With this fingerprint it does not have to hash the tokenizer.
    made = Table.from_dict(texts).map(
        encode,
        batched=True,
        remove_columns=list(texts),
        cache_file_name=str(path),
        load_from_cache_file=False,
        new_fingerprint=path.stem,
    )
    return len(made)


def open_rows(path: Path) -> Any:
    """Returns the table of one file, mapped into memory."""
    from datasets import Dataset as Table

    return Table.from_file(str(path))


def small(rows: Iterable[Sequence[int]]) -> list[Any]:
    """Returns lists of token numbers as 32-bit arrays: half the size."""
    return [numpy.asarray(row, dtype=numpy.int32) for row in rows]


def spread(count: int, most: int) -> list[int]:
    """Returns the numbers of at most `most` of `count` rows, evenly spaced; 0 for all."""
    return [at * count // most for at in range(most)] if 0 < most < count else list(range(count))


def fit(tokenizer: PreTrainedTokenizerBase) -> None:
    """Prepares a tokenizer for two texts per input and for padded batches.

    A tokenizer without special tokens around texts (of a model trained here, or of a causal one) gets its end token
    before, between and after them. Heads read the first or the last token, and the two texts need a separator.
    """
    end: Any = tokenizer.eos_token
    if tokenizer.num_special_tokens_to_add(pair=True) == 0:
        from tokenizers.processors import TemplateProcessing

        if end is None:
            raise ValueError("the tokenizer of the model has no end token and no other separator for two texts")
        backend: Any = tokenizer.backend_tokenizer
        backend.post_processor = TemplateProcessing(
            single=f"{end} $A {end}",
            pair=f"{end} $A {end} $B {end}",
            special_tokens=[(end, tokenizer.convert_tokens_to_ids(end))],
        )
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    if tokenizer.pad_token is None:
        if end is None:
            raise ValueError("the tokenizer of the model has neither a padding token nor an end token to pad with")
        tokenizer.pad_token = end


def pad(tokenizer: PreTrainedTokenizerBase, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Returns rows of different lengths as one batch, with the attention mask."""
    inputs = [{name: row[name] for name in INPUTS if name in row} for row in rows]
    padded = tokenizer.pad(inputs, padding_side="right", return_attention_mask=True, return_tensors="pt")
    return {name: value.long() for name, value in padded.items()}


def batches(table: Any) -> Iterator[tuple[list[int], list[dict[str, Any]]]]:
    """Yields all rows in batches, with their numbers. Rows of similar length are together, so little is padding."""
    lengths = [len(ids) for ids in table["input_ids"]]
    numbers = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    at = 0
    while at < len(numbers):
        some = numbers[at : at + max(1, TOKENS_AT_ONCE // lengths[numbers[at]])]
        columns = table[some]
        yield some, [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        at += len(some)
