"""A RoPE scheme as `rope_parameters` of a config: the inverse of `hf/rope_settings.py`."""

from __future__ import annotations

from typing import Any

from locant import notation
from locant.exporting.refusal import CannotExport
from locant.exporting.source import Source
from locant.hf.rope_settings import NAMES

OPTIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "yarn": ("factor", "original", "beta_fast", "beta_slow", "attention_factor", "truncate"),
    "llama3": ("factor", "original", "low", "high"),
}
"""Scaling -> options of the scheme that transformers' formula has too. Others are computed otherwise there."""
DEFAULTS = {"original": "2048", "beta_fast": "32", "beta_slow": "1", "low": "1", "high": "4", "factor": "1"}
"""Values of options that a spec leaves out. Transformers has others."""


def rope_parameters(spec: str, source: Source, head_dim: int) -> dict[str, Any]:
    """Returns the rotary settings of a config for a scheme in its spelling; CannotExport if there are none."""
    (part,) = notation.parse(spec)
    given = {name: value for name, value in part.options.items() if not _is_default(name, value)}
    if part.maps:
        raise CannotExport(f"transformers has no rotary settings for positions within a map: {spec}")
    scaling = given.pop("scaling", "none")
    theta = float(given.pop("theta", "10000"))
    if scaling == "ntk":  # NTK is plain RoPE with another theta
        factor = float(given.pop("factor", "1"))
        theta, scaling = theta * factor ** (head_dim / (head_dim - 2)), "none"
    known = OPTIONS.get(scaling)
    if known is None or given.keys() - set(known):
        what = ", ".join(sorted(given.keys() - set(known or ()))) or f"scaling={scaling}"
        raise CannotExport(f"no rotary settings that are written here compute {spec} ({what})")
    found: dict[str, Any] = {"rope_type": "default" if scaling == "none" else scaling, "rope_theta": theta}
    theirs = {ours: name for name, ours in NAMES.items()}
    for name in known:
        value = given.get(name, DEFAULTS.get(name))
        if value is not None:
            found[theirs.get(name, name)] = _value(name, value)
    return found


def _value(name: str, value: str) -> Any:
    if name == "truncate":
        return value == "true"
    return int(value) if name == "original" else float(value)


def _is_default(name: str, value: str) -> bool:
    """Whether an option has the value that every Llama has: then nothing needs to say so."""
    return (name, value) in (("layout", "half"), ("partial", "1"), ("first", "0"), ("scaling", "none"))
