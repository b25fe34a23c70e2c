"""One architecture under test: its model, its inputs with and without padding, and comparisons of outputs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from census.models import build, inputs, output
from census.names import BOTH, DECODER, Architecture
from census.sizes import TOKENS, VOCABULARY

LENGTH, SHORT, DECODED = 12, 9, 7
"""Tokens of the long row, of the short one, which is padded, and of the input of a decoder beside an encoder."""
TOLERANCE = 2e-5
"""Largest difference of two outputs that should be equal, as a share of the largest output."""
LEFT, RIGHT = "left", "right"
FIRST_WORD = 4
"""Tokens below it are special."""


def difference(found: Tensor, expected: Tensor) -> float:
    """Returns the largest difference, as a share of the largest number that is expected."""
    if found.shape != expected.shape:
        raise ValueError(f"outputs of shapes {tuple(found.shape)} and {tuple(expected.shape)} cannot be compared")
    if not found.isfinite().all():
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


@dataclass(frozen=True)
class Rows:
    """A padded batch, and which tokens of each row are real."""

    ids: Tensor
    mask: Tensor


class Subject:
    """An architecture and its tiny model. `fresh` builds the same model again."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(FIRST_WORD, VOCABULARY, (2, LENGTH), generator=generator)
        self.decoder_ids = torch.randint(FIRST_WORD, VOCABULARY, (2, DECODED), generator=generator)
        self.two_stacks = architecture.kind == BOTH
        self.writes = architecture.kind in (DECODER, BOTH)

    def fresh(self) -> PreTrainedModel:
        """Returns a new model with the same weights."""
        return build(self.architecture)

    @cached_property
    def original(self) -> PreTrainedModel:
        """The model with its own positions. Nothing may change it."""
        return self.fresh()

    def takes(self, name: str) -> bool:
        """Whether the model's forward has this argument."""
        return name in inspect.signature(type(self.original).forward).parameters

    def given(self, ids: Tensor, mask: Tensor | None = None, **more: Any) -> dict[str, Any]:
        """Returns the arguments of a call; for two stacks the decoder gets its own tokens."""
        if self.two_stacks and self.takes("decoder_input_ids"):
            more.setdefault("decoder_input_ids", self.decoder_ids[: len(ids)])
        return inputs(self.architecture, ids, mask, **more)

    def run(self, model: PreTrainedModel, **more: Any) -> Tensor:
        """Returns the output for the rows without padding."""
        return output(model, self.given(self.ids, **more))

    def padded(self, side: str) -> Rows:
        """Returns both rows, the first cut short and padded on a side."""
        ids, mask = self.ids.clone(), torch.ones_like(self.ids)
        hole = slice(0, LENGTH - SHORT) if side == LEFT else slice(SHORT, LENGTH)
        real = slice(LENGTH - SHORT, LENGTH) if side == LEFT else slice(0, SHORT)
        ids[0, real] = self.ids[0, :SHORT]
        ids[0, hole], mask[0, hole] = TOKENS["pad_token_id"], 0
        return Rows(ids, mask)

    def alone(self, model: PreTrainedModel, row: int) -> Tensor:
        """Returns the output for one row without padding, [places, …]."""
        ids = self.ids[row : row + 1, : SHORT if row == 0 else LENGTH]
        more = {"decoder_input_ids": self.decoder_ids[row : row + 1]} if self.two_stacks else {}
        return self.by_row(output(model, self.given(ids, **more)), 1)[0]

    def by_row(self, found: Tensor, rows: int) -> Tensor:
        """Returns an output as [rows, places, …]; models with codebooks have several lines for each row."""
        lines = found.shape[0] // rows
        return found if lines <= 1 else found.unflatten(0, (rows, lines)).transpose(1, 2)

    def real(self, found: Tensor, mask: Tensor) -> Tensor:
        """Returns the places of one row that are real. An output without a place for each token is kept whole."""
        return found[mask.bool()] if not self.two_stacks and found.shape[0] == len(mask) else found

    def padding_error(self, model: PreTrainedModel, side: str, *, numbered: bool = False) -> float:
        """Returns how much padding changes the outputs of real tokens.

        numbered   pass position_ids that do not count the padding, for a model that counts it by itself.
        """
        rows, more = self.padded(side), {}
        if numbered:
            more["position_ids"] = (rows.mask.cumsum(-1) - 1).clamp(min=0)
        found = self.by_row(output(model, self.given(rows.ids, rows.mask, **more)), 2)
        return max(
            difference(self.real(found[row], rows.mask[row]), self.alone(model, row)) for row in range(len(rows.ids))
        )

    def decoder_padding_error(self, model: PreTrainedModel, side: str) -> float:
        """Returns the same for padding in the decoder of an encoder-decoder."""
        hole, ids = 2, self.decoder_ids[:1]
        padding = torch.full((1, hole), TOKENS["pad_token_id"])
        pieces = [padding, ids] if side == LEFT else [ids, padding]
        mask = torch.cat([torch.ones_like(piece) * (piece is ids) for piece in pieces], 1)
        given = self.given(self.ids[:1], decoder_input_ids=torch.cat(pieces, 1), decoder_attention_mask=mask)
        expected = output(model, self.given(self.ids[:1], decoder_input_ids=ids))
        return difference(output(model, given)[:, mask[0].bool()], expected)
