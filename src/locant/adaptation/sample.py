"""The text a model is fitted and adapted on, as token sequences: what comes between the model's special tokens."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from locant.analysis.text import special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Text = str | Path | Sequence[str]
SHORTEST = 16
"""Tokens of the shortest sequences; the others have twice as many, four times, …"""
LETTERS = 40
"""Lines with fewer are headings and the like."""
SENTENCE = re.compile(r"(?<=[.!?])\s+")


def tokenizer_of(model: PreTrainedModel, tokenizer: Any = None) -> Any:
    """The tokenizer given, or the one that lies beside the model."""
    if tokenizer is not None:
        return tokenizer
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model.name_or_path)
    except Exception:  # transformers has one for each way of not being there
        raise ValueError(
            f"no tokenizer is found for {model.name_or_path or type(model).__name__}; give it with tokenizer=…"
        ) from None


def longest(model: PreTrainedModel, length: int) -> int:
    """`length`, or as much as the model can read."""
    from locant.analysis.behaviour import limits
    from locant.hf.encoder import has_decoder

    if has_decoder(model):
        raise ValueError(f"{type(model).__name__} is an encoder with a decoder; give its encoder, model.get_encoder()")
    return min([length, *(limit for limit in limits(model) if limit is not None)])


def is_causal(model: PreTrainedModel, tokenizer: Any, lines: list[str]) -> bool:
    from locant.analysis.behaviour import is_causal as found

    return found(model, Sampler(tokenizer, lines).rows(2, SHORTEST).to(model.device))


def pieces(text: Text) -> list[str]:
    """The lines of a text, file or folder, or the texts of a list; headings and other short things are left out."""
    if isinstance(text, Path):
        from locant.experiments.source import text as read

        text = read(str(text)).train
    lines = text.splitlines() if isinstance(text, str) else list(text)
    found = [line.strip() for line in lines if len(line.strip()) >= LETTERS]
    if not found:
        raise ValueError(
            f"the text has no line of {LETTERS} letters or more: give prose, a paragraph or sentence per line, or a "
            f"list of texts (a file is given as a pathlib.Path)"
        )
    return found


class Sampler:
    """Draws sequences of whole sentences from a text, in an order that depends on the seed alone."""

    def __init__(self, tokenizer: Any, text: Text, *, seed: int = 0) -> None:
        self.tokenizer, self.lines = tokenizer, pieces(text)
        self.before, self.after = special_tokens(tokenizer)
        self.rng = random.Random(seed)
        self.rng.shuffle(self.lines)
        self.at = 0
        self.sentences: list[list[int]] = []  # those that come next, last one first

    def rows(self, count: int, length: int) -> Tensor:
        """[count, length]: sentences until there are enough tokens, the last one cut; nothing is padded."""
        return torch.tensor([self._row(length, whole=False) for _ in range(count)])

    def batch(self, count: int, length: int) -> dict[str, Tensor]:
        """Rows of as many whole sentences as fit into `length` tokens, padded: what a model reads in practice."""
        rows = [self._row(length, whole=True) for _ in range(count)]
        longest = max(map(len, rows))
        pad = self.tokenizer.pad_token_id or 0
        return {
            "input_ids": torch.tensor([row + [pad] * (longest - len(row)) for row in rows]),
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
        }

    def _row(self, length: int, *, whole: bool) -> list[int]:
        inside = length - len(self.before) - len(self.after)
        if inside < 1:
            raise ValueError(f"sequences of {length} tokens have no room beside the special tokens of the model")
        found: list[int] = []
        while len(found) < inside:
            sentence = self._next()
            if whole and found and len(found) + len(sentence) > inside:
                self.sentences.append(sentence)
                break
            found += sentence
        return [*self.before, *found[:inside], *self.after]

    def _next(self) -> list[int]:
        """The next sentence; when the text is used up it begins again, in another order."""
        tried = 0
        while not self.sentences:
            if self.at >= len(self.lines):
                self.at = 0
                self.rng.shuffle(self.lines)
            if tried > len(self.lines):
                raise ValueError("the tokenizer makes no tokens of this text")
            some = self.lines[self.at : self.at + 64]
            self.at, tried = self.at + len(some), tried + len(some)
            sentences = [sentence for line in some for sentence in SENTENCE.split(line) if sentence]
            ids = self.tokenizer(sentences, add_special_tokens=False, verbose=False)["input_ids"]
            self.sentences = [sentence for sentence in reversed(ids) if sentence]
        return self.sentences.pop()


def ladder(longest: int) -> list[int]:
    """16, 32, 64, … up to the longest, which is among them."""
    rungs = [longest]
    while rungs[0] // 2 >= SHORTEST:
        rungs.insert(0, rungs[0] // 2)
    return rungs
