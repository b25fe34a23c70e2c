"""Whether the weights of a model fit into memory, and if not, how many of its first layers do.

Weights take as much memory as disk space: transformers opens them in the dtype they were saved in.
"""

from __future__ import annotations

import json
import re
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARE = 0.8
"""Share of the free memory that weights may take. The rest is for activations."""


@dataclass(frozen=True)
class Weights:
    """Sizes in bytes. `layers` is empty where only the total is known (pickled files, other frameworks)."""

    total: int
    layers: tuple[int, ...]  # one entry per layer; encoder and decoder layers of the same number are added


def weigh(name: str | Path) -> Weights | None:
    """Returns the sizes of the weights of a folder or hub name; None if there are no files."""
    single = _file(name, "model.safetensors")
    index = None if single else _file(name, "model.safetensors.index.json")
    if single or index:
        names = [] if index is None else sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [single] if single else [path for each in names if (path := _file(name, each)) is not None]
        sizes: dict[str, int] = {}
        for file in files:
            sizes |= _sizes(file)
        layers: dict[int, int] = {}
        for tensor, size in sizes.items():
            number = re.search(r"\.(\d+)\.", tensor)
            if number:
                layers[int(number[1])] = layers.get(int(number[1]), 0) + size
        return Weights(sum(sizes.values()), tuple(layers[number] for number in sorted(layers)))
    pickled = _file(name, "pytorch_model.bin")
    if pickled:
        return Weights(pickled.stat().st_size, ())
    index = _file(name, "pytorch_model.bin.index.json")
    if index:
        return Weights(int(json.loads(index.read_text())["metadata"]["total_size"]), ())
    return None


def _file(name: str | Path, file: str) -> Path | None:
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    except OSError:
        return None
    return None if found is None else Path(found)


def _sizes(file: Path) -> dict[str, int]:
    """Bytes per tensor, read from the header of a safetensors file: 8 bytes of length, then JSON."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header: dict[str, Any] = json.loads(opened.read(length))
    ends = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: end - start for name, (start, end) in ends.items()}


def available() -> int | None:
    """Returns the free memory in bytes, within the limits of a container; None on systems other than Linux."""
    found = []
    with suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # no such file, or "max": no limit
            found.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    return min(found, default=None)


@dataclass(frozen=True)
class Part:
    """The first `layers` of a model's `of` layers."""

    layers: int
    of: int


def part_that_fits(name: str | Path) -> Part | None:
    """Returns how many layers fit into memory; None: all, or unknown. ValueError if not even one layer fits."""
    weights, free = weigh(name), available()
    if weights is None or free is None or weights.total <= SHARE * free:
        return None
    room, fit = SHARE * free - (weights.total - sum(weights.layers)), 0
    for size in weights.layers:
        room -= size
        if room < 0:
            break
        fit += 1
    if fit == 0 or len(weights.layers) < 2:
        why = "" if weights.layers else "; if they were saved as safetensors, locant could open the first layers alone"
        raise ValueError(
            f"the weights of {name} take {spell(weights.total)}, but only {spell(free)} of memory is free{why}"
        )
    return Part(fit, len(weights.layers))


def spell(size: int) -> str:
    """Returns a size in bytes as text: "1.5 GiB"."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
