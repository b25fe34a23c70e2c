"""The rotary positions of one attention module as a scheme, from two runs of the model.

The measured pairs and speeds (`turning`) come from a few tokens. Frequencies for any length come from the most exact
source that agrees with them: a closed form with the settings of the config, else a table of the speeds that the rotary
module uses. Either must explain the measured queries and keys, and give the angles that the module computes far away,
also beyond the length the model was made for, where some scalings begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locant.hf.call import AttentionCall
from locant.hf.rope_settings import closed_forms, lengths_of, options_of
from locant.hf.rotary_calls import RotaryCall
from locant.hf.turning import NotATurn, Turn, error_limit, measure_both
from locant.hf.two_runs import TwoRuns
from locant.schemes import Nope, Rope, Scheme

ANGLE, SPEED = 1e-5, 1e-6
"""Allowed errors of an angle: a constant part, and a share of the angle. Transformers computes angles in float32."""


@dataclass(frozen=True)
class Layer:
    """The queries and keys of an attention module with and without rotation."""

    name: str
    turned: AttentionCall
    plain: AttentionCall
    rotary: list[RotaryCall]  # those that may have turned them, the likeliest first

    @property
    def head_dim(self) -> int:
        """The size of a head."""
        return int(self.turned.query.shape[-1])

    def error(self, rope: Rope, positions: Tensor) -> float:
        """Returns how far a scheme is from explaining the turned queries and keys, as a share of the largest number."""
        expected = rope.rotate(self.plain.query.double(), self.plain.key.double(), positions, positions)
        measured = (self.turned.query, self.turned.key)
        return max(
            float((x.double() - y).abs().max() / y.abs().max().clamp(min=1e-300))
            for x, y in zip(measured, expected, strict=True)
        )


def read_layer(stack: nn.Module, attention: nn.Module, runs: TwoRuns) -> Scheme:
    """Returns the scheme of one attention module: RoPE, or NoPE if its queries and keys do not turn."""
    layer = _layer(attention, runs)
    plain, turned = ((call.query, call.key) for call in (layer.plain, layer.turned))
    if all(torch.equal(x, y) for x, y in zip(plain, turned, strict=True)):
        return Nope()
    where = f"the rotary positions of {type(stack).__name__} cannot be read: in {layer.name}"
    errors = []
    for call in layer.rotary:
        if call.positions is None:
            raise NotImplementedError(f"{where} {type(call.module).__name__} is called without positions")
        positions = call.positions.reshape(-1, call.positions.shape[-1])[:1]
        try:
            turn = measure_both(plain, turned, positions[0], pairs=(call.columns // 2, call.columns))
        except NotATurn as reason:
            raise NotImplementedError(f"{where} {reason}") from reason
        if turn is None:
            return Nope()
        explained = False
        for rope in _candidates(stack, call, turn, layer.head_dim):
            error, far = layer.error(rope, positions), _far(rope, call, turn)
            near = error <= 2 * error_limit(plain[0].dtype)
            if near and far is None:
                return rope
            explained = explained or near
            errors.append(f"{rope}: {error:.1e} of the measured numbers{'' if far is None else ', ' + far}")
        if explained:  # this call did it; that another one has the same angles nearby means nothing
            break
    raise NotImplementedError(f"{where} {turn} turn, but no frequencies explain them ({'; '.join(errors)})")


def _layer(attention: nn.Module, runs: TwoRuns) -> Layer:
    turned, plain = runs.turned[attention], runs.plain[attention]
    name = type(attention).__name__
    if not turned.calls or len(turned.calls) != len(plain.calls):
        raise NotImplementedError(
            f"{name} called the attention {len(turned.calls)} times with its rotary positions and "
            f"{len(plain.calls)} times without them; expected the same number"
        )
    one, other = turned.calls[0], plain.calls[0]
    if not torch.equal(one.value, other.value) or not _same(one.mask, other.mask):
        raise NotImplementedError(f"{name} uses rotary positions for more than its queries and keys")
    inside = [call for call in runs.rotary if call.module in set(attention.modules())]
    distinct: dict[tuple[str, str], RotaryCall] = {}
    for call in (*turned.rotary, *inside, *runs.rotary):
        distinct.setdefault((call.path, call.layer_type), call)
    return Layer(name, one, other, list(distinct.values()))


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return (one is None and other is None) or (one is not None and other is not None and torch.equal(one, other))


def _candidates(stack: nn.Module, call: RotaryCall, turn: Turn, head_dim: int) -> Iterator[Rope]:
    """Schemes that may explain a measurement, the most exact first."""
    config: Any = getattr(call.module, "config", None) or stack.config
    near = call.of_pairs(call.at(torch.arange(2)), turn.pairs)
    if near is None:
        return
    magnitude = float(near.abs().mean())
    options = options_of(turn, magnitude, head_dim)
    yield from closed_forms(config, call.layer_type, options, magnitude)
    edges = lengths_of(config, call.layer_type)
    yield _tables(call, turn, {**options, "scaling": "table"}, [edges[-1]])
    for edge in edges:
        yield _tables(call, turn, {**options, "scaling": "longrope", "original": edge}, [edge, 2 * edges[-1]])


def _tables(call: RotaryCall, turn: Turn, options: dict[str, Any], lengths: list[int]) -> Rope:
    """RoPE with the speeds of a rotary module in rows of these lengths."""
    rope = Rope(**options)
    rope.set_speeds(torch.stack([_speeds(call, turn, length) for length in lengths]))
    return rope


def _speeds(call: RotaryCall, turn: Turn, length: int) -> Tensor:
    """The speeds [pairs] of a rotary module in a row of this length, from its angles at 1, 2, 4, 8, … positions."""
    powers = [2**power for power in range((length - 1).bit_length()) if 2**power < length]
    positions = torch.tensor([0, *powers, length - 1])
    turns = call.of_pairs(call.at(positions), turn.pairs)
    assert turns is not None
    speeds = torch.zeros(turn.pairs, dtype=torch.float64)
    for position, value in zip(positions[1:].tolist(), turns[1:], strict=True):
        speeds = speeds + (value * torch.polar(torch.ones_like(speeds), -speeds * position)).angle() / position
    return speeds * _direction(turn)


def _direction(turn: Turn) -> int:
    """1, or −1 if the attention turns the other way than its cos and sin say."""
    return 1 if float(turn.speeds[turn.speeds.abs().argmax()]) > 0 else -1


def _far(rope: Rope, call: RotaryCall, turn: Turn) -> str | None:
    """Where the angles of a scheme differ from those of the rotary module, in words; None if they agree everywhere."""
    config: Any = getattr(call.module, "config", None)
    for length in sorted(
        {64, *(n for each in lengths_of(config, call.layer_type) for n in (each, each + 1, 2 * each))}
    ):
        positions = torch.tensor(sorted({p for p in (0, 1, 2, 5, length // 3, length - 1) if p < length}))
        try:
            turns = call.of_pairs(call.at(positions), turn.pairs)
        except (IndexError, RuntimeError):  # the model has no such positions
            continue
        angle = positions[:, None] * rope.frequencies(torch.tensor([length])).flatten().cpu() * _direction(turn)
        expected = torch.polar(torch.full_like(angle, rope.magnitude()), angle)
        allowed = rope.magnitude() * (ANGLE + SPEED * angle.abs())
        if turns is None or bool(((turns - expected).abs() > allowed).any()):
            return f"other angles than {type(call.module).__name__} in a row of {length}"
    return None
