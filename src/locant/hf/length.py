"""The longest input that a config names."""

from __future__ import annotations

from typing import Any

NAME = "max_position_embeddings"


def named_length(config: Any) -> int | None:
    """Returns config.max_position_embeddings; None if there is none. XLNet's is −1 and cannot be set."""
    length = getattr(config, NAME, None)
    return length if isinstance(length, int) and length > 0 else None
