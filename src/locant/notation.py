"""The syntax of spec strings, from which `locant.spec` builds schemes.

    tisa                                 a name
    huang4:clip=64,heads=own             with options
    tisa:kernels=5+learned:length=512    a sum
    rope@grouped:size=4                  a scheme at mapped positions; maps can follow each other
    rope/rope/rope/nope                  a cycle over the layers
    t5:shared=layers                     one scheme for all layers that name it
    tisa,huang4:clip=64,heads=own,nope   a list of three

Nothing here imports torch, so the command line rejects an unknown scheme at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from locant import schemes

LONGEST = 10_000
"""Characters of the longest spec for one layer."""
SHARED = ("shared", "layers")
"""The option of any scheme that makes all layers share it, and its value."""
MOST_MAPS = 8
"""Maps of one scheme: each is a module around the next."""


class Part(NamedTuple):
    """One scheme of a sum, or a map."""

    name: str
    options: dict[str, str]  # as written; spec.py converts the values
    maps: tuple[Part, ...] = ()  # of a scheme, the first one innermost
    shared: bool = False  # all layers that name it have one scheme, with one set of parameters


def parse(spec: str) -> list[Part]:
    """Returns the parts of a spec for one layer: one scheme, or the terms of a sum."""
    if not isinstance(spec, str):
        raise TypeError(f"a spec is a string such as 'tisa:kernels=5', got {type(spec).__name__}: {spec!r}")
    if len(spec) > LONGEST:
        raise ValueError(f"the spec has {len(spec):,} characters, more than {LONGEST:,}; it begins with {spec[:40]!r}")
    if "/" in spec:
        raise ValueError(f"{spec!r} names a scheme per layer; use locant.per_layer({spec!r}, n_layers=…)")
    if not spec.strip():
        raise ValueError("the spec is empty; write 'nope' for no positions")
    # A plus sign joins schemes where a name follows; the one in 1e+5 belongs to the number.
    return [_mapped(text) for text in re.split(r"\+(?=\s*[A-Za-z]|\s*$)", spec)]


def check_unshared(spec: str, parts: Iterable[Part]) -> None:
    """Raises a ValueError if a part is shared by layers, where there is one scheme and no layers."""
    if any(part.shared for part in parts):
        raise ValueError(f"{spec!r} names a scheme that layers share; use locant.per_layer({spec!r}, n_layers=…)")


def layers(spec: str) -> list[str]:
    """Returns the specs of a cycle over the layers; one spec if there is no cycle."""
    return spec.split("/")


def split(text: str) -> list[str]:
    """Returns the specs of a list: a comma belongs to a scheme if an option follows it."""
    found: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if not piece:
            raise ValueError(f"{text[:80]!r} has an empty place between two commas; write a scheme there")
        if found and re.match(r"[a-z_0-9]+\s*=", piece):
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    return found


NOT_PAIRS = "That is not the softmax attention over pairs of tokens that attend computes"
OUTSIDE = {
    "path": "PaTH puts a product of Householder matrices, one for every token between them, into the product of a "
    f"pair. {NOT_PAIRS}",
    "stick-breaking": "every key takes a share of what nearer keys have left, without a softmax. " + NOT_PAIRS,
}
"""Published position schemes that locant does not have, and why."""


def check_names(
    parts: Iterable[Part], known: Collection[str] | None = None, maps: Collection[str] | None = None
) -> None:
    """Raises a ValueError for a part whose name is not in `known`, or whose maps are not in `maps`.

    By default these are the names of all schemes and of all maps.
    """
    known = schemes.names() if known is None else known
    maps = schemes.map_names() if maps is None else maps
    for part in parts:
        if part.name in maps and part.name not in known:
            raise ValueError(f"{part.name} maps the positions of a scheme; write SCHEME@{part.name}")
        if part.name not in known:
            if part.name in OUTSIDE:
                raise ValueError(f"{part.name} is not a scheme of locant: {OUTSIDE[part.name]}")
            hint = did_you_mean(part.name, known)
            raise ValueError(f"unknown scheme {part.name!r}{hint}; known schemes: {', '.join(known)}")
        for name in (each.name for each in part.maps):
            if name in known and name not in maps:
                raise ValueError(f"{name} is a scheme, and a map must follow @: {', '.join(maps)}; join schemes by +")
            if name not in maps:
                raise ValueError(f"unknown map {name!r}{did_you_mean(name, maps)}; known maps: {', '.join(maps)}")


def names(spec: str) -> set[str]:
    """Returns the names of all schemes and maps in a spec for one layer."""
    return {each.name for part in parse(spec) for each in (part, *part.maps)}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns the nearest known word as a question in brackets, or nothing if none is near."""
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def _mapped(text: str) -> Part:
    """A scheme and its maps."""
    first, *maps = (piece.strip() for piece in text.split("@"))
    if not all(maps):
        raise ValueError(
            f"{text.strip()[:80]!r} has an @ without a map after it; write SCHEME@MAP, such as rope@grouped"
        )
    if len(maps) > MOST_MAPS:
        raise ValueError(f"a scheme with {len(maps)} maps; at most {MOST_MAPS} can follow each other")
    found = tuple(map(_part, maps))
    if any(each.shared for each in found):
        raise ValueError(f"{text.strip()[:80]!r}: {SHARED[0]}={SHARED[1]} belongs to the scheme, before the @")
    return _part(first)._replace(maps=found)


def _part(text: str) -> Part:
    name, _, rest = text.partition(":")
    name = name.strip().lower()
    if not name:
        raise ValueError(
            "a scheme without a name: write NAME:option=value, joined by +, such as tisa:kernels=5+learned"
        )
    options: dict[str, str] = {}
    for item in filter(None, (item.strip() for item in rest.split(","))):
        option, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or not value:
            raise ValueError(f"{name}: write options as name=value, got {item!r}")
        if option in options:
            raise ValueError(f"{name}: option {option!r} is given twice in {text!r}")
        options[option] = value
    shared = options.get(SHARED[0]) == SHARED[1]
    if shared:
        del options[SHARED[0]]
    return Part(name, options, shared=shared)
