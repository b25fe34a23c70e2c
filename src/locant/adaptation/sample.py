"""The text a model is fitted and adapted on, as token sequences: what comes between the model's special tokens."""

from __future__ import annotations

import bisect
import itertools
import os
import random
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from locant.analysis.text import special_tokens, usable
from locant.hf import facts
from locant.hf.facts import has_decoder, limits
from locant.hf.plan import plan_of
from locant.hf.swapping import check_model
from locant.runs import text_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Text = str | Path | Sequence[str]
SHORTEST = 16
"""Tokens of the shortest sequences; the others have twice as many, four times, …"""
BYTES, LONG = 40, 10_000
"""Lines with fewer bytes are headings and the like; lines with more letters, such as whole books, are cut."""
SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[。！？।])\s*")
ENDLESS = 64
"""Tokens after which a sentence is taken to have ended: not every text has full stops."""


def check(model: Any, spec: Any) -> None:
    """Whether a model can be fitted and adapted, before anything is done to it."""

    check_model(model)
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise ValueError(f"{type(model).__name__} does not read tokens: text says nothing to it")
    if not isinstance(spec, str) or spec.strip() == "native":
        raise ValueError(f"spec must be a string that names a scheme, such as tisa:kernels=5; got {spec!r}")
    if plan_of(model) is not None:
        raise ValueError("this model has been swapped already; give a model that has its own positions")
    if has_decoder(model):
        raise ValueError(
            f"{type(model).__name__} is an encoder with a decoder; open its encoder alone, as "
            f"AutoModelForTextEncoding does"
        )
    if torch.is_inference_mode_enabled():
        raise ValueError("fitting needs gradients, which torch.inference_mode() forbids; call it outside")
    broken = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    if broken:
        raise ValueError(f"{broken[0]} has numbers that are not finite: NaN or ∞; load the model again")
    half = {weight.dtype for weight in model.parameters()} & {torch.bfloat16, torch.float16}
    if half:
        raise ValueError(f"the model is in {half.pop()}, in which small steps are lost; call model.float() first")


def check_numbers(length: int, seed: int) -> None:
    if not isinstance(length, int) or length < SHORTEST // 2:
        raise ValueError(f"length must be a number of tokens, at least {SHORTEST // 2}, got {length!r}")
    if not isinstance(seed, int) or not 0 <= seed < 2**32 - 1:
        raise ValueError(f"seed must be a whole number from 0 to 2³² − 2, got {seed!r}")


def check_words(model: PreTrainedModel, tokenizer: Any, lines: list[str]) -> None:
    """Whether a model knows the tokens that its tokenizer makes of a text; of its first lines, to be quick."""
    words: Any = model.get_input_embeddings()
    most = max((token for ids in tokenizer(lines[:200], verbose=False)["input_ids"] for token in ids), default=0)
    if most >= words.weight.shape[0]:
        raise ValueError(
            f"the tokenizer makes a token {most}, and {type(model).__name__} has {words.weight.shape[0]}; give the "
            f"tokenizer that the model was trained with"
        )


def tokenizer_of(model: PreTrainedModel, tokenizer: Any = None) -> Any:
    """The tokenizer given, or the one that lies beside the model."""
    if tokenizer is not None:
        return tokenizer
    from transformers import AutoTokenizer

    name = model.name_or_path or type(model).__name__
    try:
        found = AutoTokenizer.from_pretrained(model.name_or_path)
    except Exception:  # transformers has one for each way of not being there
        raise ValueError(f"no tokenizer is found for {name}; save one beside it, or give it with tokenizer=…") from None
    if not usable(found):  # where files are missing transformers makes an empty one
        raise ValueError(f"there is no tokenizer with words beside {name}; save one there, or give it with tokenizer=…")
    return found


def longest(model: PreTrainedModel, length: int) -> int:
    """`length`, or as much as the model can read: one with its own positions no more than it was made for."""

    possible, made_for = limits(model)
    known = (possible, made_for if plan_of(model) is None else None)
    return min([length, *(limit for limit in known if limit is not None)])


def is_causal(model: PreTrainedModel, tokenizer: Any, lines: list[str]) -> bool:
    return facts.is_causal(model, Sampler(tokenizer, lines).rows(2, SHORTEST).to(model.device))


def pieces(text: Text) -> list[str]:
    """The lines of a text, file or folder, or the texts of a list; headings and other short things are left out."""
    if isinstance(text, str) and "\n" not in text and len(text) < LONG:
        if os.path.exists(text):
            raise ValueError(f"{text} is a file or folder; give it as pathlib.Path({text!r})")
        if os.sep in text and not any(letter.isspace() for letter in text):
            raise ValueError(f"the text is {text!r}, one word; if it is a file or folder, give it as a pathlib.Path")
    if isinstance(text, Path):
        text = text_source.read(text) if text.is_file() else text_source.text(str(text)).train
    if not isinstance(text, str) and not (isinstance(text, Sequence) and all(isinstance(line, str) for line in text)):
        raise TypeError(f"text must be a string, a list of strings or a pathlib.Path, got {type(text).__name__}")
    lines = [line.strip() for line in (text.splitlines() if isinstance(text, str) else text)]
    whole = [part for line in lines for part in ([line] if len(line) <= LONG else textwrap.wrap(line, LONG))]
    found = [line for line in whole if len(line.encode()) >= BYTES]
    if not found:
        raise ValueError(
            f"the text has no line of {BYTES} bytes or more: give prose, a paragraph or sentence per line, or a "
            f"list of texts (a file is given as a pathlib.Path)"
        )
    return found


class Sampler:
    """Draws sequences of whole sentences from a text, from places that depend on the seed alone.

    A sequence starts at some sentence of some line and goes on as the text does, so that a long one is what a model
    reads in practice: one document, not sentences of many.
    """

    def __init__(self, tokenizer: Any, text: Text, *, seed: int = 0) -> None:
        self.tokenizer, self.lines = tokenizer, pieces(text)
        self.before, self.after = special_tokens(tokenizer)
        self.rng = random.Random(seed)
        self.starts: list[int] = []  # lines in which a sequence is still to start, before all lines come again

    def rows(self, count: int, length: int) -> Tensor:
        """[count, length]: sentences until there are enough tokens, the last one cut; nothing is padded."""
        return torch.tensor([self._row(length, whole=False) for _ in range(count)])

    def batch(self, count: int, length: int) -> dict[str, Tensor]:
        """Rows of as many whole sentences as fit into `length` tokens, padded: what a model reads in practice."""
        return padded([self._row(length, whole=True) for _ in range(count)], self.tokenizer)

    def _row(self, length: int, *, whole: bool) -> list[int]:
        inside = length - len(self.before) - len(self.after)
        if inside < 1:
            raise ValueError(f"sequences of {length} tokens have no room beside the special tokens of the model")
        found: list[int] = []
        for sentence in self._from_somewhere():
            if whole and found and len(found) + len(sentence) > inside:
                break
            found += sentence
            if len(found) >= inside:
                break
        return [*self.before, *found[:inside], *self.after]

    def _from_somewhere(self) -> Iterator[list[int]]:
        """Sentences, without an end: after the last line comes the first."""
        if not self.starts:
            self.starts = self.rng.sample(range(len(self.lines)), len(self.lines))
        line = self.starts.pop()
        sentences = self._split(self.lines[line])
        yield from sentences[self.rng.randrange(len(sentences)) if sentences else 0 :]
        empty = 0
        while empty <= len(self.lines):
            line = (line + 1) % len(self.lines)
            sentences = self._split(self.lines[line])
            empty = 0 if sentences else empty + 1
            yield from sentences
        raise ValueError("the tokenizer makes no tokens of this text")

    def _split(self, line: str) -> list[list[int]]:
        """The tokens of each sentence. A line is tokenised as a whole: what follows a space may be another token."""
        ends = [match.end() for match in SENTENCE.finditer(line)]
        if getattr(self.tokenizer, "is_fast", False):
            made = self.tokenizer(line, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            sentences: list[list[int]] = [[] for _ in range(len(ends) + 1)]
            for token, (_, end) in zip(made["input_ids"], made["offset_mapping"], strict=True):
                sentences[bisect.bisect_left(ends, end)].append(token)
        else:
            pieces = [line[a:b].strip() for a, b in itertools.pairwise([0, *ends, len(line)])]
            sentences = self.tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
        return [ids[at : at + ENDLESS] for ids in sentences for at in range(0, len(ids), ENDLESS)]


def padded(rows: list[list[int]], tokenizer: Any) -> dict[str, Tensor]:
    """Rows of different lengths, padded on the right, also for tokenizers that have nothing to pad with."""
    most, pad = max(map(len, rows)), tokenizer.pad_token_id or 0
    return {
        "input_ids": torch.tensor([row + [pad] * (most - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (most - len(row)) for row in rows]),
    }


def ladder(longest: int, shortest: int = SHORTEST) -> list[int]:
    """16, 32, 64, … up to the longest, which is among them."""
    rungs = [longest]
    while rungs[0] // 2 >= shortest:
        rungs.insert(0, rungs[0] // 2)
    return rungs
