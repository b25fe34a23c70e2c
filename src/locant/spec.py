"""Schemes as short strings, for the command line and for files.

    tisa                                 a name
    huang4:clip=64,heads=own             with options
    tisa:kernels=5+learned:length=512    a sum
    rope/rope/rope/nope                  a cycle over the layers (`per_layer` only)

`str(scheme)` prints the string back.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

from torch import nn

from locant.schemes import SCHEMES, Scheme, Sum
from locant.schemes.base import DIMS


def scheme(
    spec: str,
    *,
    n_heads: int | None = None,
    head_dim: int | None = None,
    d_model: int | None = None,
    schemes: Mapping[str, type[Scheme]] | None = None,
) -> Scheme:
    """Builds a scheme from its string and the dimensions of the model.

    >>> scheme("tisa:kernels=5", n_heads=12, head_dim=64, d_model=768)
    """
    if not isinstance(spec, str):
        raise TypeError(f"a spec is a string such as 'tisa:kernels=5', got {type(spec).__name__}: {spec!r}")
    if "/" in spec:
        raise ValueError(f"{spec!r} names a scheme per layer; use locant.per_layer({spec!r}, n_layers=…)")
    if not spec.strip():
        raise ValueError("the spec is empty; write 'nope' for no positions")
    dims = {"n_heads": n_heads, "head_dim": head_dim, "d_model": d_model}
    # A plus sign joins schemes where a name follows; the one in 1e+5 belongs to the number.
    texts = re.split(r"\+(?=\s*[A-Za-z]|\s*$)", spec)
    parts = [_one(text.strip(), dims, SCHEMES if schemes is None else schemes) for text in texts]
    return parts[0] if len(parts) == 1 else Sum(*parts)


def per_layer(
    spec: str | Scheme | Sequence[str | Scheme],
    n_layers: int,
    *,
    n_heads: int | None = None,
    head_dim: int | None = None,
    d_model: int | None = None,
) -> nn.ModuleList:
    """One scheme per layer: a list with one entry each, or a string whose `/`-separated entries repeat.

    >>> per_layer("rope/rope/rope/nope", 12, n_heads=12, head_dim=64, d_model=768)  # NoPE in every 4th layer

    Every string makes a scheme of its own; a scheme object given once is shared by the layers.
    """
    if n_layers < 1:
        raise ValueError(f"n_layers must be at least 1, got {n_layers}")
    if isinstance(spec, str):
        cycle: list[str | Scheme] = list(spec.split("/"))
        entries = [cycle[layer % len(cycle)] for layer in range(n_layers)]
    elif isinstance(spec, Scheme):
        entries = [spec] * n_layers
    else:
        entries = list(spec)
        if len(entries) != n_layers:
            raise ValueError(f"a list of schemes needs one per layer: got {len(entries)} for {n_layers} layers")
    return nn.ModuleList(
        [
            entry if isinstance(entry, Scheme) else scheme(entry, n_heads=n_heads, head_dim=head_dim, d_model=d_model)
            for entry in entries
        ]
    )


def _one(text: str, dims: Mapping[str, int | None], schemes: Mapping[str, type[Scheme]]) -> Scheme:
    name, _, rest = text.partition(":")
    name = name.strip().lower()
    if not name:
        raise ValueError(
            "a scheme without a name: write NAME:option=value, joined by +, such as tisa:kernels=5+learned"
        )
    if name not in schemes:
        raise ValueError(f"unknown scheme {name!r}{_did_you_mean(name, schemes)}; there is: {', '.join(schemes)}")
    cls = schemes[name]
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
    for item in filter(None, (item.strip() for item in rest.split(","))):
        option, equals, value = (piece.strip() for piece in item.partition("="))
        if option not in options:
            known = ", ".join(options) or "none"
            raise ValueError(f"{name} has no option {option!r}{_did_you_mean(option, options)}; its options: {known}")
        if not equals or not value:
            raise ValueError(f"{name}: write options as name=value, got {item!r}")
        if option in given:
            raise ValueError(f"{name}: option {option!r} is given twice in {text!r}")
        given[option] = _value(name, option, value, types[option])

    for dim in DIMS:
        if dim in arguments:
            if dims[dim] is None:
                raise ValueError(f"{name} needs {dim}; pass {dim}=… to locant.scheme")
            given[dim] = dims[dim]
    return cls(**given)


def _value(name: str, option: str, text: str, kind: Any) -> Any:
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
            raise ValueError(f"{name}: {option} must be {expected}, got {text!r}") from None
    return text


def _did_you_mean(word: str, known: Any) -> str:
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""
