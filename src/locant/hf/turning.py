"""Which coordinates of queries or keys a rotation turns, in which pairs and how fast: measured on numbers alone.

    turned[…, i, :] = m · R(speeds · position_i) · plain[…, i, :]

`measure` gets vectors before and after a rotation by position. It returns the `Turn` that explains them, or raises
`NotATurn` with the error of the best explanation. There is no model here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from locant.schemes.rope import LAYOUTS

EXACT = 1e-5
"""Largest error of an explanation, as a share of the largest number, for float32. Wider for half precision."""


@dataclass(frozen=True)
class Turn:
    """A rotation of 2·pairs neighbouring coordinates."""

    first: int  # the first of these coordinates
    pairs: int
    layout: str  # half: t and t + pairs; interleaved: 2t and 2t + 1, counted from `first`
    speeds: Tensor  # [pairs], float64: radians per position; negative for the other direction
    magnitude: float  # factor on these coordinates
    error: float  # largest difference to the numbers that were measured, as a share of the largest of them

    def __str__(self) -> str:
        return f"{self.pairs} pairs from coordinate {self.first} on, layout {self.layout}, factor {self.magnitude:.6g}"


class NotATurn(ValueError):
    """The numbers are not a rotation by position."""


def measure(
    plain: Tensor, turned: Tensor, positions: Tensor, *, pairs: Iterable[int] = (), tolerance: float | None = None
) -> Turn | None:
    """Returns the rotation that makes `turned` of `plain`, both [B, H, L, D], at positions [L]; None if they are equal.

    pairs       how many pairs to try first. Slow pairs do not move visibly within a few positions, so the numbers alone
                may leave open where the rotated coordinates end.
    tolerance   largest error of an explanation; by default that of rounding in the dtype of the arguments.
    """
    if plain.shape != turned.shape:
        raise NotATurn(f"the vectors have shape {list(plain.shape)} before the rotation, {list(turned.shape)} after it")
    if torch.equal(plain, turned):
        return None
    limit = error_limit(turned.dtype) if tolerance is None else tolerance
    before, after = (x.detach().double().flatten(0, 1) for x in (plain, turned))  # [N, L, D]
    size = float(torch.maximum(before.abs().amax(), after.abs().amax()))
    moved = ((after - before).abs().amax((0, 1)) > 1e-3 * limit * size).nonzero().flatten().tolist()
    if not moved:
        return None
    first, last, width = moved[0], moved[-1], before.shape[-1]
    best: Turn | None = None
    # Coordinates before the first that moves may turn too: learned weights can make a pair too small to be seen.
    starts = list(dict.fromkeys([first, 0]))
    every = [(start, number) for start in starts for number in range(1, (width - start) // 2 + 1)]
    enough = [(start, number) for start, number in every if start + 2 * number > last]
    likely = [(start, number) for number in pairs for start in starts if (start, number) in enough]
    for start, number in dict.fromkeys([*likely, *enough]):
        for layout in LAYOUTS:
            turn = _fitted(before, after, positions.double().flatten(), start, number, layout, size)
            if best is None or turn.error < best.error:
                best = turn
        if best is not None and best.error <= limit:
            return best
    found = (
        "no rotation fits their number" if best is None else f"the nearest is {best}, with an error of {best.error:.1e}"
    )
    raise NotATurn(f"coordinates {first} to {last} of {width} change with position, but not by a rotation: {found}")


def measure_both(
    plain: tuple[Tensor, Tensor], turned: tuple[Tensor, Tensor], positions: Tensor, *, pairs: Iterable[int] = ()
) -> Turn | None:
    """Returns the rotation of queries and keys, which must be the same for both; None if nothing turns."""
    query = measure(plain[0], turned[0], positions, pairs=pairs)
    key = measure(plain[1], turned[1], positions, pairs=pairs if query is None else (query.pairs, *pairs))
    if query is None and key is None:
        return None
    if not plain[1].any():  # keys of zeros, as in some models before training, say nothing
        return query
    if query is None or key is None:
        raise NotATurn(f"only {'keys' if query is None else 'queries'} turn with position")
    limit = error_limit(turned[0].dtype)
    same = (query.first, query.pairs, query.layout) == (key.first, key.pairs, key.layout)
    if not same or abs(query.magnitude - key.magnitude) > 10 * limit * query.magnitude:
        raise NotATurn(f"queries and keys do not turn alike: {query} and {key}")
    return query


def error_limit(dtype: torch.dtype) -> float:
    """Returns the largest error of an explanation of numbers in this dtype."""
    return max(EXACT, 8 * torch.finfo(dtype).eps)


def pair_of(first: int, pairs: int, layout: str) -> tuple[Tensor, Tensor]:
    """Returns the first and second coordinate of every pair, [pairs] each."""
    index = torch.arange(pairs)
    if layout == "half":
        return first + index, first + pairs + index
    return first + 2 * index, first + 2 * index + 1


def _fitted(before: Tensor, after: Tensor, positions: Tensor, first: int, pairs: int, layout: str, size: float) -> Turn:
    """The rotation of given pairs that is nearest to the numbers [N, L, D]."""
    a, b = (index.to(before.device) for index in pair_of(first, pairs, layout))
    plain = torch.complex(before[..., a], before[..., b])  # [N, L, pairs]
    turned = torch.complex(after[..., a], after[..., b])
    product = (turned * plain.conj()).sum(0)  # [L, pairs]: magnitude · exp(i · speed · position) · power
    power = plain.abs().square().sum(0)
    magnitude = float(product.abs().sum() / power.sum().clamp(min=1e-300))
    speeds = _speeds(product, positions)
    predicted = plain * magnitude * torch.polar(torch.ones_like(power), positions[:, None] * speeds)
    expected = before.clone()
    expected[..., a], expected[..., b] = predicted.real, predicted.imag
    error = float((expected - after).abs().amax()) / max(size, 1e-300)
    return Turn(first, pairs, layout, speeds.cpu(), magnitude, error)


def _speeds(product: Tensor, positions: Tensor) -> Tensor:
    """Radians per position [pairs] from numbers with the angles speed · position, [L, pairs].

    Angles are known up to full turns. Small positions come first; each estimate then tells the full turns of the next
    position. The last estimate is a least-squares fit over all positions.
    """
    speeds = torch.zeros(product.shape[1], dtype=torch.float64, device=product.device)
    for index in positions.abs().argsort().tolist():
        position = float(positions[index])
        if position != 0:
            speeds = speeds + _left(product[index], speeds * position) / position
    weight = product.abs()
    left = _left(product, positions[:, None] * speeds)
    total = (weight * positions[:, None].square()).sum(0)
    return speeds + (weight * positions[:, None] * left).sum(0) / total.clamp(min=1e-300)


def _left(product: Tensor, angle: Tensor) -> Tensor:
    """What is left of the angle of a complex number after `angle`, between −π and π."""
    return (product * torch.polar(torch.ones_like(angle), -angle)).angle()
