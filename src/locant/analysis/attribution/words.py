"""The tokens of a text as words, for readers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

BYTES, PIECES, PARTS = "Ġ", "▁", "##"
"""How tokens of byte-level BPE and of SentencePiece begin a word, and how those of WordPiece continue one."""


def words_of(texts: list[Tensor], tokenizer: Any) -> tuple[str, ...]:
    """Returns the tokens of texts [1, L] as text. A space in front says that a word begins."""
    ids = [int(token) for text in texts for token in text[0]]
    if tokenizer is None:
        return tuple(map(str, ids))
    pieces = [str(piece) for piece in tokenizer.convert_ids_to_tokens(ids)]
    special, marker = _special(tokenizer), _marker(tokenizer)
    return tuple(piece if piece in special else _word(piece, marker, tokenizer) for piece in pieces)


def _special(tokenizer: Any) -> set[str]:
    """Tokens that are not made of the bytes or the words of a text."""
    return {
        *tokenizer.all_special_tokens,
        *(tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else ()),
    }


def _marker(tokenizer: Any) -> str:
    """The marker that most tokens of the vocabulary have. Single ones have others: GPT-2 has a token ##."""
    counts = dict.fromkeys((PARTS, BYTES, PIECES), 0)
    for piece in tokenizer.get_vocab():
        for marker in counts:
            counts[marker] += len(piece) > len(marker) and piece.startswith(marker)
    return max(counts, key=lambda marker: counts[marker])


def _word(piece: str, marker: str, tokenizer: Any) -> str:
    if marker == PARTS:
        return piece[len(PARTS) :] if piece.startswith(PARTS) else f" {piece}"
    if marker == BYTES:  # every letter stands for a byte
        return str(tokenizer.convert_tokens_to_string([piece]))
    return f" {piece[len(PIECES) :]}" if piece.startswith(PIECES) else piece
