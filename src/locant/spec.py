"""Schemes from short strings, for the command line and for files.

    tisa                                 a name
    huang4:clip=64,heads=own             with options
    tisa:kernels=5+learned:length=512    a sum
    rope@grouped:size=4                  a scheme at mapped positions (see `schemes/map.py`)
    rope/rope/rope/nope                  a cycle over the layers (`per_layer` only)
    t5:shared=layers                     one scheme for all layers that name it (`per_layer` only)

`str(scheme)` gives the string back. The syntax is in `locant.notation`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

import torch
from torch import nn

from locant import notation
from locant.schemes import MAPS, SCHEMES, Map, Scheme, Sum
from locant.schemes.base import DIMS

LARGEST = 2**30
"""Numbers of the largest scheme: 4 GiB in float32. A mistyped option must not take all memory."""


def scheme(
    spec: str,
    *,
    n_heads: int | None = None,
    head_dim: int | None = None,
    d_model: int | None = None,
    schemes: Mapping[str, type[Scheme]] | None = None,
    maps: Mapping[str, type[Map]] | None = None,
) -> Scheme:
    """Builds a scheme from its string and the dimensions of the model.

    >>> scheme("tisa:kernels=5", n_heads=12, head_dim=64, d_model=768)

    `schemes` and `maps` have a class for each name; by default, they are `locant.SCHEMES` and `locant.schemes.MAPS`.
    """
    parts = notation.parse(spec)
    notation.check_unshared(spec, parts)
    dims = {"n_heads": n_heads, "head_dim": head_dim, "d_model": d_model}
    return _sum(_parts(parts, dims, SCHEMES if schemes is None else schemes, MAPS if maps is None else maps))


def _parts(
    parts: Sequence[notation.Part],
    dims: Mapping[str, int | None],
    known: Mapping[str, type[Scheme]],
    maps: Mapping[str, type[Map]],
) -> list[Scheme]:
    notation.check_names(parts, known, maps)
    return [mapped(_build(part, known[part.name], dims), part, maps) for part in parts]


def _sum(built: Sequence[Scheme]) -> Scheme:
    return built[0] if len(built) == 1 else Sum(*built)


def mapped(inner: Scheme, part: notation.Part, maps: Mapping[str, type[Map]] | None = None) -> Scheme:
    """Returns a scheme within the maps that a part of a spec names."""
    maps = MAPS if maps is None else maps
    for each in part.maps:
        inner = _build(each, maps[each.name], {}, inner)
    return inner


def per_layer(
    spec: str | Scheme | Sequence[str | Scheme],
    n_layers: int,
    *,
    n_heads: int | None = None,
    head_dim: int | None = None,
    d_model: int | None = None,
) -> nn.ModuleList:
    """Builds one scheme per layer from a list with one entry each, or a string whose `/`-separated entries repeat.

    >>> per_layer("rope/rope/rope/nope", 12, n_heads=12, head_dim=64, d_model=768)  # NoPE in every 4th layer

    Each layer gets a new scheme from its string; a scheme object is shared by the layers it is given for. All layers
    whose string says `shared=layers` ("t5:shared=layers") and is the same get one scheme, with one set of parameters.
    """
    if n_layers < 1:
        raise ValueError(f"n_layers must be at least 1, got {n_layers}")
    if isinstance(spec, str):
        cycle = notation.layers(spec)
        entries: list[str | Scheme] = [cycle[layer % len(cycle)] for layer in range(n_layers)]
    elif isinstance(spec, Scheme):
        entries = [spec] * n_layers
    else:
        entries = list(spec)
        if len(entries) != n_layers:
            raise ValueError(f"a list of schemes needs one per layer: got {len(entries)} for {n_layers} layers")
    dims = {"n_heads": n_heads, "head_dim": head_dim, "d_model": d_model}
    shared: dict[str, Scheme] = {}
    return nn.ModuleList([entry if isinstance(entry, Scheme) else _of_layer(entry, dims, shared) for entry in entries])


def _of_layer(spec: str, dims: Mapping[str, int | None], shared: dict[str, Scheme]) -> Scheme:
    """The scheme of one layer: a new one, or the one in `shared` if the layers share it."""
    parts = notation.parse(spec)
    if not any(part.shared for part in parts):
        return _sum(_parts(parts, dims, SCHEMES, MAPS))
    if spec not in shared:
        built = _parts(parts, dims, SCHEMES, MAPS)
        for part, each in zip(parts, built, strict=True):
            # What is added to the token embeddings exists once in any case.
            if not part.shared and each.has_attention_parameters:
                raise ValueError(
                    f"{spec!r}: layers share a scheme as a whole, and {part.name} has parameters in attention; write "
                    f"{part.name}:{'='.join(notation.SHARED)} too, or share none"
                )
        shared[spec] = _sum(built)
    return shared[spec]


def _build(part: notation.Part, cls: type[Scheme], dims: Mapping[str, int | None], *inner: Scheme) -> Scheme:
    """A scheme, or a map of the scheme `inner`."""
    name = part.name
    if cls.name() != name:
        raise ValueError(
            f"the class {cls.__name__} is registered as {name!r}, but its spec would read {cls.name()!r}: "
            f"register it under that name, in small letters, or rename the class"
        )
    arguments = cls.arguments()
    types = get_type_hints(cls.__init__)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    options = [name for name, p in arguments.items() if name not in DIMS and p.kind not in variadic]

    given: dict[str, Any] = {}
    for option, value in part.options.items():
        if option not in options:
            hint, known = notation.did_you_mean(option, options), ", ".join(options) or "none"
            raise ValueError(f"{name} has no option {option!r}{hint}; its options: {known}")
        given[option] = _value(name, option, value, types[option])
    for dim in DIMS:
        if dim in arguments:
            if dims[dim] is None:
                raise ValueError(f"{name} needs {dim}; pass {dim}=… to locant.scheme")
            given[dim] = dims[dim]
    if not inner:  # a map has no parameters of its own
        _check_size(name, cls, given)
    return cls(*inner, **given)


def _check_size(name: str, cls: type[Scheme], given: Mapping[str, Any]) -> None:
    """Raises ValueError if a scheme would be too large. It is then built without memory first, and counted."""
    sizes = [value for value in given.values() if type(value) is int and value > 1]
    if math.prod(sizes) <= LARGEST:
        return
    try:
        with torch.device("meta"):
            built = cls(**given)
    except (RuntimeError, TypeError, OverflowError):  # torch counts with 64 bits
        raise ValueError(f"{name} with {_spell(given)} has more numbers than torch can count") from None
    count = sum(x.numel() for x in (*built.parameters(), *built.buffers()))
    if count > LARGEST:
        raise ValueError(f"{name} with {_spell(given)} would have {count:,} numbers; at most {LARGEST:,} are allowed")


def _spell(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in given.items())


def _value(name: str, option: str, text: str, kind: Any) -> Any:
    """Converts the text of an option to the type that the scheme's constructor declares."""
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ValueError(f"{name}: {option} must be true or false, got {text!r}")
    kinds = get_args(kind)  # of int | None
    if type(None) in kinds:
        if text.lower() == "none":
            return None
        kind = next((k for k in kinds if k is not type(None)), str)
    if kind is int or kind is float:
        try:
            return kind(text)
        except ValueError:
            expected = "a whole number" if kind is int else "a number"
            raise ValueError(f"{name}: {option} must be {expected}, got {text[:40]!r}") from None
    return text
