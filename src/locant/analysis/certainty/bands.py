"""Intervals of curves, kernels and buckets, from the posterior of the parameters of a scheme.

With the learned parameters θ̂ and a posterior N(θ̂, C), a curve f(r; θ) has by the delta method

    mean  f(r; θ̂)        variance  J_r C J_rᵀ        J_r = ∂f(r)/∂θ at θ̂

which is exact if f is linear in θ (tables, T5). TISA's f is not linear in sharpness and offset. So the spread of f over
random θ from the posterior is computed as well: a band whose two widths differ by more than a factor of DOUBTFUL is
marked, and with `samples` intervals are quantiles of these f. The norm of a vector is not linear either, and cannot be
negative: where it is near 0, the delta method is always doubtful.

A constant that is added to all logits of a query has no effect. So no text determines the level of a bias, and a curve
that is added to the logits is centred: f(r) − Σ_r ω_r f(r). ω_r is the share of visible pairs of tokens at offset r:
offsets that a window or causality hides have none, and a curve is not shown there.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from locant.analysis.certainty.flat import Flat
from locant.analysis.certainty.posterior import Posterior
from locant.analysis.curve import WHAT, quantities
from locant.schemes import Scheme

CENTRED = ("bias", "pair")
"""Quantities that are added to logits."""
NEUTRAL = {"gain": 1.0, "level": 1.0, "rotate": 1.0, "embed": 1.0}
"""The value without effect; 0 for all other quantities."""
DRAWS = 200
"""Random parameters with which the delta method is checked."""
DOUBTFUL = 1.5
"""Ratio between the widths by the delta method and by random parameters above which a band is doubtful."""


@dataclass(frozen=True)
class Band:
    """One quantity of one head over the offset, with intervals. Curves that are added to logits are centred."""

    place: str  # "layer 2"
    head: int | None  # from 1; None for the mean over heads, which does not depend on their order
    scheme: str
    field: str  # as in `analysis.curve`
    what: str
    r: tuple[int, ...]
    weight: tuple[float, ...]  # ω: the share of visible pairs at the offset
    value: tuple[float, ...]  # of the learned parameters
    sd: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    doubtful: bool  # the delta method and random parameters disagree

    @property
    def neutral(self) -> float:
        """The value without effect."""
        return NEUTRAL.get(self.field, 0.0)

    @property
    def size(self) -> float:
        """The mean square of the learned curve, Σ ω (value − neutral)²."""
        return sum(w * (y - self.neutral) ** 2 for w, y in zip(self.weight, self.value, strict=True))

    @property
    def noise(self) -> float:
        """Σ ω sd² / size: 1 or more for a curve that cannot be told from noise."""
        variance = sum(w * sd * sd for w, sd in zip(self.weight, self.sd, strict=True))
        return variance / self.size if self.size > 0 else math.inf

    @property
    def signal(self) -> float:
        """The share of the curve that is not noise: 1 − noise, and 0 if the noise is larger than the curve."""
        return max(0.0, 1 - self.noise)

    @property
    def excluded(self) -> float:
        """The share ω of the offsets whose interval excludes the value without effect."""
        edges = zip(self.weight, self.low, self.high, strict=True)
        return sum(w for w, low, high in edges if not low <= self.neutral <= high)


@dataclass(frozen=True)
class Bump:
    """One kernel of a scheme that is a sum of kernels (TISA). Is it there at all?"""

    place: str
    head: int  # from 1
    kernel: int  # from 1
    amplitude: float
    low: float  # interval of the amplitude
    high: float
    nats: float  # increase of the loss per observation when the amplitude becomes 0 and nothing else changes, by H
    sharpness: float
    offset: float

    @property
    def there(self) -> bool:
        """Whether the interval of its amplitude excludes 0.

        Of two kernels of the same centre and width, either may be absent: only their sum is determined.
        """
        return not self.low <= 0 <= self.high


@dataclass(frozen=True)
class Bucket:
    """One bucket of a bias per bucket of offsets (T5), centred like the curve."""

    place: str
    head: int  # from 1
    bucket: int  # from 0
    first: int  # the offsets of the bucket that were measured
    last: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Bands:
    """All intervals of one scheme."""

    bands: tuple[Band, ...]
    averages: tuple[Band, ...]  # over heads
    bumps: tuple[Bump, ...]
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class Offsets:
    """The offsets −reach … reach of a curve, and the pairs of tokens that attention sees at each."""

    reach: int
    pairs: Tensor  # [2 L − 1]: visible pairs at offsets −(L − 1) … L − 1, in sequences of L tokens; reach < L

    def weight(self, reach: int) -> Tensor:
        """Returns ω [2·reach + 1]: visible pairs at each offset, as a share of those at all these offsets.

        0 where the model sees no pair: beyond its window, and after the query if it is causal.
        """
        middle = len(self.pairs) // 2
        pairs = self.pairs[middle - reach : middle + reach + 1].double()
        if not float(pairs.sum()) > 0:
            raise ValueError(f"attention sees no pair of tokens at offsets up to {reach}; pass a larger reach")
        return pairs / pairs.sum()


class _Outputs:
    """The quantities of a scheme as one vector, and back."""

    def __init__(self, flat: Flat, offsets: Offsets) -> None:
        self.offsets = offsets
        r, found = quantities(flat.scheme, offsets.reach)
        self.r = r
        reach = int(r[-1])  # a scheme with few positions has fewer offsets
        self.weight = offsets.weight(reach)
        self.shapes = {name: values.shape for name, values in found.items()}

    def __call__(self, scheme: Scheme) -> Tensor:
        _, found = quantities(scheme, self.offsets.reach)
        rows = []
        for name, shape in self.shapes.items():
            values = found[name].expand(shape).double()
            if name in CENTRED:
                values = values - (values * self.weight).sum(-1, keepdim=True)
            rows.append(torch.cat([values, values.mean(0, keepdim=True)]))
        return torch.cat(rows).flatten()

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Returns [heads + 1, R] by field; the last row is the mean over heads."""
        rows = vector.view(-1, len(self.r))
        parts = rows.split([shape[0] + 1 for shape in self.shapes.values()])
        return dict(zip(self.shapes, parts, strict=True))


def bands_of(
    flat: Flat, found: Posterior, offsets: Offsets, *, place: str, level: float, samples: int, information: Tensor
) -> Bands:
    """Returns the intervals of all quantities of a scheme that depend on its parameters.

    information   [P, P], the curvature of the loss per observation.
    """
    outputs = _Outputs(flat, offsets)
    jacobian = flat.jacobian(outputs)
    value = outputs(flat.scheme).detach()
    sd = found.variances(jacobian).sqrt()
    drawn = _drawn(flat, found, outputs, max(samples, DRAWS))
    half = NormalDist().inv_cdf((1 + level) / 2)
    low, high = value - half * sd, value + half * sd
    # The middle 68 % of the draws: kernels that leave the range make a few of them huge.
    tails = torch.quantile(drawn, torch.tensor([0.1587, 0.8413], dtype=torch.float64), dim=0)
    spread = (tails[1] - tails[0]) / 2
    if samples:
        edges = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
        (low, high), sd = torch.quantile(drawn, edges, dim=0), drawn.std(0)
    parts = {name: outputs.split(x) for name, x in (("value", value), ("sd", sd), ("low", low),
                                                    ("high", high), ("spread", spread))}  # fmt: skip
    moved = outputs.split(jacobian.abs().amax(1))
    bands, averages = [], []
    for field, shape in outputs.shapes.items():
        if not bool((moved[field] > 0).any()):  # a rotation without parameters beside a bias with some
            continue
        rows = [
            _band(outputs, {name: part[field][row] for name, part in parts.items()}, place=place, field=field,
                  head=None if row == shape[0] else row + 1, scheme=str(flat.scheme))
            for row in range(shape[0] + 1)
        ]  # fmt: skip
        bands += rows[:-1]
        averages += rows[-1:]
    bumps = _bumps(flat, found, place, half, information)
    return Bands(tuple(bands), tuple(averages), bumps, _buckets(flat.scheme, bands))


def _drawn(flat: Flat, found: Posterior, outputs: _Outputs, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return torch.stack([flat.call(theta, outputs) for theta in found.draw(count, generator)])


def _band(outputs: _Outputs, rows: dict[str, Tensor], *, place: str, field: str, head: int | None, scheme: str) -> Band:
    shown = outputs.weight > 0
    weight, sd, spread = (x[shown] for x in (outputs.weight, rows["sd"], rows["spread"]))
    by_delta, by_draws = (float((weight * x.square()).sum().sqrt()) for x in (sd, spread))
    agree = by_delta == by_draws or max(by_delta, by_draws) <= DOUBTFUL * min(by_delta, by_draws)
    numbers = {name: tuple(rows[name][shown].tolist()) for name in ("value", "sd", "low", "high")}
    return Band(
        place, head, scheme, field, WHAT[field], tuple(outputs.r[shown].tolist()), tuple(weight.tolist()), **numbers,
        doubtful=not agree,
    )  # fmt: skip


def _bumps(flat: Flat, found: Posterior, place: str, half: float, information: Tensor) -> tuple[Bump, ...]:
    r = torch.zeros(1, dtype=torch.long)
    parts = [n for n, part in enumerate(flat.scheme.parts_of_sum()) if part.components(r) is not None]
    bumps = []
    for number in parts:

        def amplitudes(scheme: Scheme, number: int = number) -> Tensor:
            components = scheme.parts_of_sum()[number].components(r)
            assert components is not None
            return components.amplitude.flatten()

        with torch.no_grad():
            components = flat.scheme.parts_of_sum()[number].components(r)
        assert components is not None
        jacobian = flat.jacobian(amplitudes)
        value = amplitudes(flat.scheme).detach()
        sd = found.variances(jacobian).sqrt()
        away = -value[:, None] * jacobian / jacobian.square().sum(-1, keepdim=True).clamp(min=1e-30)
        nats = ((away @ information) * away).sum(-1) / 2
        kernels = components.amplitude.shape[1]
        sharpness, offset = components.sharpness.detach().abs(), components.offset.detach()
        for at in range(len(value)):
            head, kernel = divmod(at, kernels)
            a, s = float(value[at]), half * float(sd[at])
            shape = float(sharpness[head, kernel]), float(offset[head, kernel])
            bumps.append(Bump(place, head + 1, kernel + 1, a, a - s, a + s, float(nats[at]), *shape))
    return tuple(bumps)


def _buckets(scheme: Scheme, bands: list[Band]) -> tuple[Bucket, ...]:
    """The buckets of a scheme that is a bias per bucket and nothing else."""
    if scheme.bucket_table is None or len(scheme.parts_of_sum()) > 1:
        return ()
    numbered = copy.deepcopy(scheme)
    table = numbered.bucket_table
    assert table is not None
    table.data.copy_(torch.arange(table.shape[1]).expand_as(table))
    found = []
    for band in bands:
        bias = numbered.terms(torch.tensor(band.r)).bias
        assert bias is not None
        for bucket in (of := bias[0].round().long()).unique().tolist():
            places = (of == bucket).nonzero()[:, 0].tolist()
            at, edges = places[0], (band.r[places[0]], band.r[places[-1]])
            found.append(
                Bucket(band.place, band.head or 1, bucket, *edges, band.value[at], band.low[at], band.high[at])
            )
    return tuple(found)
