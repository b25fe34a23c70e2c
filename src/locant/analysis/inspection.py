"""All analyses of one model, stage by stage: `locant inspect`.

A stage that does not apply to a model (no table, too short a text) leaves a notice, and the others continue.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from locant.analysis import attribution, behaviour, curve, distance, invariance, probe, text, variance
from locant.analysis.certainty import Certainty, certainty
from locant.analysis.places import place_of
from locant.hf.encoder import encoder_of
from locant.hf.facts import has_decoder, is_causal, limits
from locant.hf.readout import native

LENGTH, SEQUENCES = 128, 24
"""Tokens of a sequence, and sequences, that attention by distance, variance and behaviour are measured on."""
PROBE_LENGTH, PROBE_BATCH = 64, 8
"""Tokens of a sequence and sequences of a batch for probes."""
PROBE_STEPS, PROBE_TESTS = 100, 4
"""Batches that probes are trained on, and tested on."""
LENGTHS = (32, 64, 128, 256, 512, 1024)
"""Input lengths of the stage "behaviour", up to the number of positions of the model."""
CERTAINTY_LENGTH, CERTAINTY_SEQUENCES = 64, 48
"""Tokens of a sequence, and sequences, that the certainty of curves is measured on."""
BANK = 1024
"""Offsets on either side for which the curves that tokens mix are kept."""
GRAM = 128
"""Positions at which E Eᵀ is kept; a table of 32,768 positions would have 10⁹ inner products."""


@dataclass
class Inspection:
    """The tables of one model; None or empty where a stage did not apply."""

    name: str
    facts: dict[str, str]
    question: str = "How does this model know where its tokens are?"
    notes: dict[str, list[str]] = field(default_factory=dict)  # notice text -> the page sections it concerns
    invariances: list[invariance.InvarianceRow] = field(default_factory=list)
    table: Tensor | None = None
    gram_positions: list[int] = field(default_factory=list)  # at most GRAM of the positions of the table, and
    gram: Tensor | None = None  # E Eᵀ over them
    structure: invariance.Structure | None = None
    # The first entry of the pairs below is the place of a scheme: "layer 2", or "decoder, layers 1–6" if it is shared.
    curves: list[tuple[str, curve.Curve]] = field(default_factory=list)
    kernels: list[tuple[str, curve.Kernels]] = field(default_factory=list)  # the summands of TISA
    banks: list[tuple[str, curve.Bank]] = field(default_factory=list)  # the curves that Inkling's tokens mix
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
    certainty: Certainty | None = None  # intervals of the curves
    explained: attribution.Attribution | attribution.Similarity | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def note(self, what: str | Exception, of: str = "") -> None:
        """Adds a notice about the part `of`; about the whole page if `of` is empty."""
        self.notes.setdefault(str(what), []).extend([of] if of else [])

    def add_table(self, table: Tensor, last: int | None = None) -> None:
        """Keeps a table [positions, width], E Eᵀ over some of its positions, and its structure over 1 … `last`."""
        self.table = table.detach().double()
        self.gram_positions = list(range(0, table.shape[0], math.ceil(table.shape[0] / GRAM)))
        kept = self.table[self.gram_positions]
        self.gram = kept @ kept.mT
        if not self.marks_the_first:  # a constant has no components
            self.structure = invariance.structure(self.table, last=last)

    @property
    def marks_the_first(self) -> bool:
        """Whether the position table has two vectors: one for position 0, and one for all others."""
        table = self.table
        if table is None or table.shape[0] < 3:
            return False
        return bool((table[1:] == table[1]).all()) and not bool((table[0] == table[1]).all())

    @property
    def notices(self) -> list[str]:
        """The notices, each with all the parts that it is about."""
        return [f"{', '.join(dict.fromkeys(parts))}: {what}" if parts else what for what, parts in self.notes.items()]


@dataclass(frozen=True)
class Tokens:
    """The source of sequences: a text with a tokenizer; random tokens if there is no tokenizer or no text."""

    tokenizer: Any
    text: str
    vocabulary: int

    def take(self, count: int, length: int) -> Tensor:
        """Returns token ids [count, length]."""
        if self.tokenizer is None or not self.text:
            return text.random_tokens(self.vocabulary, count=count, length=length)
        return text.sequences(self.tokenizer, self.text, count=count, length=length)


@dataclass(frozen=True)
class Explain:
    """What to explain: the output for one text, or the similarity of two."""

    texts: tuple[str, ...]
    pooling: attribution.Pool | None = None

    def run(self, model: PreTrainedModel, tokens: Tokens, found: Inspection) -> None:
        """The stage of an inspection."""
        if len(self.texts) == 2:
            first, second = self.texts
            found.explained = attribution.similarity(
                model, first, second, tokenizer=tokens.tokenizer, pooling=self.pooling
            )
            return
        if model is model.base_model:
            raise ValueError(
                f"{type(model).__name__} has no logits to explain. Give two texts to explain their similarity"
            )
        found.explained = attribution.attribute(model, self.texts[0], tokenizer=tokens.tokenizer)


Stage = Callable[[PreTrainedModel, Tokens, Inspection], None]
"""Measures one thing and writes it into the inspection."""
NO_STAGES: Mapping[str, Stage] = MappingProxyType({})


def inspect(
    model: PreTrainedModel, tokens: Tokens, name: str, *, of: int | None = None, more: Mapping[str, Stage] = NO_STAGES
) -> Iterator[tuple[str, Inspection]]:
    """Runs the stages one by one. Before each it yields the name of the stage and the results so far.

    If the model is only the first layers of a larger one, `of` is the number of layers of that one. Stages that need
    all layers are then left out. `more` are stages that come last, by name: `CERTAINTY`, `Explain`.
    """
    found = Inspection(name, _facts(model, tokens))
    try:
        found.facts["positions"] = str(native(model))
    except (NotImplementedError, ValueError, RuntimeError, IndexError) as problem:
        found.note(problem, "positions")
    if has_decoder(model):
        found.note(
            "This model is an encoder-decoder. Translation invariance and the curves of the scheme cover both parts. "
            "Everything that is measured on a text (attention by distance, variance, behaviour, probes) is of the "
            "encoder."
        )
    if of is not None:
        found.facts["layers"] = f"the first {found.facts.get('layers', '')} of {of}"
        left_out = ", ".join(stage for stage in STAGES if stage not in OF_THE_FIRST_LAYERS)
        found.note(
            f"There is not enough memory for this model. The page covers {found.facts['layers']} layers; stages that "
            f"need all of them are left out ({left_out})."
        )
    for stage, run in {**STAGES, **more}.items():
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
    """`length`, or the longest input of the model if that is shorter."""
    return min([length, *(limit for limit in limits(model) if limit is not None)])


def _invariance(model: PreTrainedModel, tokens: Tokens, found: Inspection) -> None:
    found.invariances = invariance.of_model(model, samples=10)
    table = next((stack.table() for stack in invariance.stacks(model) if stack.table is not None), None)
    if table is not None and table.shape[0] > 8:
        found.add_table(table)


def _curves(model: PreTrainedModel, tokens: Tokens, found: Inspection) -> None:
    read: Any = native(model)
    for name, stack in zip(("encoder", "decoder") if len(read.stacks) == 2 else ("",), read.stacks, strict=True):
        same: dict[object, list[int]] = {}
        for number, scheme in enumerate(stack.layers or [], 1):
            same.setdefault(id(scheme) if list(scheme.parameters()) else str(scheme), []).append(number)
        for numbers in same.values():
            scheme, where = stack.layers[numbers[0] - 1], place_of(name, numbers)
            found.curves += [(where, line) for line in curve.curves(scheme, 50)]
            found.kernels += [(where, each) for each in curve.kernels(scheme, 50)]
            found.banks += [(where, each) for each in curve.banks(scheme, BANK)]
            with torch.no_grad():
                vectors = scheme.terms(torch.arange(-50, 51)).query
            if vectors is not None:
                found.vectors.append((where, vectors[0].float()))


def _distance(model: PreTrainedModel, tokens: Tokens, found: Inspection) -> None:
    found.layers = distance.by_distance(model, tokens.take(SEQUENCES, _limit(model, LENGTH)))
    if found.layers:
        found.first_layer = found.layers[0].weights.mean(0)


def _variance(model: PreTrainedModel, tokens: Tokens, found: Inspection) -> None:
    length = _limit(model, LENGTH)
    found.variances = variance.measure(model, tokens=tokens.take(SEQUENCES, length))
    if found.facts.get("positions", "").endswith("nope") and model.config.model_type == "gpt2":
        # The theory describes random models; the difference of a trained one from it is the effect of training.
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
        raise ValueError(f"a probe needs 4 or more positions; the model has {length}")
    try:
        pool = tokens.take(needed, length)
    except ValueError:  # the text is too short for a stream of fresh sequences
        pool = text.random_tokens(tokens.vocabulary, count=needed, length=length)
        found.note("measured on random tokens: the text is too short for a stream of fresh sequences", "probes")

    def batch(number: int) -> Tensor:
        at = number if number >= 0 else PROBE_STEPS - number  # test batches come after the training batches
        return pool[at * PROBE_BATCH : (at + 1) * PROBE_BATCH]

    found.probes = probe.probe(probe.states_of(model, batch), steps=PROBE_STEPS, tests=PROBE_TESTS)
    if is_causal(model, pool[:2]):
        twin = probe.states_of(model, batch, bidirectional=True)
        try:
            found.twin = probe.probe(twin, seeds=1, steps=PROBE_STEPS, tests=PROBE_TESTS)
        except (ValueError, RuntimeError) as problem:  # not every model accepts a mask of pairs
            found.note(f"this model does not accept a mask of all pairs of tokens ({problem})", "bidirectional twin")


def _certainty(model: PreTrainedModel, tokens: Tokens, found: Inspection) -> None:
    ids = tokens.take(CERTAINTY_SEQUENCES, _limit(model, CERTAINTY_LENGTH))
    found.certainty = certainty(model, ids, tokenizer=tokens.tokenizer)


def _behaviour(model: PreTrainedModel, tokens: Tokens, found: Inspection) -> None:
    length = _limit(model, LENGTH)
    ids = tokens.take(8, length)
    longest = min(max(LENGTHS), limits(model)[0] or max(LENGTHS))  # beyond the trained length if the model can
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

CERTAINTY: dict[str, Stage] = {"certainty of the curves": _certainty}
"""A further stage: intervals of the learned curves."""

OF_THE_WHOLE = ("translation invariance", "curves of the scheme")
"""Stages that read parameters, of a decoder too; the others run a text through the encoder."""


OF_THE_FIRST_LAYERS = (*OF_THE_WHOLE, "attention by distance", "variance")
"""Stages whose results for a layer do not depend on later layers."""
