"""A digest of a dataclass: the same for equal settings in any process, and another one for other settings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any


def digest_of(thing: Any) -> str:
    """Returns the first 16 digits of a SHA-256 over the fields, and those of dataclasses inside of them."""
    text = json.dumps(_described(thing), ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _described(thing: Any) -> Any:
    """A value for JSON; a function by its name."""
    if dataclasses.is_dataclass(thing):
        fields = {field.name: _described(getattr(thing, field.name)) for field in dataclasses.fields(thing)}
        return {type(thing).__name__: fields}
    if isinstance(thing, (tuple, list)):
        return [_described(each) for each in thing]
    if thing is None or isinstance(thing, (str, int, float)):
        return thing
    return getattr(thing, "__qualname__", type(thing).__qualname__)
