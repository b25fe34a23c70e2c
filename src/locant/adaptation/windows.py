"""What a model says of a text that is longer than it can read: window by window, each seen with what is around it.

The tokens between the model's special ones are cut into windows that overlap by half, and each window gets the special
tokens. Of a window of an encoder the middle half is kept, of a causal model the second, where there is most to see;
of the first and the last window also what no other has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from locant.analysis.text import special_tokens

Batch = dict[str, Tensor]
Tensors = tuple[Tensor, ...]


class Windows:
    """Reads texts of any length by a model that reads up to `whole` tokens at once, longer ones `size` at a time."""

    def __init__(self, tokenizer: Any, size: int, *, causal: bool, whole: int | None = None) -> None:
        self.before, self.after = special_tokens(tokenizer)
        self.size, self.causal, self.whole = size, causal, size if whole is None else whole
        self.inside = size - len(self.before) - len(self.after)
        if self.inside < 4:
            raise ValueError(f"windows of {size} tokens have no room beside the special tokens of the model")

    def at_once(self, batch: Batch) -> bool:
        """Whether a batch needs no windows."""
        return batch["input_ids"].shape[1] <= self.whole

    def read(self, outputs: Callable[[Batch], Tensors], batch: Batch) -> Tensors:
        """Tensors [B, L, …] as `outputs` gives them of a batch that is short enough; of padding anything."""
        ids, mask = batch["input_ids"], batch["attention_mask"]
        if self.at_once(batch):
            return outputs(batch)
        rows = [self._row(outputs, ids[row, : int(mask[row].sum())]) for row in range(len(ids))]
        return tuple(_padded(parts, ids.shape[1]) for parts in zip(*rows, strict=True))

    def _row(self, outputs: Callable[[Batch], Tensors], ids: Tensor) -> Tensors:
        head, tail = len(self.before), len(self.after)
        tokens = ids[head : len(ids) - tail]
        pieces = self.pieces(len(tokens))
        windows = torch.stack([torch.cat([ids[:head], tokens[a:b], ids[len(ids) - tail :]]) for a, b, _, _ in pieces])
        read = outputs({"input_ids": windows, "attention_mask": torch.ones_like(windows)})
        kept = []
        for number, (start, _, first, last) in enumerate(pieces):
            low = 0 if number == 0 else head + first - start
            high = windows.shape[1] if number == len(pieces) - 1 else head + last - start
            kept.append((number, slice(low, high)))
        return tuple(torch.cat([each[number, part] for number, part in kept]) for each in read)

    def pieces(self, count: int) -> list[tuple[int, int, int, int]]:
        """Where windows over so many tokens start and end, and what of each is kept, from and to: all of it, once."""
        if count <= self.inside:
            return [(0, count, 0, count)]
        step = self.inside // 2
        starts = [*range(0, count - self.inside, step), count - self.inside]
        # Up to here a window is kept: an encoder has seen a quarter beyond, a causal model looks at no more.
        ends = [start + (self.inside if self.causal else self.inside - step // 2) for start in starts[:-1]]
        kept = [0, *ends, count]
        return [(start, start + self.inside, kept[n], kept[n + 1]) for n, start in enumerate(starts)]


def _padded(rows: Tensors, length: int) -> Tensor:
    """[B, length, …] of rows [L, …], with zeros after them."""
    found = rows[0].new_zeros(len(rows), length, *rows[0].shape[1:])
    for row, states in enumerate(rows):
        found[row, : len(states)] = states
    return found
