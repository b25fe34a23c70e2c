"""Everything the analyses say about one model, stage by stage: `locant inspect`.

A stage that cannot be made for a model (no table, too short a text) leaves a notice in its place, and the rest goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from locant.analysis import behaviour, curve, distance, invariance, probe, text, variance
from locant.hf.encoder import encoder_of
from locant.hf.facts import has_decoder, is_causal, limits
from locant.hf.plan import plan_of
from locant.hf.readout import native

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH, SEQUENCES = 128, 24
PROBE_LENGTH, PROBE_STEPS, PROBE_BATCH, PROBE_TESTS = 64, 100, 8, 4
LENGTHS = (32, 64, 128, 256, 512, 1024)
GRAM = 128
"""Positions at which E Eᵀ is kept; a table of 32,768 positions would have 10⁹ inner products."""


@dataclass
class Inspection:
    """The tables of one model; None or empty where a stage could not be made."""

    name: str
    facts: dict[str, str]
    notes: dict[str, list[str]] = field(default_factory=dict)  # what is to be said, and of which parts
    invariances: list[invariance.Row] = field(default_factory=list)
    table: Tensor | None = None
    gram_positions: list[int] = field(default_factory=list)  # at most GRAM of the positions of the table, and
    gram: Tensor | None = None  # E Eᵀ over them
    structure: invariance.Structure | None = None
    # Of each scheme, with where it is ("layer 2", or "decoder, layers 1–6" where they share it):
    curves: list[tuple[str, curve.Curve]] = field(default_factory=list)
    kernels: list[tuple[str, curve.Kernels]] = field(default_factory=list)  # what a TISA is the sum of
    vectors: list[tuple[str, Tensor]] = field(default_factory=list)  # [101, D]: its table for offsets −50 … 50
    layers: list[distance.Layer] = field(default_factory=list)
    first_layer: Tensor | None = None  # [L, L]: mean attention weights of the first layer over its heads
    variances: variance.Variances | None = None
    slopes: list[tuple[int, str, float]] = field(default_factory=list)  # (layer, step, slope of the measured variance)
    probes: list[probe.Probed] = field(default_factory=list)
    twin: list[probe.Probed] = field(default_factory=list)
    shifts: list[behaviour.Shift] = field(default_factory=list)
    shuffle: behaviour.Shuffle | None = None
    lengths: list[behaviour.Length] = field(default_factory=list)
    shares: list[behaviour.Share] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def note(self, what: str | Exception, of: str = "") -> None:
        self.notes.setdefault(str(what), []).extend([of] if of else [])

    @property
    def notices(self) -> list[str]:
        """One for each thing that is to be said, with all the parts that it is said of."""
        return [f"{', '.join(dict.fromkeys(parts))}: {what}" if parts else what for what, parts in self.notes.items()]


@dataclass(frozen=True)
class Tokens:
    """Where the sequences come from: a text and a tokenizer, or nothing, and then they are random."""

    tokenizer: Any
    text: str
    vocabulary: int

    def take(self, count: int, length: int) -> Tensor:
        if self.tokenizer is None or not self.text:
            return text.random_tokens(self.vocabulary, count=count, length=length)
        return text.sequences(self.tokenizer, self.text, count=count, length=length)


Stage = Callable[["PreTrainedModel", Tokens, Inspection], None]


def inspect(
    model: PreTrainedModel, tokens: Tokens, name: str, *, of: int | None = None
) -> Iterator[tuple[str, Inspection]]:
    """Runs the stages one by one; yields the name of each before it runs, with what there is so far.

    `of` is given where the model is the first layers of one with `of` layers, and stages that need all are left out.
    """
    found = Inspection(name, _facts(model, tokens))
    try:
        found.facts["positions"] = str(native(model))
        plan = plan_of(model)
        if plan is not None and plan.keep_native:
            found.facts["positions"] += ", beside the model's own"
    except (NotImplementedError, ValueError, RuntimeError, IndexError) as problem:
        found.note(problem, "positions")
    if has_decoder(model):
        found.note(
            "This model is an encoder with a decoder. Translation invariance and the curves of the scheme are of both; "
            "everything that is measured on a text (attention by distance, variance, behaviour, probes) is of the "
            "encoder."
        )
    if of is not None:
        found.facts["layers"] = f"the first {found.facts.get('layers', '')} of {of}"
        left_out = ", ".join(stage for stage in STAGES if stage not in OF_THE_FIRST_LAYERS)
        found.note(
            f"There is not enough memory for this model. The page is about {found.facts['layers']} layers; what needs "
            f"all of them was left out ({left_out})."
        )
    for stage, run in STAGES.items():
        if of is not None and stage not in OF_THE_FIRST_LAYERS:
            continue
        yield stage, found
        start = time.perf_counter()
        try:
            with nullcontext(model) if stage in OF_THE_WHOLE else encoder_of(model) as part:
                run(part, tokens, found)
        except (NotImplementedError, ValueError, RuntimeError, IndexError, KeyError, TypeError) as problem:
            found.note(problem, stage)
        found.seconds[stage] = time.perf_counter() - start
    yield "done", found


def _facts(model: PreTrainedModel, tokens: Tokens) -> dict[str, str]:
    config: Any = model.config
    facts = {
        "model": type(model).__name__,
        "parameters": f"{sum(x.numel() for x in model.parameters()):,}",
        "measured on": "text" if tokens.tokenizer is not None and tokens.text else "random tokens",
    }
    for name, label in (("num_hidden_layers", "layers"), ("num_attention_heads", "heads"), ("hidden_size", "width"),
                        ("max_position_embeddings", "maximum length")):  # fmt: skip
        if getattr(config, name, None) is not None:
            facts[label] = str(getattr(config, name))
    return facts


def _limit(model: PreTrainedModel, length: int) -> int:
    """A length that the model takes."""
    return min([length, *(limit for limit in limits(model) if limit is not None)])


def _invariance(model: PreTrainedModel, tokens: Tokens, found: Inspection) -> None:
    found.invariances = invariance.of_model(model, samples=10)
    table = next((stack.table() for stack in invariance.stacks(model) if stack.table is not None), None)
    if table is not None and table.shape[0] > 8:
        found.table = table.detach().double()
        found.gram_positions = list(range(0, table.shape[0], math.ceil(table.shape[0] / GRAM)))
        kept = found.table[found.gram_positions]
        found.gram = kept @ kept.mT
        found.structure = invariance.structure(found.table)


def _curves(model: PreTrainedModel, tokens: Tokens, found: Inspection) -> None:
    read: Any = native(model)
    for name, stack in zip(("encoder", "decoder") if len(read.stacks) == 2 else ("",), read.stacks, strict=True):
        same: dict[object, list[int]] = {}
        for number, scheme in enumerate(stack.layers or [], 1):
            same.setdefault(id(scheme) if list(scheme.parameters()) else str(scheme), []).append(number)
        for numbers in same.values():
            scheme, where = stack.layers[numbers[0] - 1], _where(name, numbers)
            found.curves += [(where, line) for line in curve.curves(scheme, 50)]
            found.kernels += [(where, each) for each in curve.kernels(scheme, 50)]
            with torch.no_grad():
                vectors = scheme.terms(torch.arange(-50, 51)).query
            if vectors is not None:
                found.vectors.append((where, vectors[0].float()))


def _where(stack: str, layers: list[int]) -> str:
    """ "layer 2", "decoder, layers 1–6", "layers 1, 3, 5" """
    run = layers == list(range(layers[0], layers[-1] + 1))
    spelt = f"{layers[0]}–{layers[-1]}" if run and len(layers) > 1 else ", ".join(map(str, layers))
    return f"{stack}{', ' if stack else ''}layer{'s' if len(layers) > 1 else ''} {spelt}"


def _distance(model: PreTrainedModel, tokens: Tokens, found: Inspection) -> None:
    found.layers = distance.by_distance(model, tokens.take(SEQUENCES, _limit(model, LENGTH)))
    if found.layers:
        found.first_layer = found.layers[0].weights.mean(0)


def _variance(model: PreTrainedModel, tokens: Tokens, found: Inspection) -> None:
    length = _limit(model, LENGTH)
    found.variances = variance.measure(model, tokens=tokens.take(SEQUENCES, length))
    if found.facts.get("positions", "").endswith("nope") and model.config.model_type == "gpt2":
        # The theory is of random models: how near a trained one is to it says what training has done.
        try:
            theory = variance.predict(**variance.settings(model), length=length)
            found.variances = variance.Variances((*found.variances.rows, *theory.rows))
        except ValueError as problem:
            found.note(problem, "theory beside the measured variance")
    found.slopes = [
        (row.layer, row.step, variance.slope(row))
        for row in found.variances.rows
        if row.source == variance.MEASURED and row.step in (variance.ATTENTION, variance.OUTPUT)
    ]


def _probe(model: PreTrainedModel, tokens: Tokens, found: Inspection) -> None:
    length, needed = _limit(model, PROBE_LENGTH), PROBE_BATCH * (PROBE_STEPS + 1 + PROBE_TESTS)
    if length < 4:
        raise ValueError(f"to read position there must be some: the model has {length}, a probe needs 4 or more")
    try:
        pool = tokens.take(needed, length)
    except ValueError:  # the text is too short for a stream of fresh sequences
        pool = text.random_tokens(tokens.vocabulary, count=needed, length=length)
        found.note("these saw random tokens, since the text is too short for a stream of fresh sequences", "probes")

    def batch(number: int) -> Tensor:
        at = number if number >= 0 else PROBE_STEPS - number  # tests after what is trained on
        return pool[at * PROBE_BATCH : (at + 1) * PROBE_BATCH]

    found.probes = probe.probe(probe.states_of(model, batch), steps=PROBE_STEPS, tests=PROBE_TESTS)
    if is_causal(model, pool[:2]):
        twin = probe.states_of(model, batch, bidirectional=True)
        try:
            found.twin = probe.probe(twin, seeds=1, steps=PROBE_STEPS, tests=PROBE_TESTS)
        except (ValueError, RuntimeError) as problem:  # not every model takes a mask for each pair
            found.note(f"this model does not take a mask for every pair of tokens ({problem})", "bidirectional twin")


def _behaviour(model: PreTrainedModel, tokens: Tokens, found: Inspection) -> None:
    length = _limit(model, LENGTH)
    ids = tokens.take(8, length)
    longest = min(max(LENGTHS), limits(model)[0] or max(LENGTHS))  # past the trained length, where it can
    parts: dict[str, Callable[[], Any]] = {
        "shifts": lambda: behaviour.shift(model, ids[:, : max(2, length // 2)]),
        "shuffle": lambda: behaviour.shuffle(model, ids),
        "shares": lambda: behaviour.share(model, tokens.take(SEQUENCES, length)),
        "lengths": lambda: behaviour.length(
            model, tokens.take(4, longest), [n for n in LENGTHS if n <= longest] or [longest]
        ),
    }
    for name, run in parts.items():
        try:
            setattr(found, name, run())
        except (NotImplementedError, ValueError, RuntimeError, IndexError) as problem:  # noqa: PERF203 - four times
            found.note(problem, BEHAVIOUR[name])


BEHAVIOUR = {
    "shifts": "moved positions",
    "shuffle": "shuffled words",
    "shares": "share of position",
    "lengths": "longer inputs",
}

STAGES: dict[str, Stage] = {
    "translation invariance": _invariance,
    "curves of the scheme": _curves,
    "attention by distance": _distance,
    "variance": _variance,
    "behaviour": _behaviour,
    "probes": _probe,
}


OF_THE_WHOLE = ("translation invariance", "curves of the scheme")
"""Stages that read parameters, which they do of a decoder too; the others run a text through the encoder."""


OF_THE_FIRST_LAYERS = (*OF_THE_WHOLE, "attention by distance", "variance")
"""Stages in which no layer depends on those after it."""
