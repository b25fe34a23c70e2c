"""Random scheme strings: every scheme with random options, and sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True)
class Size:
    """The sizes that options depend on."""

    h: int
    d: int
    groups: int = 1


Options = dict[str, Any]


def _table(rng: Random, size: Size) -> Options:
    return {"clip": rng.choice([1, 2, 3, 5, 8, 17, 64]), "heads": rng.choice(["own", "shared"])}


def _shaw(rng: Random, size: Size) -> Options:
    return {**_table(rng, size), "values": rng.random() < 0.6}


def _tisa2(rng: Random, size: Size) -> Options:
    low = rng.choice([4.0, 8.0, 16.0])
    return {
        "kernels": rng.randint(0, 5),
        "free": rng.randint(0, size.h),
        "min_field": low,
        "max_field": low * rng.choice([1, 4, 64]),
    }


def _t5(rng: Random, size: Size) -> Options:
    both = rng.random() < 0.6
    buckets = 4 * rng.randint(1, 4)
    exact = buckets // 4 if both else buckets // 2
    return {
        "buckets": buckets,
        "max_distance": exact + rng.choice([1, 2, 5, 16, 100]),
        "bidirectional": both,
    }


def _deberta(rng: Random, size: Size) -> Options:
    buckets = 2 * rng.randint(2, 6)
    return {"buckets": buckets, "max_distance": buckets // 2 + rng.choice([2, 3, 8, 50])}


def _rope(rng: Random, size: Size) -> Options:
    scaling = rng.choice(["none", "none", "linear", "ntk", "dynamic", "yarn", "llama3"])
    options: Options = {"theta": rng.choice([50.0, 500.0, 10000.0]), "layout": rng.choice(["half", "interleaved"])}
    least = 4 if scaling in ("ntk", "dynamic") else 2
    if size.d < least:
        return options
    rotated = 2 * rng.randint(least // 2, size.d // 2)
    if int(size.d * (rotated / size.d)) == rotated and rng.random() < 0.5:
        options["partial"] = rotated / size.d
    if scaling != "none":
        options |= {"scaling": scaling, "factor": rng.choice([1.5, 2.0, 8.0])}
    if scaling in ("dynamic", "yarn", "llama3"):
        options["original"] = rng.choice([6, 16, 64, 2048])
    if scaling == "yarn":
        options |= {"beta_fast": rng.choice([8.0, 32.0]), "beta_slow": rng.choice([0.5, 1.0])}
    if scaling == "llama3":
        options |= {"low": rng.choice([0.5, 1.0]), "high": rng.choice([2.0, 4.0])}
    return options


def _xpos(rng: Random, size: Size) -> Options:
    return {
        "theta": rng.choice([50.0, 10000.0]),
        "base": rng.choice([4.0, 32.0, 512.0]),
        "gamma": rng.choice([0.1, 0.4, 2.0]),
        "layout": rng.choice(["half", "interleaved"]),
    }


def _cope(rng: Random, size: Size) -> Options:
    return {"positions": rng.choice([2, 3, 5, 16]), "heads": rng.choice(["own", "shared"])}


def _inkling(rng: Random, size: Size) -> Options:
    options: Options = {"extent": rng.choice([1, 4, 9, 40]), "width": rng.choice([1, 3, 8, 17])}
    if rng.random() < 0.5:
        options |= {"alpha": rng.choice([0.1, 0.7]), "n0": rng.choice([1, 3, 64])}
    return options


def _logn(rng: Random, size: Size) -> Options:
    return {"n0": rng.choice([2, 3, 16, 512]), "learned": rng.random() < 0.5}


def _fope(rng: Random, size: Size) -> Options:
    own = size.groups == 1 or rng.random() < 0.05  # grouped heads share a key
    return {
        "theta": rng.choice([50.0, 10000.0]),
        "length": rng.choice([7, 40, 512]),
        "spread": rng.choice([0.1, 0.5]),
        "seed": rng.randint(0, 9),
        "heads": rng.choice(["own", "shared"]) if own else "shared",
        "rest": rng.choice(["still", "turned"]),
    }


OPTIONS: dict[str, Callable[[Random, Size], Options]] = {
    "nope": lambda rng, size: {},
    "learned": lambda rng, size: {"length": rng.choice([1, 8, 64, 300])},
    "sinusoidal": lambda rng, size: {"theta": rng.choice([50.0, 10000.0]), "amplitude": rng.choice([1.0, 0.02])},
    "first": lambda rng, size: {},
    "shaw": _shaw,
    "xl": lambda rng, size: {"theta": rng.choice([50.0, 10000.0])},
    "huang1": _table,
    "huang2": _table,
    "huang3": _table,
    "huang4": _table,
    "tisa": lambda rng, size: {"kernels": rng.choice([0, 1, 3, 5, 8])},
    "tisa2": _tisa2,
    "t5": _t5,
    "toeplitz": lambda rng, size: {"clip": rng.choice([0, 1, 3, 8, 128])},
    "alibi": lambda rng, size: {"slopes": rng.choice(["fixed", "learned"])},
    "rope": _rope,
    "xpos": _xpos,
    "kerple": lambda rng, size: {"kind": rng.choice(["log", "power"])},
    "sandwich": lambda rng, size: {"width": 2 * rng.randint(1, 20), "theta": rng.choice([50.0, 10000.0])},
    "fire": lambda rng, size: {"width": rng.choice([1, 4, 6]), "length": rng.choice([1, 4, 64])},
    "cope": _cope,
    "deberta": _deberta,
    "inkling": _inkling,
    "fox": lambda rng, size: {"two_sided": rng.random() < 0.5},
    "grape": lambda rng, size: {"two_sided": rng.random() < 0.5},
    "pope": lambda rng, size: {"theta": rng.choice([50.0, 10000.0])},
    "fade": lambda rng, size: {},
    "logn": _logn,
    "fope": _fope,
    "dape": lambda rng, size: {"bias": rng.choice(["alibi", "kerple"]), "width": rng.choice([1, 3, 5])},
    "local": lambda rng, size: {"window": rng.choice([0, 1, 3, 8, 127]), "first": rng.random() < 0.7},
}
"""Random options of every scheme. A scheme that is missing here fails a test."""
NEW = ("inkling", "fox", "grape", "pope", "fade", "logn", "fope", "dape", "local")
"""The schemes of 2025–26. With `--new`, every case has one of them or a map."""

MAPS: dict[str, Callable[[Random], Options]] = {
    "interpolated": lambda rng: {"factor": rng.choice([0.5, 1.5, 2.0, 4.0])},
    "grouped": lambda rng: {"size": rng.choice([1, 2, 3, 4])},
    "recurrent": lambda rng: {"length": rng.choice([1, 3, 8, 64])},
    "selfextend": lambda rng: {"window": rng.choice([4, 8, 20, 128]), "size": rng.choice([1, 2, 3, 4])},
}
"""Random options of every map."""
NOT_MAPPED: dict[str, tuple[str, ...]] = {
    "interpolated": ("fox", "logn", "dape", "local"),
    "grouped": ("fox", "logn", "local"),
    "recurrent": ("fox", "logn", "xpos", "cope", "local"),
    "selfextend": ("fox", "logn", "local", "learned", "sinusoidal", "first", "fire", "cope", "dape", "xpos"),
}
"""Schemes that a map refuses; `xpos` with `selfextend` is not drawn, because its range is that of several calls."""
MAPPED = 0.15
"""Share of schemes with a map."""
TURNING = ("rope", "xpos", "pope", "fope")

WEIGHTS = {"nope": 1, "learned": 1, "sinusoidal": 1, "first": 1, "rope": 5}
"""How often a scheme is drawn; 3 for those that are not listed."""

NEEDS_EVEN_HEADS = ("rope", "xpos", "fope")


def draw_names(rng: Random) -> list[str]:
    """One scheme, or with a chance of a quarter two or three that can be added."""
    names = list(OPTIONS)
    weights = [WEIGHTS.get(name, 3) for name in names]
    while True:
        drawn = rng.choices(names, weights, k=rng.choices([1, 2, 3], [75, 18, 7])[0])
        if _can_be_added(drawn, "pope"):
            return drawn


def _can_be_added(names: list[str], turner: str) -> bool:
    """Whether a sum accepts these schemes: levels of one, and beside `turner` no other rotation or vector gain."""
    if sum(name in ("fox", "grape", "local") for name in names) > 1:
        return False
    return turner not in names or (sum(name in TURNING for name in names) == 1 and "huang3" not in names)


def add_maps(specs: list[str], rng: Random) -> list[str]:
    """The schemes of a sum, some of them mapped."""
    names = [spec.partition(":")[0] for spec in specs]
    mapped = []
    for name, spec in zip(names, specs, strict=True):
        allowed = [map_name for map_name in MAPS if name not in NOT_MAPPED[map_name]]
        if name in TURNING and ("scaling=dynamic" in spec or not _can_be_added(names, name)):
            allowed = [map_name for map_name in allowed if map_name != "selfextend"]
        if allowed and rng.random() < MAPPED:
            map_name = rng.choice(allowed)
            spec = f"{spec}@{map_name}:{_spelled(MAPS[map_name](rng))}"
        mapped.append(spec)
    return mapped


def spell(name: str, rng: Random, size: Size) -> str:
    """A scheme string with random options."""
    options = OPTIONS[name](rng, size)
    return f"{name}:{_spelled(options)}" if options else name


def _spelled(options: Options) -> str:
    return ",".join(f"{key}={str(value).lower()}" for key, value in options.items())
