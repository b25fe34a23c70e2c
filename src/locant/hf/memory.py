"""Whether the weights of a model fit into memory, and if not, how many of its first layers do.

Weights take as much memory as disk space: transformers opens them in the dtype they were saved in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from locant.hf import checkpoint
from locant.runs.machine_memory import available, spell

SHARE = 0.8
"""Share of the free memory that weights may take. The rest is for activations."""


@dataclass(frozen=True)
class Weights:
    """Sizes in bytes. `layers` is empty where only the total is known (pickled files, other frameworks)."""

    total: int
    layers: tuple[int, ...]  # one entry per layer; encoder and decoder layers of the same number are added


def weigh(name: str | Path) -> Weights | None:
    """Returns the sizes of the weights of a folder or hub name; None if there are no files."""
    found = checkpoint.weights_of(name)
    if found is None:
        return None
    layers: dict[int, int] = {}
    for tensor, entry in found.tensors.items():
        number = re.search(r"\.(\d+)\.", tensor)
        if number:
            layers[int(number[1])] = layers.get(int(number[1]), 0) + entry.size
    return Weights(found.size, tuple(layers[number] for number in sorted(layers)))


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
