"""Token sequences to look at a model with: from a text, from the documentation that Python brings along, or random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PROBES = ("a", "0", "中", "の", "한", "а", "ا", "न")
"""Texts of one letter, at least one of which a tokenizer should know."""
SAMPLE = "The position of a word in a sentence says something about what the word is there for."


def default_text() -> str:
    """English prose that is on every machine with Python: the language reference behind help()."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return ""
    return "\n".join(topics[name] for name in sorted(topics))


def sequences(tokenizer: Any, text: str, *, count: int, length: int) -> Tensor:
    """[count, length] token ids from consecutive pieces of a text, each between the special tokens of the model."""
    before, after = special_tokens(tokenizer)
    piece = length - len(before) - len(after)
    if piece < 4:
        raise ValueError(f"sequences of {length} tokens have no room for a text beside the special tokens of the model")
    needed = count * piece
    # No more text than is needed is tokenised: a word has rarely more than 12 letters.
    ids = tokenizer(text[: 12 * needed + 1000], add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < needed:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < needed:
        raise ValueError(
            f"the text has {len(ids)} token{'' if len(ids) == 1 else 's'}; "
            f"{count} sequences of {length} need {needed}: a longer text is wanted, or fewer or shorter sequences"
        )
    return torch.tensor([before + ids[start : start + piece] + after for start in range(0, needed, piece)])


def usable(tokenizer: Any) -> bool:
    """Whether a tokenizer knows words: where its files are missing transformers makes an empty one, quietly."""
    ids = tokenizer(SAMPLE, add_special_tokens=False, verbose=False)["input_ids"]
    unknown = getattr(tokenizer, "unk_token_id", None)
    return len(ids) >= 8 and sum(i == unknown for i in ids) < len(ids) / 2


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before and after a text."""
    for probe in PROBES:
        alone, whole = tokenizer(probe, add_special_tokens=False)["input_ids"], tokenizer(probe)["input_ids"]
        if alone:
            break
    else:
        raise ValueError(
            f"the tokenizer makes no tokens of {', '.join(map(repr, PROBES))}: where it puts special ones is unknown"
        )
    starts = [i for i in range(len(whole)) if whole[i : i + len(alone)] == alone] or [0]
    return whole[: starts[0]], whole[starts[0] + len(alone) :]


def random_tokens(vocabulary: int, *, count: int, length: int, seed: int = 0) -> Tensor:
    """Uniform ids, without the lowest, which are special in most vocabularies where there is room."""
    low = min(1000, vocabulary // 10)
    return torch.randint(low, vocabulary, (count, length), generator=torch.Generator().manual_seed(seed))


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise ValueError(f"{path} is not text in UTF-8: {problem}") from None
