"""Finds the rotary modules of a model in numbers, wherever they are and whatever they are called.

A rotary module returns cos and sin, or one complex tensor: numbers of one modulus, which change along positions and are
the same for other tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from locant.hf.mechanisms.rotary import Rotary
from locant.hf.modes import evaluating
from locant.hf.rotary_calls import RotaryCall, recording, sources, turns_of

LENGTH = 7
"""Tokens of a run."""


def find_rotary(base: nn.Module, stack: nn.Module) -> list[str]:
    """Returns the paths of the rotary modules below a stack of a base model, in the order they run."""
    return list(dict.fromkeys(call.path for call in _rotary_calls(base, stack)))


def rotary_of(base: nn.Module, stack: nn.Module) -> Rotary | None:
    """Returns the rotary mechanism of a stack, with the forms of its modules; None if it has no rotary modules."""
    calls = _rotary_calls(base, stack)
    paths = tuple(dict.fromkeys(call.path for call in calls))
    return Rotary(paths).described(calls) if paths else None


def _rotary_calls(base: nn.Module, stack: nn.Module) -> list[RotaryCall]:
    modules = {path: module for path, module in stack.named_modules() if path}
    runs: list[list[RotaryCall]] = []
    for first in (3, 11):
        calls: list[RotaryCall] = []
        with recording(modules, calls.append):
            _run(base, first)
        runs.append(sources(calls, LENGTH))
    one, other = runs
    found = [
        call
        for call, again in zip(one, other, strict=False)
        if call.path == again.path and torch.equal(turns_of(call.output), turns_of(again.output))
    ]
    paths = {call.path for call in found}  # of a rotary module with another one inside, the outer one counts
    return [call for call in found if not any(call.path.startswith(f"{path}.") for path in paths)]


@torch.no_grad()
def _run(base: nn.Module, first: int) -> None:
    """Runs a base model on a few tokens."""
    with evaluating(base):
        weight: Any = base.get_input_embeddings().weight  # type: ignore[operator]
        tokens = (torch.arange(first, first + LENGTH, device=weight.device) % weight.shape[0])[None]
        inputs = {"input_ids": tokens}
        if getattr(base.config, "is_encoder_decoder", False) and hasattr(base, "decoder"):
            inputs["decoder_input_ids"] = tokens
        base(**inputs)
