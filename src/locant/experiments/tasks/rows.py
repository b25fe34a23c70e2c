"""Tokenised texts as rows of a table on disk: what fine-tuning tasks have in common.

Rows are as long as their text and are padded to the longest one of their batch, to the right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from locant.experiments.tasks.task import TOKENS_AT_ONCE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INPUTS = ("input_ids", "token_type_ids")
"""Columns that a model reads; the attention mask follows from their lengths."""


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of a table, in a given order."""

    def __init__(self, table: Any, order: Tensor) -> None:
        self.table, self.order = table.with_format("numpy"), order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        row = self.table[int(self.order[number])]
        return {name: torch.as_tensor(value) for name, value in row.items()}


def write_rows(
    path: Path, texts: dict[str, list[Any]], encode: Callable[[dict[str, list[Any]]], dict[str, Any]]
) -> int:
    """Tokenises texts, some at a time, into the table of one file; gives the number of rows."""
    from datasets import Dataset as Table

    # The file is put in place whole. A fingerprint of its own: the tokenizer need not be hashed.
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
    """The table of one file, mapped into memory."""
    from datasets import Dataset as Table

    return Table.from_file(str(path))


def small(rows: Iterable[Sequence[int]]) -> list[Any]:
    """Lists of token numbers at half their size."""
    import numpy

    return [numpy.asarray(row, dtype=numpy.int32) for row in rows]


def spread(count: int, most: int) -> list[int]:
    """The numbers of at most `most` of `count` rows, from all over; 0 for all."""
    return [at * count // most for at in range(most)] if 0 < most < count else list(range(count))


def fit(tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes a tokenizer fit for two texts in one input, and for texts of different lengths in one batch.

    One that puts nothing around texts (that of a model trained here, or of a causal one) gets its end token before,
    between and after them: heads read the first token or the last one, and something must part the two texts.
    """
    end: Any = tokenizer.eos_token
    if tokenizer.num_special_tokens_to_add(pair=True) == 0:
        from tokenizers.processors import TemplateProcessing

        if end is None:
            raise ValueError("the tokenizer of the model has no end token, and nothing else to put between two texts")
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
    """Inputs of a model: rows of different lengths in one batch, and the mask that says what is a token."""
    inputs = [{name: row[name] for name in INPUTS if name in row} for row in rows]
    padded = tokenizer.pad(inputs, padding_side="right", return_attention_mask=True, return_tensors="pt")
    return {name: value.long() for name, value in padded.items()}


def batches(table: Any) -> Iterator[tuple[list[int], list[dict[str, Any]]]]:
    """All rows, with their numbers: those of about the same length together, so that little is padding."""
    lengths = [len(ids) for ids in table["input_ids"]]
    numbers = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    at = 0
    while at < len(numbers):
        some = numbers[at : at + max(1, TOKENS_AT_ONCE // lengths[numbers[at]])]
        columns = table[some]
        yield some, [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        at += len(some)
