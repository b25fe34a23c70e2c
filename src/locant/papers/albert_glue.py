"""GLUE with an ALBERT shape that is pretrained here, once per arm and seed, on WikiText-2 and books.

A model that was pretrained without TISA has adjusted all its weights to the table. So every arm has its own
pre-training, and is then fine-tuned as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from locant.experiments.statistics import Estimate
from locant.papers import glue
from locant.papers.claim import Cell, Measured, Part, Table
from locant.papers.cost import Shape
from locant.papers.glue import GlueSizes
from locant.papers.place import Place
from locant.papers.steps import Joining, Step, Training, joined, source

TABLE, TISA = "native", "tisa:kernels=5"
SCHEMES = (TABLE, f"{TABLE}+{TISA}", TISA)
TEXT = Joining("tisa-text", (source("wikitext"), source("books")))


@dataclass(frozen=True)
class AlbertSizes:
    """Sizes of the pre-training, and of the fine-tuning of every pretrained model."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    length: int
    batch: int
    steps: int  # of pre-training
    rate: float
    scheme_rate: (
        float  # of TISA's kernels: Adam moves a parameter by at most the rate in a step, and they start far off
    )
    seeds: int  # of pre-training; the gains are paired by them
    glue: GlueSizes  # its seeds are runs per pretrained model, which are averaged

    @property
    def tokens(self) -> int:
        """Tokens of the pre-training."""
        return self.length * self.batch * self.steps


SIZES: Mapping[str, AlbertSizes] = {
    "quick": AlbertSizes(
        layers=3, heads=4, width=96, vocabulary=2048, length=64, batch=16, steps=80,
        rate=2e-3, scheme_rate=1e-2, seeds=2,
        glue=GlueSizes(("SST-2", "STS-B"), seeds=1, steps=30, batch=16, length=48, rate=5e-4, evaluated=256),
    ),
    # 4.1 million tokens, about 0.35 s per step on one core; a fine-tuning takes about 50 s.
    "small": AlbertSizes(
        layers=3, heads=4, width=128, vocabulary=4096, length=64, batch=32, steps=2000,
        rate=2e-3, scheme_rate=1e-2, seeds=3,
        glue=GlueSizes(("SST-2", "MRPC", "STS-B"), seeds=2, steps=250, batch=16, length=64, rate=5e-4),
    ),
    # ALBERT-base: 12 layers of 768; its own pre-training has 125,000 steps of 4,096 sequences.
    "paper": AlbertSizes(
        layers=12, heads=12, width=768, vocabulary=30_000, length=512, batch=64, steps=125_000,
        rate=2e-4, scheme_rate=1e-3, seeds=3,
        glue=GlueSizes(("CoLA", "SST-2", "MRPC", "STS-B", "RTE"), seeds=2, steps=3000, batch=32, length=128, rate=3e-5),
    ),
}  # fmt: skip


def pretraining(sizes: AlbertSizes, scheme: str) -> Training:
    """Returns the pre-training of one arm."""
    preset = (
        f"quick:layers={sizes.layers},heads={sizes.heads},width={sizes.width},vocabulary={sizes.vocabulary},"
        f"length={sizes.length},batch={sizes.batch},rate={sizes.rate:g},"
        f"scheme_rate={sizes.scheme_rate:g},longest=1"
    )
    return Training(
        f"tisa-albert-{glue.slug(scheme)}", "mlm", (scheme,), sizes.seeds, sizes.steps, preset, joined(TEXT.name),
        "albert", keep_models=True,
    )  # fmt: skip


def fine_tuning(sizes: AlbertSizes, task: str, scheme: str, seed: int) -> Training:
    """Returns the fine-tuning of one pretrained model on one task."""
    before = pretraining(sizes, scheme)
    model, prefix = before.model_of(scheme, seed), f"tisa-albert-{glue.slug(scheme)}.s{seed}"
    tuned = glue.training(task, glue.NATIVE, sizes.glue, model=model, prefix=prefix)
    return replace(tuned, shape=Shape(sizes.layers, sizes.width))


def steps_of(sizes: AlbertSizes) -> list[Step]:
    """Returns the text, and for every arm its pre-training and the fine-tuning of its models on every task."""
    found: list[Step] = [TEXT, *(glue.guessing(task, sizes.glue) for task in sizes.glue.tasks)]
    for scheme in SCHEMES:
        found.append(pretraining(sizes, scheme))
        found += [fine_tuning(sizes, task, scheme, seed) for seed in range(sizes.seeds) for task in sizes.glue.tasks]
    return found


def scores(at: Place, sizes: AlbertSizes) -> dict[str, glue.Scores]:
    """Returns scheme -> task -> seed of the pre-training -> mean score over the fine-tunings of that model."""
    found: dict[str, glue.Scores] = {}
    for scheme in SCHEMES:
        by_task: dict[str, dict[int, float]] = {}
        for task in sizes.glue.tasks:
            for seed in range(sizes.seeds):
                own = fine_tuning(sizes, task, scheme, seed).scores(at)["native"]
                if own:
                    by_task.setdefault(task, {})[seed] = math.fsum(own.values()) / len(own)
        found[scheme] = by_task
    return found


def glue_gains(
    encoder: Mapping[str, glue.Scores], albert: Mapping[str, glue.Scores], learned: tuple[Sequence[str], Sequence[str]],
    asks: Sequence[str],
) -> Measured:  # fmt: skip
    """Returns the gains of every arm over `native`, for scores by arm, task and seed of both models.

    learned   the tasks of each model that count for the mean.
    """
    both = f"{TABLE}+{TISA}"

    def mean(arms: Mapping[str, glue.Scores], arm: str, tasks: Sequence[str]) -> Estimate:
        return glue.mean_gain(glue.of_tasks(arms[arm], tasks), arms[TABLE])

    parts = [
        Part(asks[0], "pretrained encoder", mean(encoder, both, learned[0])),
        Part(asks[1], "ALBERT shape", mean(albert, both, learned[1])),
        Part(asks[2], "ALBERT shape", mean(albert, TISA, learned[1])),
        glue.learned_part(asks[3], learned[0]),
        glue.learned_part(asks[4], learned[1]),
    ]
    gains: list[tuple[Cell, ...]] = []
    scores: list[tuple[Cell, ...]] = []
    for model, arms, tasks in (("pretrained encoder", encoder, learned[0]), ("ALBERT shape", albert, learned[1])):
        for arm, found in arms.items():
            scores += [(model, arm, task, seed, score) for task in found for seed, score in found[task].items()]
            if arm != TABLE:
                per_task = {**glue.gains(found, arms[TABLE]), "mean": mean(arms, arm, tasks)}
                gains += [(model, arm, task, at.mean, at.low, at.high, at.count) for task, at in per_task.items()]
    tables = {
        "gains": Table(("model", "arm", "task", "gain", "low", "high", "seeds"), gains),
        "scores": Table(("model", "arm", "task", "seed", "score"), scores),
    }
    sentences = [f"{part.name}, {part.asks.partition(': ')[2]}: {part.effect.mean:+.2f} points." for part in parts[:3]]
    return Measured(parts, tables, sentences)
