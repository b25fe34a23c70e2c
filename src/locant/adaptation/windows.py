"""How the original reads a text that is longer than it can read: in overlapping windows.

The tokens between the special tokens are cut into windows that overlap by half, and each window gets the special
tokens. For each token we use the window with the most context for it: of an encoder's window the middle half, of
a causal model's window the second half. The first and the last window also provide the tokens that no other window has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from locant.adaptation.batch import Batch
from locant.analysis.text import special_tokens

Tensors = tuple[Tensor, ...]


class Windows:
    """Runs a model on texts of any length: up to `whole` tokens at once, longer texts in windows of `size` tokens."""

    def __init__(self, tokenizer: Any, size: int, *, causal: bool, whole: int | None = None) -> None:
        self.before, self.after = special_tokens(tokenizer)
        self.size, self.causal, self.whole = size, causal, size if whole is None else whole
        self.inside = size - len(self.before) - len(self.after)
        if self.inside < 4:
            special = len(self.before) + len(self.after)
            raise ValueError(
                f"a window of {size} tokens holds {special} special tokens and fewer than 4 others; use longer windows"
            )

    def fits(self, batch: Batch) -> bool:
        """Whether the model reads a batch without windows."""
        return batch["input_ids"].shape[1] <= self.whole

    def read(self, outputs: Callable[[Batch], Tensors], batch: Batch) -> Tensors:
        """Returns the tensors [B, L, …] of `outputs` for a batch of any length; values at padding are arbitrary.

        `outputs` is a function that accepts only batches short enough for the model.
        """
        return outputs(batch) if self.fits(batch) else self.always(outputs, batch)

    def always(self, outputs: Callable[[Batch], Tensors], batch: Batch) -> Tensors:
        """Does the same, and cuts also texts that the model could read at once."""
        ids, mask = batch["input_ids"], batch["attention_mask"]
        rows = [self._row(outputs, ids[row, : int(mask[row].sum())]) for row in range(len(ids))]
        return tuple(_padded(parts, ids.shape[1]) for parts in zip(*rows, strict=True))

    def _row(self, outputs: Callable[[Batch], Tensors], ids: Tensor) -> Tensors:
        head, tail = len(self.before), len(self.after)
        tokens = ids[head : len(ids) - tail]
        pieces = self.pieces(len(tokens))
        windows = torch.stack([torch.cat([ids[:head], tokens[a:b], ids[len(ids) - tail :]]) for a, b, _, _ in pieces])
        read = outputs({"input_ids": windows, "attention_mask": torch.ones_like(windows)})
        taken = []
        for number, (start, _, first, last) in enumerate(pieces):
            low = 0 if number == 0 else head + first - start
            high = windows.shape[1] if number == len(pieces) - 1 else head + last - start
            taken.append((number, slice(low, high)))
        return tuple(torch.cat([each[number, part] for number, part in taken]) for each in read)

    def pieces(self, count: int) -> list[tuple[int, int, int, int]]:
        """Returns (start, end, first, last) of each window over `count` tokens.

        A window covers the tokens start … end − 1. Of these, first … last − 1 are taken from it: every token once.
        """
        if count <= self.inside:
            return [(0, count, 0, count)]
        step = self.inside // 2
        starts = [*range(0, count - self.inside, step), count - self.inside]
        # A causal model needs no context after a token. An encoder keeps a quarter of a window of it.
        ends = [start + (self.inside if self.causal else self.inside - step // 2) for start in starts[:-1]]
        limits = [0, *ends, count]
        return [(start, start + self.inside, limits[n], limits[n + 1]) for n, start in enumerate(starts)]


def _padded(rows: Tensors, length: int) -> Tensor:
    """[B, length, …] from rows [L, …], with zeros after each row."""
    found = rows[0].new_zeros(len(rows), length, *rows[0].shape[1:])
    for row, states in enumerate(rows):
        found[row, : len(states)] = states
    return found
