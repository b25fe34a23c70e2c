"""Places of schemes in a model, in words."""

from __future__ import annotations


def place_of(stack: str, layers: list[int]) -> str:
    """Returns "layer 2", "decoder, layers 1–6" or "layers 1, 3, 5"."""
    run = layers == list(range(layers[0], layers[-1] + 1))
    spelt = f"{layers[0]}–{layers[-1]}" if run and len(layers) > 1 else ", ".join(map(str, layers))
    return f"{stack}{', ' if stack else ''}layer{'s' if len(layers) > 1 else ''} {spelt}"
