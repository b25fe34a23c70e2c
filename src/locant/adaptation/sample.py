"""The text that a model is fitted and adapted on, as token sequences between the model's special tokens."""

from __future__ import annotations

import bisect
import itertools
import os
import random
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from locant.adaptation.batch import Batch, padded
from locant.analysis.text import special_tokens, usable
from locant.hf import facts
from locant.hf.facts import limits
from locant.hf.plan import plan_of
from locant.runs import text_source

Text = str | Path | Sequence[str]

SHORTEST = 16
"""Tokens of the shortest sequences; the next have twice as many, and so on."""
SHORTEST_LINE = 40
"""Bytes below which a line is skipped: it is a heading or the like."""
LONGEST_LINE = 10_000
"""Characters above which a line, such as a whole book, is cut."""
SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[。！？।])\s*")
LONGEST_SENTENCE = 64
"""Tokens after which a sentence is cut: not every text has full stops."""


def tokenizer_of(model: PreTrainedModel, tokenizer: Any = None) -> Any:
    """Returns the given tokenizer, or the one in the folder of the model."""
    if tokenizer is not None:
        return tokenizer
    name = model.name_or_path or type(model).__name__
    try:
        found = AutoTokenizer.from_pretrained(model.name_or_path, trust_remote_code=False)
    except Exception:  # transformers raises many classes for a missing tokenizer
        raise ValueError(
            f"found no tokenizer for {name}; save one in the folder of the model, or pass tokenizer=…"
        ) from None
    if not usable(found):  # transformers makes an empty one if files are missing
        raise ValueError(
            f"the tokenizer of {name} has no words; save one in the folder of the model, or pass tokenizer=…"
        )
    return found


def longest(model: PreTrainedModel, length: int) -> int:
    """Returns `length`, or the most tokens that the model can read; with its own positions, that it was made for."""
    possible, made_for = limits(model)
    known = (possible, made_for if plan_of(model) is None else None)
    return min([length, *(limit for limit in known if limit is not None)])


def is_causal(model: PreTrainedModel, tokenizer: Any, lines: list[str]) -> bool:
    """Whether later tokens of a text have no effect on the outputs for earlier ones."""
    return facts.is_causal(model, Sampler(tokenizer, lines).rows(2, SHORTEST).to(model.device))


def pieces(text: Text) -> list[str]:
    """Returns the lines of a text, file or folder, or the texts of a list, without headings and other short lines."""
    if isinstance(text, str) and "\n" not in text and len(text) < LONGEST_LINE:
        if os.path.exists(text):
            raise ValueError(f"{text} is a file or folder; pass it as pathlib.Path({text!r})")
        if os.sep in text and not any(letter.isspace() for letter in text):
            raise ValueError(f"the text is the single word {text!r}; pass a file or folder as a pathlib.Path")
    if isinstance(text, Path):
        text = text_source.read(text) if text.is_file() else text_source.text(str(text)).train
    if not isinstance(text, str) and not (isinstance(text, Sequence) and all(isinstance(line, str) for line in text)):
        raise TypeError(f"text must be a string, a list of strings or a pathlib.Path, got {type(text).__name__}")
    lines = [line.strip() for line in (text.splitlines() if isinstance(text, str) else text)]
    cut = [part for line in lines for part in ([line] if len(line) <= LONGEST_LINE else _cut(line))]
    found = [line for line in cut if len(line.encode()) >= SHORTEST_LINE]
    if not found:
        raise ValueError(
            f"the text has no line of {SHORTEST_LINE} bytes or more; pass prose, one paragraph or sentence per line, a "
            f"list of texts, or a pathlib.Path of a file"
        )
    return found


def _cut(line: str) -> list[str]:
    return textwrap.wrap(line, LONGEST_LINE)


class Sampler:
    """Draws sequences of whole sentences from a text; the seed alone decides where they start.

    A sequence starts at a random sentence of a random line and continues with the text that follows. So a long sequence
    is one document, as models read them in practice, and not a mixture of sentences.
    """

    def __init__(self, tokenizer: Any, text: Text, *, seed: int = 0) -> None:
        self.tokenizer, self.lines = tokenizer, pieces(text)
        self.before, self.after = special_tokens(tokenizer)
        self.rng = random.Random(seed)
        self.starts: list[int] = []  # lines in which a sequence will start, before any line is used again

    def rows(self, count: int, length: int) -> Tensor:
        """Returns tokens [count, length]. The last sentence of each row is cut; there is no padding."""
        return torch.tensor([self._row(length, whole=False) for _ in range(count)])

    def batch(self, count: int, length: int) -> Batch:
        """Returns a padded batch whose rows have as many whole sentences as fit into `length` tokens."""
        return padded([self._row(length, whole=True) for _ in range(count)], self.tokenizer)

    def tokens(self, most: int) -> int:
        """Returns how many tokens the text has. Stops counting at `most`: tokenizing a long text takes time."""
        found = 0
        for line in self.lines:
            found += sum(map(len, self.split(line)))
            if found >= most:
                return most
        return found

    def _row(self, length: int, *, whole: bool) -> list[int]:
        inside = length - len(self.before) - len(self.after)
        if inside < 1:
            special = len(self.before) + len(self.after)
            raise ValueError(
                f"a sequence of {length} tokens has no room beside the model's {special} special tokens; use a larger "
                f"length"
            )
        found: list[int] = []
        for sentence in self._sentences():
            if whole and found and len(found) + len(sentence) > inside:
                break
            found += sentence
            if len(found) >= inside:
                break
        return [*self.before, *found[:inside], *self.after]

    def _sentences(self) -> Iterator[list[int]]:
        """Yields sentences from a random place without end: the first line follows the last."""
        if not self.starts:
            self.starts = self.rng.sample(range(len(self.lines)), len(self.lines))
        line = self.starts.pop()
        sentences = self.split(self.lines[line])
        yield from sentences[self.rng.randrange(len(sentences)) if sentences else 0 :]
        empty = 0
        while empty <= len(self.lines):
            line = (line + 1) % len(self.lines)
            sentences = self.split(self.lines[line])
            empty = 0 if sentences else empty + 1
            yield from sentences
        raise ValueError("the tokenizer returns no tokens for this text; pass the tokenizer of the model")

    def split(self, line: str) -> list[list[int]]:
        """Returns the tokens of each sentence of a line.

        The line is tokenized as a whole, because a word after a space may be another token than without it.
        """
        ends = [match.end() for match in SENTENCE.finditer(line)]
        if getattr(self.tokenizer, "is_fast", False):
            made = self.tokenizer(line, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            sentences: list[list[int]] = [[] for _ in range(len(ends) + 1)]
            for token, (_, end) in zip(made["input_ids"], made["offset_mapping"], strict=True):
                sentences[bisect.bisect_left(ends, end)].append(token)
        else:
            pieces = [line[a:b].strip() for a, b in itertools.pairwise([0, *ends, len(line)])]
            sentences = self.tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
        most = LONGEST_SENTENCE
        return [ids[at : at + most] for ids in sentences for at in range(0, len(ids), most)]


def ladder(longest: int, shortest: int = SHORTEST) -> list[int]:
    """Returns sequence lengths, each twice the one before: 16, 32, 64, …, longest."""
    lengths = [longest]
    while lengths[0] // 2 >= shortest:
        lengths.insert(0, lengths[0] // 2)
    return lengths
