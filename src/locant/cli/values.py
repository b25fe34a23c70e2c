"""From the words of the command line to values. Each function is the `type` of an option or argument of argparse.

Scheme names are checked here, without torch: a wrong one is rejected at once.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar

from locant import notation, schemes

T = TypeVar("T")


def _checked(read: Callable[[str], T]) -> Callable[[str], T]:
    """Wraps `read`: turns ValueError into ArgumentTypeError, whose message argparse prints."""

    def convert(text: str) -> T:
        try:
            return read(text)
        except ValueError as problem:
            raise ArgumentTypeError(str(problem)) from None

    return convert


@_checked
def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"expected a whole number, got {text!r}") from None


def at_least(least: int) -> Callable[[str], int]:
    """Returns the type of whole numbers from `least` on."""

    @_checked
    def read(text: str) -> int:
        number = whole(text)
        if number < least:
            raise ValueError(f"expected a whole number ≥ {least}, got {text}")
        return number

    return read


@_checked
def whole_numbers(text: str) -> list[int]:
    """Whole numbers ≥ 1 with commas between them."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"expected whole numbers ≥ 1 with commas between them, got {text!r}")
    return [int(word) for word in words]


def one_of(*choices: str) -> Callable[[str], str]:
    """Returns the type of a word that is one of `choices`."""

    @_checked
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}; got {text!r}")
        return text

    return read


@_checked
def budget(text: str) -> str:
    """The training of a run: a time or a number of steps."""
    from locant.runs.budget import Budget

    Budget.parse(text)
    return text


@_checked
def own_code(text: str) -> str:
    """A file or module with schemes of the user's own, which is imported now."""
    from locant import imports

    try:
        imports.load(text)
    except ImportError as problem:
        raise ValueError(str(problem)) from None
    return text


def _expanded(text: str) -> str:
    """The specs in `text`, with the name of a scheme in place of `module:Class`."""
    if ":" not in text:
        return text
    from locant import imports

    try:
        return imports.expanded(text)
    except ImportError as problem:
        raise ValueError(str(problem)) from None


@_checked
def scheme_name(text: str) -> str:
    """The name of one scheme or map, without options."""
    text = _expanded(text)
    parts = notation.parse(text)
    if len(parts) == 1 and parts[0].name in schemes.map_names():
        return parts[0].name
    notation.check_names(parts)
    if len(parts) > 1 or parts[0].options or parts[0].maps:
        raise ValueError(f"expected the name of one scheme, such as {parts[0].name}; got {text!r}")
    return parts[0].name


@_checked
def scheme(text: str) -> str:
    """A scheme or a sum of schemes."""
    text = _expanded(text)
    notation.check_names(notation.parse(text))
    return text


@_checked
def cycle(text: str) -> str:
    """A scheme for all layers, or a cycle over the layers such as rope/rope/rope/nope."""
    text = _expanded(text)
    for each in notation.layers(text):
        notation.check_names(notation.parse(each))
    return text


@_checked
def cycle_or_native(text: str) -> str:
    """A scheme for all layers, a cycle over them, or the word native, perhaps within maps."""
    own, at, maps = (each.strip() for each in text.partition("@"))
    if own == "native":
        if at:
            notation.check_names(notation.parse(f"nope@{maps}"))
        return text
    return cycle(text)


@_checked
def arm(text: str) -> str:
    """An arm of a comparison: a scheme or cycle, native, or native+SCHEME."""
    text = _expanded(text)
    _check_arm(text)
    return text


@_checked
def arms(text: str) -> str:
    """Arms with commas between them."""
    text = _expanded(text)
    for each in notation.split(text):
        _check_arm(each)
    return text


def _check_arm(text: str) -> None:
    for each in notation.layers(text):
        notation.check_names(part for part in notation.parse(each) if part.name != "native")
