"""Heads of TISA as local or global, by the curve f(r) that was added to their logits.

Without any content, attention over the offsets would be softmax(f). A head is local if at least half of that weight
lies within three tokens of the query, and global if that share is at most twice that of uniform attention. All others
are between the two.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from locant.analysis.curve import curves
from locant.experiments.learned import stored_curves
from locant.experiments.statistics import estimate
from locant.papers.claim import Cell, Measured, Part, Table
from locant.papers.place import Place
from locant.papers.steps import Input
from locant.spec import scheme

NEAR = 3
"""Largest |r| of a near token."""
LOCAL_SHARE = 0.5
"""Least weight on near tokens of a local head."""
GLOBAL_RATIO = 2.0
"""Most weight on near tokens of a global head, as a multiple of that under uniform attention."""
LOCAL, BETWEEN, GLOBAL = "local", "between", "global"


@dataclass(frozen=True)
class HeadCurve:
    """f(r) of one head."""

    layer: str
    head: int  # from 1
    r: Sequence[int]
    values: Sequence[float]

    @property
    def near(self) -> float:
        """Share of softmax(f) within NEAR tokens."""
        top = max(self.values)
        weights = [math.exp(value - top) for value in self.values]
        return math.fsum(w for w, r in zip(weights, self.r, strict=True) if abs(r) <= NEAR) / math.fsum(weights)

    @property
    def kind(self) -> str:
        """LOCAL, GLOBAL or BETWEEN."""
        uniform = sum(abs(r) <= NEAR for r in self.r) / len(self.r)
        if self.near >= LOCAL_SHARE:
            return LOCAL
        return GLOBAL if self.near <= GLOBAL_RATIO * uniform else BETWEEN


def shares(heads: Iterable[HeadCurve]) -> dict[str, float]:
    """Returns the share of the heads of each kind."""
    found = Counter(head.kind for head in heads)
    total = sum(found.values())
    return {kind: found[kind] / total if total else 0.0 for kind in (LOCAL, BETWEEN, GLOBAL)}


def rarer(heads: Iterable[HeadCurve]) -> float:
    """Returns the share of the rarer of the two kinds, local and global: 0 if one of them does not occur."""
    found = shares(heads)
    return min(found[LOCAL], found[GLOBAL])


def trained_heads(folder: Path, *, causal: bool) -> list[HeadCurve]:
    """Returns the curves that a run of TISA stored in its folder. A causal model has no offsets above 0."""
    found = stored_curves(folder)
    if found is None or not found.curves:
        raise ValueError(f"{folder} has no stored curves{': ' + found.problem if found and found.problem else ''}")
    return [
        _used(HeadCurve(place, number, curve.r, values), causal)
        for place, curve in found.curves
        if curve.field == "bias"
        for number, values in enumerate(curve.values, 1)
    ]


@dataclass(frozen=True)
class TrainedCurves:
    """Reads the curves of trained models; the function of a `Measuring` step."""

    runs: tuple[Input, ...]
    causal: bool

    def __call__(self, at: Place) -> dict[str, Any]:
        """Returns the curves of all heads, model by model."""
        found = [trained_heads(run.path(at), causal=self.causal) for run in self.runs]
        return {"models": [[dataclasses.asdict(head) for head in heads] for heads in found]}

    def cost(self, at: Place) -> float:
        """Returns the floating-point operations: reading some files."""
        return 1e9


def initial_heads(spec: str, layers: int, heads: int, reach: int, seed: int, *, causal: bool) -> list[HeadCurve]:
    """Returns the curves of freshly initialised schemes, one per layer: the control."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [
            _used(HeadCurve(f"layer {layer}", number, curve.r, values), causal)
            for layer in range(1, layers + 1)
            for curve in curves(scheme(spec, n_heads=heads), reach)
            for number, values in enumerate(curve.values, 1)
        ]


def _used(head: HeadCurve, causal: bool) -> HeadCurve:
    """The part of the curve that a causal mask leaves: the rest has no effect and is never trained."""
    kept = [(r, value) for r, value in zip(head.r, head.values, strict=True) if r <= 0 or not causal]
    return HeadCurve(head.layer, head.head, [r for r, _ in kept], [value for _, value in kept])


Curves = Mapping[int, Sequence[HeadCurve]]
"""Seed -> curves of all heads."""


def head_labels(trained: Curves, initial: Curves, asks: str) -> Measured:
    """Returns the shares of local and global heads, given the curves by seed, trained and at initialisation."""
    gaps = [rarer(heads) - rarer(initial[seed]) for seed, heads in trained.items()]
    kinds = (LOCAL, BETWEEN, GLOBAL)
    share_rows: list[tuple[Cell, ...]] = []
    for when, found in (("trained", trained), ("initial", initial)):
        for kind in kinds:
            at = estimate([shares(heads)[kind] for heads in found.values()])
            share_rows.append((when, kind, at.mean, at.low, at.high))
    head_rows = [
        (when, seed, head.layer, head.head, head.near, head.kind)
        for when, found in (("trained", trained), ("initial", initial))
        for seed, heads in found.items()
        for head in heads
    ]
    first = min(trained)
    curve_rows = [
        (head.layer, head.head, head.kind, r, value, start)
        for head, other in zip(trained[first], initial[first], strict=True)
        for r, value, start in zip(head.r, head.values, other.values, strict=True)
    ]
    said = ", ".join(f"{mean:.0%} {kind}" for when, kind, mean, *_ in share_rows if when == "trained")
    return Measured(
        [Part(asks, f"{len(trained)} models", estimate(gaps))],
        {
            "shares": Table(("when", "kind", "share", "low", "high"), share_rows),
            "heads": Table(("when", "seed", "layer", "head", "near", "kind"), head_rows),
            "curves": Table(("layer", "head", "kind", "r", "f", "initial f"), curve_rows),
        },
        [f"Trained heads: {said}."],
    )
