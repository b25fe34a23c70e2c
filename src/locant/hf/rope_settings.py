"""The rotary settings of a config as RoPE schemes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from locant.hf.turning import Turn
from locant.schemes import Rope
from locant.schemes.rope import TABLES

NAMES = {"factor": "factor", "original_max_position_embeddings": "original", "beta_fast": "beta_fast",
         "beta_slow": "beta_slow", "low_freq_factor": "low", "high_freq_factor": "high"}  # fmt: skip
"""Entry of `rope_parameters` -> option of RoPE."""
USUAL = 4096
"""Length of a model whose config names none."""


def options_of(turn: Turn, magnitude: float, head_dim: int) -> dict[str, Any]:
    """Returns the options of RoPE that a measurement gives: which coordinates turn, and the factor on them."""
    options: dict[str, Any] = {"theta": 10000.0, "layout": turn.layout, "partial": 2 * turn.pairs / head_dim}
    if turn.first:
        options["first"] = turn.first
    if abs(magnitude - 1) > 1e-6:
        options["attention_factor"] = magnitude
    options["head_dim"] = head_dim
    return options


def closed_forms(config: Any, layer_type: str, options: dict[str, Any], magnitude: float) -> Iterator[Rope]:
    """Yields RoPE with the settings of a config, for every set of settings that may belong to a layer type."""
    for parameters in _settings(config, layer_type):
        kind = parameters.get("rope_type", "default")
        if kind in TABLES:
            continue
        found: dict[str, Any] = {}
        if kind != "default":
            found = {ours: parameters[theirs] for theirs, ours in NAMES.items() if parameters.get(theirs)}
        if kind == "dynamic":
            found["original"] = config.max_position_embeddings
        if kind == "yarn" and "factor" not in found and "original" in found:
            found["factor"] = config.max_position_embeddings / found["original"]
        if kind == "yarn" and not parameters.get("truncate", True):
            found["truncate"] = False
        theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None) or options["theta"]
        known = {**options, "theta": float(theta), "scaling": "none" if kind == "default" else kind, **found}
        head_dim, factor = known.pop("head_dim"), known.pop("attention_factor", None)
        try:
            rope = Rope(**known, head_dim=head_dim)
            if abs(rope.magnitude() - magnitude) > 1e-6:
                rope = Rope(**known, attention_factor=factor or 1.0, head_dim=head_dim)
        except (ValueError, TypeError):  # a scaling that has no closed form here
            continue
        yield rope


def lengths_of(config: Any, layer_type: str) -> list[int]:
    """Returns the lengths at which scalings of a config begin, in increasing order."""
    found = {parameters.get("original_max_position_embeddings") for parameters in _settings(config, layer_type)}
    found |= {getattr(config, name, None) for name in ("max_position_embeddings", "original_max_position_embeddings")}
    return sorted(each for each in found if isinstance(each, int) and each > 1) or [USUAL]


def _settings(config: Any, layer_type: str) -> list[dict[str, Any]]:
    """The settings that may belong to a layer type: its own, or all if it is not known."""
    parameters = getattr(config, "rope_parameters", None) or {}
    inner = {name: each for name, each in parameters.items() if isinstance(each, dict)}
    if layer_type in inner:
        return [inner[layer_type]]
    return list(inner.values()) or [dict(parameters)]
