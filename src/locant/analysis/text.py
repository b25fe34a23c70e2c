"""Token sequences as inputs for analyses: from a text, from the documentation inside Python, or random."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    from pydoc_data import topics as manual
except ImportError:  # some distributions leave it out
    manual = None  # type: ignore[assignment]

PROBES = ("a", "0", "中", "の", "한", "а", "ا", "न")
"""Texts of one character. Every useful tokenizer makes a token of at least one of them."""
SAMPLE = "The position of a word in a sentence says something about what the word is there for."
"""A text that shows whether a tokenizer has a vocabulary."""


def default_text() -> str:
    """Returns English prose that comes with Python, the language reference behind help(); "" if it is missing."""
    return "" if manual is None else "\n".join(manual.topics[name] for name in sorted(manual.topics))


def sequences(tokenizer: Any, text: str, *, count: int, length: int) -> Tensor:
    """Returns token ids [count, length] of consecutive pieces of a text, each between the model's special tokens."""
    before, after = special_tokens(tokenizer)
    piece = length - len(before) - len(after)
    if piece < 4:
        raise ValueError(
            f"sequences of {length} tokens leave {max(piece, 0)} for the text beside the model's special tokens; "
            f"4 or more are needed: use longer sequences"
        )
    needed = count * piece
    # Tokenizing takes time. A token rarely has more than 12 letters, so the beginning of a long text is enough.
    ids = tokenizer(text[: 12 * needed + 1000], add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < needed:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < needed:
        raise ValueError(
            f"the text has {len(ids)} token{'' if len(ids) == 1 else 's'}; "
            f"{count} sequences of {length} need {needed}: use a longer text, or fewer or shorter sequences"
        )
    return torch.tensor([before + ids[start : start + piece] + after for start in range(0, needed, piece)])


def usable(tokenizer: Any) -> bool:
    """Whether a tokenizer has a vocabulary. If its files are missing, transformers makes an empty one without error."""
    ids = tokenizer(SAMPLE, add_special_tokens=False, verbose=False)["input_ids"]
    unknown = getattr(tokenizer, "unk_token_id", None)
    return len(ids) >= 8 and sum(i == unknown for i in ids) < len(ids) / 2


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns the tokens that a tokenizer puts before and after a text."""
    for character in PROBES:
        alone, whole = tokenizer(character, add_special_tokens=False)["input_ids"], tokenizer(character)["input_ids"]
        if alone:
            break
    else:
        raise ValueError(
            f"the tokenizer makes no tokens of any of {', '.join(map(repr, PROBES))}, so its special tokens cannot be "
            f"determined; check that the files of the tokenizer are complete"
        )
    starts = [i for i in range(len(whole)) if whole[i : i + len(alone)] == alone] or [0]
    return whole[: starts[0]], whole[starts[0] + len(alone) :]


def random_tokens(vocabulary: int, *, count: int, length: int, seed: int = 0) -> Tensor:
    """Returns uniformly random ids [count, length], without the lowest: most vocabularies begin with special tokens."""
    low = min(1000, vocabulary // 10)
    return torch.randint(low, vocabulary, (count, length), generator=torch.Generator().manual_seed(seed))
