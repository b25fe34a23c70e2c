"""A table of schemes: parameters for a model's size, and the six properties that the TISA paper compares.

The columns are those of Wennberg & Henter 2021 (arXiv 2106.01950). The values are not copied from the paper. They are
computed from each scheme by these definitions:

    inductive               accepts positions of any size
    data-driven             has trainable parameters
    parameter-efficient     with parameters of its own in each layer, still at most a tenth of a learned absolute table
    translation-invariant   moving every position by the same amount changes nothing
    parallelizable          all positions at once, no recurrence along the sequence
    interpretable           its whole effect is a curve over the offset, per head: a bias or a scalar gain
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from locant.schemes import SCHEMES, Scheme
from locant.spec import scheme as from_spec

PROPERTIES = {
    "inductive": "positions of any size",
    "data-driven": "has trainable parameters",
    "parameter-efficient": "parameters of its own in each layer, still ≤ a tenth of a learned absolute table",
    "translation-invariant": "a common shift of all positions changes nothing",
    "parallelizable": "all positions at once",
    "interpretable": "its whole effect is a curve over the offset",
}
"""The columns of the table, each with a short definition."""


@dataclass(frozen=True)
class SchemeProperties:
    """One scheme in the table."""

    spec: str
    what: str  # the first sentence of its docstring
    shared: int  # parameters if all layers share the scheme
    own: int  # parameters if every layer has its own
    reads: bool  # whether attention needs the hidden states of tokens
    causal_only: bool
    properties: dict[str, bool]


def table(
    *,
    length: int = 512,
    layers: int = 12,
    n_heads: int = 12,
    d_model: int = 768,
    schemes: Mapping[str, type[Scheme]] = SCHEMES,
) -> list[SchemeProperties]:
    """Returns one row per scheme for a model of this size (default: BERT-base)."""
    if d_model % n_heads:
        raise ValueError(f"d_model must be a multiple of n_heads; got d_model={d_model} and n_heads={n_heads}")
    rows = []
    for name, cls in schemes.items():
        # Tables whose size is an option get a row for every offset or position of the model.
        options = {"clip": length - 1, "length": length}
        takes = cls.arguments()
        given = ",".join(f"{option}={value}" for option, value in options.items() if option in takes)
        spec = f"{name}:{given}" if given else name
        scheme = from_spec(spec, n_heads=n_heads, head_dim=d_model // n_heads, d_model=d_model, schemes=schemes)
        rows.append(_row(scheme, length, layers, d_model))
    return rows


def _row(scheme: Scheme, length: int, layers: int, d_model: int) -> SchemeProperties:
    count = sum(parameter.numel() for parameter in scheme.parameters())
    embeds = scheme.embed(torch.zeros(1, dtype=torch.long)) is not None  # added once, before the first layer
    own = count if embeds else count * layers
    terms = scheme.terms(torch.arange(-1, 2))
    curve = set(terms.used()) <= {"bias", "gain"} and (terms.gain is None or terms.gain.ndim == 2)
    return SchemeProperties(
        spec=str(scheme),
        what=(inspect.getdoc(scheme) or "").split(".")[0],
        shared=count,
        own=own,
        reads=scheme.reads,
        causal_only=scheme.causal_only,
        properties={
            "inductive": scheme.max_length is None,
            "data-driven": count > 0,
            "parameter-efficient": own <= 0.1 * length * d_model,
            "translation-invariant": scheme.shift_invariant,
            "parallelizable": scheme.parallel,
            "interpretable": curve and not embeds and not scheme.rotates and not scheme.has_sides,
        },
    )
