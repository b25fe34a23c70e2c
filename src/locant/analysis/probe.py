"""Probes: how well a small network reads a token's position off its hidden state.

    position ≈ W₂ ReLU(W₁ h + b₁) + b₂        one for each place in the model, trained on a stream of fresh sequences

after Haviv et al. 2022 (arXiv 2203.16634) and Chi et al. 2023 (arXiv 2305.13571). The error is the mean absolute one,
on sequences that were never trained on; guessing the middle always gives L/4. With shuffled positions
a probe can do no better than that, and how near it comes to it says how much is noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from locant.analysis.steps import ATTENTION, FEED_FORWARD, LayerTracker, find_layout

SUB_LAYERS = {ATTENTION: "attention", FEED_FORWARD: "feed-forward"}

Sample = Callable[[int], dict[str, Tensor]]
"""Number of a batch -> states [B, L, d] by the place they were taken from. A number gives the same batch each time."""


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
    """Trains `seeds` probes and one on shuffled positions at every place of `sample` at once."""
    first = sample(0)
    places = list(first)
    widths = {x.shape[-1] for x in first.values()}
    if len(widths) != 1:
        raise ValueError(f"the states must have one width, got {sorted(widths)}")
    if not all(x.isfinite().all() for x in first.values()):
        raise ValueError("hidden states are not finite: are there NaN in the weights of the model?")
    (width,), length = widths, first[places[0]].shape[1]
    centre = torch.stack([first[place].flatten(0, 1).mean(0) for place in places])[:, None]
    spread = torch.stack([first[place].flatten(0, 1).std() for place in places])[:, None, None].clamp(min=1e-12)

    def states(number: int) -> Tensor:
        """[places, B·L, d], brought to one scale"""
        got = sample(number)
        return (torch.stack([got[place].flatten(0, 1) for place in places]).float() - centre) / spread

    runs = seeds + 1  # the last one is trained on shuffled positions
    generator = torch.Generator().manual_seed(0)

    def start(*shape: int, scale: float) -> Tensor:
        return (torch.randn(len(places), *shape, generator=generator) * scale).requires_grad_()

    # The probes of one place read the same states: their first layers are one matrix, side by side.
    parameters = [start(width, runs * hidden, scale=width**-0.5), start(1, runs * hidden, scale=0.1),
                  start(1, runs, hidden, scale=hidden**-0.5), start(1, runs, scale=0.0)]  # fmt: skip

    def guess(x: Tensor) -> Tensor:
        """[places, runs, B·L] in units of the length, from −1/2 to 1/2"""
        middle = torch.relu(torch.baddbmm(parameters[1], x, parameters[0])).unflatten(-1, (runs, hidden))
        guessed: Tensor = (middle * parameters[2]).sum(-1) + parameters[3]
        return guessed.mT

    here = (torch.arange(length) + 0.5) / length - 0.5
    optimizer = torch.optim.Adam(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps)
    for step in range(steps):
        x = states(step + 1)
        target = here.repeat(x.shape[1] // length).expand(len(places), runs, -1).clone()
        target[:, -1] = target[:, -1][:, torch.randperm(x.shape[1], generator=generator)]
        loss = (guess(x) - target).abs().mean((0, 2)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    errors = []
    with torch.no_grad():
        for number in range(tests):
            x = states(-1 - number)  # never trained on
            target = here.repeat(x.shape[1] // length)
            errors.append((guess(x) - target).abs().unflatten(-1, (-1, length)).mean(2) * length)
    error = torch.stack(errors).mean(0)  # [places, runs, L]
    constant = float(here.abs().mean() * length)
    return [
        Probed(
            place, float(each[:-1].mean()), float(each[:-1].mean(-1).min()), float(each[:-1].mean(-1).max()), constant,
            float(each[-1].mean()), each[:-1].mean(0),
        )
        for place, each in zip(places, error, strict=True)
    ]  # fmt: skip


def states_of(model: Any, ids: Callable[[int], Tensor], *, bidirectional: bool = False) -> Sample:
    """The hidden states of a Hugging Face model: after the embeddings and after each layer, and what the attention and
    the feed-forward of each layer give, before it is added to the rest (`locant.analysis.steps` finds them).

    `bidirectional` runs a causal model with a mask that hides nothing: the twin that cannot count what it sees.
    """
    from locant.hf.facts import has_decoder
    from locant.hf.modes import evaluating

    if has_decoder(model):
        raise ValueError(f"{type(model).__name__} is an encoder with a decoder; give its encoder, model.get_encoder()")
    base, layout = model.base_model, find_layout(model)

    def sample(number: int) -> dict[str, Tensor]:
        tokens, taken = ids(number), {}

        def keep(layer: int, step: str, x: Tensor) -> None:
            if step in SUB_LAYERS:
                taken[layer + 1, step] = x

        given: dict[str, Any] = {}
        if bidirectional:
            given["attention_mask"] = torch.ones(tokens.shape[0], 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool)
            if "position_ids" in signature(type(base).forward).parameters:  # OPT would count them in the mask
                given["position_ids"] = torch.arange(tokens.shape[1]).expand_as(tokens)
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
