"""Finds the rotary modules of a model in numbers, wherever they are and whatever they are called.

A rotary module returns cos and sin, or one complex tensor: numbers of one modulus, which change along positions and are
the same for other tokens.
"""

from __future__ import annotations

import torch
from torch import nn

from locant.hf.mechanisms.rotary import Rotary
from locant.hf.rotary_calls import RotaryCall, recording, sources, turns_of
from locant.hf.running import decoder_tokens, probe_inputs, probe_length, probe_tokens, run


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
    length = probe_length(base)
    for stride in (1, 2):
        calls: list[RotaryCall] = []
        with recording(modules, calls.append):
            tokens = probe_tokens(base, length, stride)
            inputs = probe_inputs(base, tokens)
            if "decoder_input_ids" in inputs:
                inputs["decoder_input_ids"] = decoder_tokens(base, tokens)
            run(base, inputs)
        runs.append(sources(calls, length))
    one, other = runs
    found = [
        call
        for call, again in zip(one, other, strict=False)
        if call.path == again.path and torch.equal(turns_of(call.output), turns_of(again.output))
    ]
    paths = {call.path for call in found}  # of a rotary module with another one inside, the outer one counts
    return [call for call in found if not any(call.path.startswith(f"{path}.") for path in paths)]
