"""Random causal models without positions: what a probe reads from them, and how their variance compares with theory.

The initialisation is the paper's: every matrix and every embedding is N(0, σ²), biases are 0. GPT-2's own makes the
output matrices smaller. The bidirectional twin of a model has the same weights, and a mask that hides nothing.

Functions import what loads transformers: it takes seconds, and the command must start sooner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from locant.papers.cost import Shape
from locant.papers.place import Place
from locant.papers.traces import Probing, attention_rows, probe_rows

PAPER_WIDTH, PAPER_SIGMA = 768, 0.02
"""Width and standard deviation of the paper's random models."""
SHARE = 3.0
"""Cost of a measurement in forward passes: the logits and weights are computed a second time, in full."""


@dataclass(frozen=True)
class RandomShape:
    """The sizes of a random model, and of the sequences that it reads."""

    layers: int
    heads: int
    width: int
    length: int
    vocabulary: int = 50_257  # repeated tokens are correlated, and theory assumes that there are none

    @property
    def sigma(self) -> float:
        """The standard deviation that gives the paper's dσ², so the same variances of q, k, v, logits and output."""
        return float(PAPER_SIGMA * (PAPER_WIDTH / self.width) ** 0.5)

    @property
    def cost(self) -> Shape:
        """The shape for cost formulas. The model has no output matrix."""
        return Shape(self.layers, self.width)


def build(shape: RandomShape, seed: int) -> Any:
    """Returns a random GPT-2 without positions."""
    from transformers import GPT2Config, GPT2Model

    from locant.hf import swap

    torch.manual_seed(seed)
    config = GPT2Config(
        n_embd=shape.width, n_head=shape.heads, n_layer=shape.layers, n_positions=shape.length,
        vocab_size=shape.vocabulary, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: Any = GPT2Model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=shape.sigma)
    return swap(model, "nope")


@dataclass(frozen=True)
class ReadPositions:
    """Probes one random model and its twin."""

    shape: RandomShape
    probing: Probing
    seed: int

    def __call__(self, at: Place) -> dict[str, Any]:
        from locant.analysis import probe

        shape, batch = self.shape, self.probing.batch
        model = build(shape, self.seed)

        def fresh(number: int) -> torch.Tensor:
            """Random tokens; every batch of every model has its own."""
            generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + number)
            return torch.randint(0, shape.vocabulary, (batch, shape.length), generator=generator)

        own = probe_rows(probe.states_of(model, fresh), self.probing)
        twin = probe_rows(probe.states_of(model, fresh, bidirectional=True), self.probing)
        return {"probes": own, "twin": twin}

    @property
    def operations(self) -> float:
        """Floating-point operations."""
        return 2 * self.probing.operations(self.shape.cost, self.shape.length)


@dataclass(frozen=True)
class CompareWithTwin:
    """Measures the variance of the attention output of one random model and of its twin."""

    shape: RandomShape
    sequences: int
    seed: int

    def __call__(self, at: Place) -> dict[str, Any]:
        from locant.analysis import variance

        model, length = build(self.shape, self.seed), self.shape.length
        return {
            name: attention_rows(
                variance.measure(
                    model, sequences=self.sequences, length=length, seed=self.seed + 1, bidirectional=bidirectional
                )
            )
            for name, bidirectional in (("causal", False), ("bidirectional", True))
        }

    @property
    def operations(self) -> float:
        """Floating-point operations."""
        return SHARE * self.shape.cost.reading(2 * self.sequences * self.shape.length, self.shape.length)


@dataclass(frozen=True)
class CompareWithTheory:
    """Measures the variance after every step of every layer of one random model, beside both theories."""

    shape: RandomShape
    sequences: int
    seed: int

    def __call__(self, at: Place) -> dict[str, Any]:
        from locant.analysis import variance

        shape, model = self.shape, build(self.shape, self.seed)
        measured = variance.measure(model, sequences=self.sequences, length=shape.length, seed=self.seed + 1)
        predicted = variance.predict(**{**variance.settings(model), "sigma": shape.sigma}, length=shape.length)
        return compare(measured, predicted, octaves(shape.length))

    @property
    def operations(self) -> float:
        """Floating-point operations."""
        return SHARE * self.shape.cost.reading(self.sequences * self.shape.length, self.shape.length) + 1e10


def octaves(length: int) -> list[int]:
    """Returns the positions 1, 2, 4, 8, … up to the length: they weigh every octave equally."""
    return [2**k for k in range(length.bit_length()) if 2**k <= length]


def compare(measured: Any, predicted: Any, positions: list[int]) -> dict[str, Any]:
    """Returns one row per layer and step: the three variances at some positions, and the errors of the theories there.

    An error is theory / measured − 1, its mean over the positions; the slopes are over all positions.
    """
    from locant.analysis import variance

    rows = []
    for row in measured.rows:
        found: dict[str, Any] = {
            "layer": row.layer,
            "step": row.step,
            "measured": [row.values[m - 1] for m in positions],
        }
        for source in (variance.PLAIN, variance.CORRECTED):
            theory = predicted.row(row.layer, row.step, source)
            values = [theory.values[m - 1] for m in positions]
            errors = [a / b - 1 for a, b in zip(values, found["measured"], strict=True) if b > 0]
            found |= {source: values, f"{source} error": sum(errors) / len(errors) if errors else None}
        if row.step == variance.ATTENTION:
            found["slope"] = variance.slope(row)
            found["theory slope"] = variance.slope(predicted.row(row.layer, row.step, variance.CORRECTED))
        rows.append(found)
    return {"positions": positions, "rows": rows}
