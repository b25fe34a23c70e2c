"""Traces of position in a model: the variance of the attention output by position, and what probes read off the layers.

A trained model is measured on windows of a text that begin anywhere, so every position has the same words. What
differs between positions is then the model's doing.

Functions import what loads transformers: it takes seconds, and the command must start sooner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from locant.experiments import arms, comparison
from locant.experiments.run import load_setting, quiet
from locant.experiments.tasks import find_task
from locant.experiments.work import Run
from locant.papers import bigrams
from locant.papers.cost import Shape
from locant.papers.place import Place
from locant.papers.steps import Input, open_model
from locant.runs import run_folder, text_source

if TYPE_CHECKING:
    from locant.analysis.probe import Sample
    from locant.analysis.variance import Variances

LATER = 8
"""A second slope begins here: it shows whether the fall is more than a special first token."""
HIDDEN = 128
"""Hidden units of a probe."""
LETTERS = 6
"""Letters of a text per token that is needed, at least: tokens have four on average."""


@dataclass(frozen=True)
class Probing:
    """The sizes of the probes of one model."""

    batch: int  # sequences
    steps: int
    tests: int  # batches
    seeds: int  # probes per model; one more is trained on shuffled positions

    def operations(self, shape: Shape, length: int) -> float:
        """Returns the floating-point operations of probes after every layer of a model."""
        tokens = self.batch * length * (self.steps + self.tests)
        probes = 6 * (shape.layers + 1) * shape.width * HIDDEN * (self.seeds + 1) * tokens
        return shape.reading(tokens, length) + probes


def probe_rows(sample: Sample, probing: Probing) -> list[dict[str, float]]:
    """Returns one row per layer (0: the embeddings): the errors of the probe, of a constant and of shuffled positions.

    Of the places in `sample` only the hidden states after whole layers are read.
    """
    from locant.analysis import probe

    def layers_of(number: int) -> dict[str, Tensor]:
        return {place: x for place, x in sample(number).items() if layer_of(place) is not None}

    found = probe.probe(layers_of, seeds=probing.seeds, steps=probing.steps, tests=probing.tests, hidden=HIDDEN)
    return [
        {"layer": layer_of(row.place) or 0, "error": row.error, "constant": row.constant, "shuffled": row.shuffled}
        for row in found
    ]


def layer_of(place: str) -> int | None:
    """Returns the layer of a place of `analysis.probe`: 0 for embeddings, 2 for "layer 2"; None for a sub-layer."""
    words = place.split()
    if place == "embeddings":
        return 0
    return int(words[1]) if len(words) == 2 else None


def attention_rows(measured: Variances) -> list[dict[str, Any]]:
    """Returns one row per layer: the variance of the attention output by position, and its slopes."""
    from locant.analysis import variance

    rows = []
    for row in measured.rows:
        if row.step == variance.ATTENTION:
            first = min(LATER, len(row.values) // 2)
            later = variance.slope(row, first=first) if first > 1 else variance.slope(row)
            rows.append(
                {"layer": row.layer, "values": list(row.values), "slope": variance.slope(row), "later slope": later}
            )
    if not rows:
        raise ValueError("the measurement has no attention output; locant does not find the attention of this model")
    return rows


@dataclass(frozen=True)
class Windows:
    """Windows of two texts, as token ids: batches from 0 on are of the first, negative ones of the second.

    They begin at random places, which depend on the seed and the number of the batch.
    """

    train: Tensor
    test: Tensor
    length: int
    count: int  # in a batch
    seed: int

    def __call__(self, number: int) -> Tensor:
        text = self.train if number >= 0 else self.test
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + number)
        starts = torch.randint(0, len(text) - self.length + 1, (self.count, 1), generator=generator)
        return text[starts + torch.arange(self.length)]


def trace(
    model: Any, train: Tensor, test: Tensor, length: int, sequences: int, probing: Probing | None, seed: int
) -> dict[str, Any]:
    """Returns the variance by position, and the probes unless `probing` is None, of a model on windows of two texts."""
    from locant.analysis import probe, variance

    measured = variance.measure(model, text_ids=test, sequences=sequences, length=length, seed=seed)
    found: dict[str, Any] = {"variance": attention_rows(measured)}
    if probing is not None:
        windows = Windows(train, test, length, probing.batch, seed)
        found["probes"] = probe_rows(probe.states_of(model, windows), probing)
    return found


def predicted(model: Any, length: int) -> list[list[float]]:
    """Returns the predicted variance of the attention output, layer by layer; [] for models without a theory.

    It describes random GPT-2s without positions that read no token twice.
    """
    from locant.analysis import variance

    if model.config.model_type != "gpt2":
        return []
    wanted = (variance.ATTENTION, variance.CORRECTED)
    table = variance.predict(**variance.settings(model), length=length)
    return [list(row.values) for row in table.rows if (row.step, row.source) == wanted]


def tokens_of(data: Any, part: str) -> Tensor:
    """Returns the token ids of one part (train, test) of the prepared data of a language-modelling comparison."""
    from datasets import load_from_disk

    return torch.as_tensor(load_from_disk(str(data / part)).with_format("numpy")[:]["token"], dtype=torch.long)


@dataclass(frozen=True)
class TraceOfRun:
    """Measures the models of one run of a training step: before training, those kept on the way, and at the end."""

    model: Input  # of the run
    scheme: str
    seed: int
    sequences: int
    probing: Probing
    often: bool  # whether the models on the way have probes too
    shape: Shape
    length: int
    kept: int

    def __call__(self, at: Place) -> dict[str, Any]:
        from locant.hf import load

        quiet()
        out = at.runs(self.model.kind)
        found = comparison.open_folder(out)
        run, work = Run(found.work, self.scheme, self.seed), found.work
        here, data = comparison.where(out, run), out / comparison.DATA
        train, test = tokens_of(data, "train"), tokens_of(data, "test")
        points: list[dict[str, Any]] = []
        for step in [0, *run_folder.kept_steps(work.steps, work.preset.kept), work.steps]:
            if step == 0:
                model: Any = arms.build(
                    find_task(work.task), load_setting(work, data), work.model, self.scheme, self.seed
                )
            else:
                model = load(str(here if step == work.steps else run_folder.kept_model(here, step)))
            probing = self.probing if self.often or step in (0, work.steps) else None
            length, at_start = work.preset.length, step == 0 and self.scheme == "nope"
            found_here = trace(model, train, test, length, self.sequences, probing, self.seed)
            points.append({"step": step, "theory": predicted(model, length) if at_start else [], **found_here})
        return {"points": points}

    @property
    def operations(self) -> float:
        """Floating-point operations."""
        probed = self.kept + 2 if self.often else 2
        reading = (self.kept + 2) * 2 * self.shape.reading(self.sequences * self.length, self.length)
        return reading + probed * self.probing.operations(self.shape, self.length)


@dataclass(frozen=True)
class TraceOfModels:
    """Measures models of other makers, by name: on the same text, each with its own tokenizer."""

    models: tuple[tuple[str, Input], ...]
    text: Input
    length: int
    sequences: int
    probing: Probing

    def __call__(self, at: Place) -> dict[str, Any]:
        quiet()
        text = text_source.text(str(self.text.path(at)))
        found = {}
        for name, each in self.models:
            model, tokenizer = open_model(each.path(at))
            needed = {
                "train": self.probing.batch * self.length * self.probing.steps,
                "test": self.sequences * self.length,
            }
            train, test = (
                ids_of(tokenizer, part[: LETTERS * max(needed[key], 10 * self.length)])
                for key, part in (("train", text.train), ("test", text.test))
            )
            found[name] = trace(model, train, test, self.length, self.sequences, self.probing, seed=0)
        return found

    @property
    def operations(self) -> float:
        """Floating-point operations, for models of six layers of 288."""
        return len(self.models) * self.probing.operations(Shape(6, 288), self.length)


def ids_of(tokenizer: Any, text: str) -> Tensor:
    """Returns the token ids of a text, without special tokens. Lines are tokenised one by one: a long text is slow."""
    lines = [line for line in text.splitlines() if line.strip()]
    rows: list[list[int]] = tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for row in rows for token in row])


@dataclass(frozen=True)
class Bigrams:
    """Measures a smoothed bigram model on the tokens of a `clm` training: the same training and test tokens."""

    model: Input  # of any of its runs

    def __call__(self, at: Place) -> dict[str, Any]:
        out = at.runs(self.model.kind)
        preset = comparison.open_folder(out).work.preset
        train, test = (tokens_of(out / comparison.DATA, part).numpy() for part in ("train", "test"))
        longest = preset.length * preset.longest
        tested = max(longest, min(len(test), preset.evaluated or len(test)) // longest * longest)
        rows = test[:tested].reshape(-1, preset.length)  # the windows of the test; the first token of each has no loss
        vocabulary = 1 + int(max(train.max(), test.max()))
        loss = bigrams.cross_entropy(train, rows[:, :-1].ravel(), rows[:, 1:].ravel(), vocabulary)
        return {"loss": loss, "train tokens": len(train), "test tokens": rows[:, 1:].size}

    @property
    def operations(self) -> float:
        """Floating-point operations."""
        return 1e9
