"""Probes: how well a small network can predict a token's position from its hidden state.

    position ≈ W₂ ReLU(W₁ h + b₁) + b₂        one for each place in the model, trained on a stream of fresh sequences

after Haviv et al. 2022 (arXiv 2203.16634) and Chi et al. 2023 (arXiv 2305.13571). The error is the mean absolute error
on sequences that were never trained on. A constant guess, the middle, has an error of L/4. A probe trained on shuffled
positions can do no better than that; the distance of its error from L/4 is noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from locant.analysis import twin
from locant.analysis.layout import LayerTracker, find_layout
from locant.analysis.steps import ATTENTION, FEED_FORWARD
from locant.hf.facts import has_decoder
from locant.hf.modes import evaluating

SUB_LAYERS = {ATTENTION: "attention", FEED_FORWARD: "feed-forward"}

Sample = Callable[[int], dict[str, Tensor]]
"""Number of a batch -> hidden states [B, L, d] by the name of their place. A number gives the same batch each time."""


@dataclass(frozen=True)
class Probed:
    """The error of the probes at one place, over seeds."""

    place: str
    error: float  # mean absolute, in tokens; the mean over seeds
    low: float  # the smallest and largest over seeds
    high: float
    constant: float  # of the best constant guess
    shuffled: float  # of probes trained on shuffled positions
    by_position: Tensor  # [L] the error at each position


def probe(
    sample: Sample, *, seeds: int = 3, steps: int = 150, tests: int = 4, hidden: int = 128, rate: float = 1e-2
) -> list[Probed]:
    """Returns one row per place of `sample`, from `seeds` probes and one trained on shuffled positions.

    All probes of all places are trained at once. Batches 1 … steps are for training, −1 … −tests for testing.
    """
    states = _Standardized(sample)
    generator = torch.Generator().manual_seed(0)
    probes = _Probes(len(states.places), states.width, seeds + 1, hidden, generator)
    here = (torch.arange(states.length) + 0.5) / states.length - 0.5  # positions in units of the length
    _train(probes, states, here, steps, rate, generator)
    errors = []
    with torch.no_grad():
        for number in range(tests):
            x = states(-1 - number)
            target = here.repeat(x.shape[1] // states.length)
            error = (probes(x) - target).abs().unflatten(-1, (-1, states.length)).mean(2)
            errors.append(error * states.length)
    constant = float(here.abs().mean() * states.length)
    return [_row(place, each, constant) for place, each in zip(states.places, torch.stack(errors).mean(0), strict=True)]


def _row(place: str, errors: Tensor, constant: float) -> Probed:
    """`errors` is [seeds + 1, L]; the last row is of the probe trained on shuffled positions."""
    of_seeds = errors[:-1].mean(-1)
    return Probed(
        place, float(errors[:-1].mean()), float(of_seeds.min()), float(of_seeds.max()), constant,
        float(errors[-1].mean()), errors[:-1].mean(0),
    )  # fmt: skip


class _Standardized:
    """The states of a sample as one tensor [places, B·L, d], with the mean and spread of batch 0 taken out."""

    def __init__(self, sample: Sample) -> None:
        first = sample(0)
        widths = {x.shape[-1] for x in first.values()}
        if len(widths) != 1:
            raise ValueError(f"hidden states of all places must have the same width; got widths {sorted(widths)}")
        if not all(x.isfinite().all() for x in first.values()):
            raise ValueError("the hidden states contain NaN or infinity; check the weights of the model")
        self.sample, self.places = sample, list(first)
        (self.width,), self.length = widths, first[self.places[0]].shape[1]
        flat = [first[place].flatten(0, 1) for place in self.places]
        self.center = torch.stack([x.mean(0) for x in flat])[:, None]
        self.spread = torch.stack([x.std() for x in flat])[:, None, None].clamp(min=1e-12)

    def __call__(self, number: int) -> Tensor:
        got = self.sample(number)
        flat = torch.stack([got[place].flatten(0, 1) for place in self.places]).float()
        return (flat - self.center) / self.spread


class _Probes:
    """`runs` networks for each of `places`. Those of one place read the same states, so W₁ is one matrix for all."""

    def __init__(self, places: int, width: int, runs: int, hidden: int, generator: torch.Generator) -> None:
        def start(*shape: int, scale: float) -> Tensor:
            return (torch.randn(places, *shape, generator=generator) * scale).requires_grad_()

        self.runs, self.hidden = runs, hidden
        self.parameters = [
            start(width, runs * hidden, scale=width**-0.5),
            start(1, runs * hidden, scale=0.1),
            start(1, runs, hidden, scale=hidden**-0.5),
            start(1, runs, scale=0.0),
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """[places, B·L, d] -> positions [places, runs, B·L] in units of the length, from −1/2 to 1/2."""
        w1, b1, w2, b2 = self.parameters
        middle = torch.relu(torch.baddbmm(b1, x, w1)).unflatten(-1, (self.runs, self.hidden))
        positions: Tensor = (middle * w2).sum(-1) + b2
        return positions.mT


def _train(
    probes: _Probes, states: _Standardized, here: Tensor, steps: int, rate: float, generator: torch.Generator
) -> None:
    """Trains all runs on batches 1 … steps; the last run gets shuffled positions."""
    optimizer = torch.optim.Adam(probes.parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps)
    for step in range(steps):
        x = states(step + 1)
        target = here.repeat(x.shape[1] // len(here)).expand(len(states.places), probes.runs, -1).clone()
        target[:, -1] = target[:, -1][:, torch.randperm(x.shape[1], generator=generator)]
        loss = (probes(x) - target).abs().mean((0, 2)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def states_of(model: Any, ids: Callable[[int], Tensor], *, bidirectional: bool = False) -> Sample:
    """Returns a sample of the hidden states of a Hugging Face model, for token ids [B, L] by the number of a batch.

    Places are the embeddings, the output of each layer, and the outputs of attention and feed-forward of each layer
    before they are added to the residual (`locant.analysis.layout` finds them). `bidirectional` runs a causal model
    with a mask that hides nothing, so that it cannot infer a position from the number of visible tokens.
    """
    if has_decoder(model):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; pass its encoder: model.get_encoder()")
    base, layout = model.base_model, find_layout(model)

    def sample(number: int) -> dict[str, Tensor]:
        tokens, taken = ids(number), {}

        def keep(layer: int, step: str, x: Tensor) -> None:
            if step in SUB_LAYERS:
                taken[layer + 1, step] = x

        given = twin.arguments(base, tokens) if bidirectional else {}
        if bidirectional:
            twin.check(base, tokens)
        with evaluating(base), torch.no_grad(), LayerTracker(layout.layers).recording(layout, keep):
            layers = base(input_ids=tokens, output_hidden_states=True, **given).hidden_states
        states = {"embeddings": layers[0]}
        for number, layer in enumerate(layers[1:], 1):
            for step, name in SUB_LAYERS.items():
                if (number, step) in taken:
                    states[f"layer {number} {name}"] = taken[number, step]
            states[f"layer {number}"] = layer
        return states

    return sample
