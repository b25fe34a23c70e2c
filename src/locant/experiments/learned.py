"""The learned curves of a run: what its trained scheme does with the offset.

A run stores them in its folder when it ends, so a page of results opens no model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locant.analysis.curve import WHAT, Curve, curves
from locant.experiments.statistics import estimate
from locant.runs import files
from locant.runs.untrusted import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CURVES = "curves.json"
REACH = 64
"""Largest offset: beyond it, curves change little from one offset to the next."""
UNREADABLE = (OSError, ValueError, RuntimeError, NotImplementedError, KeyError, IndexError, TypeError, AttributeError)
"""Errors of opening a model and reading its scheme. The curves are then missing, and nothing else."""


@dataclass(frozen=True)
class Learned:
    """The curves of a trained scheme, or the reason why there are none."""

    curves: tuple[tuple[str, Curve], ...] = ()  # each with its place: "layer 2", "all layers" or "token embedding"
    fixed: bool = False  # the scheme has no parameters: the curves are those of its definition
    problem: str = ""


@dataclass(frozen=True)
class SeedCurve:
    """The curve of a layer over the seeds of a scheme: the mean over heads, whose order differs from seed to seed.

    A curve that is added to the logits is shown without its mean over pairs of tokens: a constant has no effect.
    """

    place: str
    what: str
    r: list[int]
    mean: list[float]
    low: list[float | None]  # 95 % interval of the mean over seeds
    high: list[float | None]
    seeds: int


def over_seeds(runs: Sequence[Learned], *, causal: bool) -> list[SeedCurve]:
    """Returns one curve for each layer and quantity that all runs have; none for one run, or a fixed scheme.

    Head 3 of one seed has nothing to do with head 3 of another. The mean over heads does not depend on their order, so
    it can be compared between seeds; the interval of a single head cannot come from seeds.
    """
    if len(runs) < 2 or any(run.fixed or run.problem for run in runs):
        return []
    found = []
    every = [{(place, curve.what): curve for place, curve in run.curves} for run in runs]
    for (place, what), first in every[0].items():
        own = [its.get((place, what)) for its in every]
        same = [curve for curve in own if curve is not None and curve.r == first.r]
        if len(same) < len(runs):  # layers that are equal in one run only, for example
            continue
        r = [offset for offset in first.r if not causal or offset <= 0]
        lines = [_mean_over_heads(curve, r) for curve in same]
        at = [estimate([line[n] for line in lines]) for n in range(len(r))]
        found.append(
            SeedCurve(place, what, r, [x.mean for x in at], [x.low for x in at], [x.high for x in at], len(runs))
        )
    return found


def _mean_over_heads(curve: Curve, r: list[int]) -> list[float]:
    """The mean over heads at some offsets; without its mean over pairs of tokens, if it is added to logits."""
    at = {offset: n for n, offset in enumerate(curve.r)}
    line = [sum(values[at[offset]] for values in curve.values) / len(curve.values) for offset in r]
    if curve.what not in (WHAT["bias"], WHAT["pair"]):
        return line
    pairs = [max(curve.r) + 1 - abs(offset) for offset in r]
    level = sum(count * y for count, y in zip(pairs, line, strict=True)) / sum(pairs)
    return [y - level for y in line]


def curves_of(model: PreTrainedModel, length: int) -> Learned:
    """Returns the curves of a model on the CPU that was trained at `length` tokens; equal layers have one curve."""
    from locant.hf import native

    read: Any = native(model)
    parameters = 0
    by_quantity: dict[str, list[tuple[int, Curve]]] = {}
    for stack in read.stacks:
        embed = [] if stack.embed is None else [(0, stack.embed)]
        for number, scheme in (*embed, *enumerate(stack.layers or [], 1)):
            parameters += sum(parameter.numel() for parameter in scheme.parameters())
            for curve in curves(scheme, min(REACH, length - 1)):
                by_quantity.setdefault(curve.what, []).append((number, curve))
    placed: list[tuple[str, Curve]] = []
    for its in by_quantity.values():
        same = len(its) > 1 and all(curve.values == its[0][1].values for _, curve in its)
        placed += [
            ("all layers" if same else "token embedding" if number == 0 else f"layer {number}", curve)
            for number, curve in (its[:1] if same else its)
        ]
    return Learned(tuple(placed), not parameters)


def store_curves(model: PreTrainedModel, folder: Path, length: int) -> None:
    """Writes the curves of a model into the folder of its run; where it has none that can be read, the reason."""
    try:
        found = curves_of(model, length)
    except UNREADABLE as problem:
        found = Learned(problem=first_line(problem))
    listed = [{"place": place, **dataclasses.asdict(curve)} for place, curve in found.curves]
    content = {"fixed": found.fixed, "problem": found.problem, "curves": listed}
    files.write(folder / CURVES, json.dumps(content, ensure_ascii=False) + "\n")  # on one line: it is long


def stored_curves(folder: Path) -> Learned | None:
    """Returns the curves that a run stored; None where it did not, or where the file is damaged."""
    try:
        data = files.read_json(folder / CURVES)
        placed = tuple((each.pop("place"), Curve(**each)) for each in data["curves"])
        return Learned(placed, data["fixed"], data["problem"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
