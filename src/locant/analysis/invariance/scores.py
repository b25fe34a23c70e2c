"""R² of a table of positions, of the logits that heads compute from it, and of measured logits, with controls."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.analysis.invariance.toeplitz import r2_of, without_diagonal

NONE = math.nan

Norm = Callable[[Tensor], Tensor]
"""A layer norm, as a function of the rows of a table."""


@dataclass(frozen=True)
class Control:
    """R² of random data: mean over samples, 2.5 % and 97.5 % quantiles."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Invariance:
    """R² of a table over positions first … last (both included). `cosine` is NaN where a row is zero."""

    first: int
    last: int
    gram: float  # of E Eᵀ
    gram_interval: tuple[float, float]  # 95 %, over positions
    gram_control: Control
    off_diagonal: float  # of E Eᵀ without its main diagonal, the only reason why a random table scores high
    off_diagonal_interval: tuple[float, float]
    off_diagonal_control: Control
    cosine: float  # of the cosines between rows
    cosine_interval: tuple[float, float]
    cosine_control: Control
    norm_of_0: float  # of position 0, divided by the median norm over first … last


@dataclass(frozen=True)
class HeadInvariance:
    """R² of one head."""

    head: int  # from 1
    r2: float
    control: Control


@torch.no_grad()
def of_table(table: Tensor, *, first: int = 1, last: int | None = None, samples: int = 50, seed: int = 0) -> Invariance:
    """Returns R² of E Eᵀ and of cosines, over positions first … last (default: all but 0, an outlier in BERT's table).

    Intervals come from leaving out positions, not coordinates: without its sine/cosine partner, a coordinate of a
    Toeplitz table is not Toeplitz. See `_interval`. The control is `samples` tables with random directions and the
    norms of E's rows.
    """
    rows, first, last = rows_of(table, first, last)
    generator = torch.Generator().manual_seed(seed)
    norms = rows.norm(dim=-1, keepdim=True)
    gram = rows @ rows.mT
    of_gram, of_rest, of_cosine = [], [], []
    for _ in range(samples):
        random = _unit(rows.shape, generator)
        of_cosine.append(float(r2_of(random @ random.mT)))
        random = random * norms
        of_gram.append(float(r2_of(random @ random.mT)))
        of_rest.append(float(r2_of(without_diagonal(random @ random.mT))))
    cosine, by_cosine = NONE, (NONE, NONE)
    if bool((norms > 0).all()):
        unit = rows / norms
        cosine, by_cosine = float(r2_of(unit @ unit.mT)), _interval(unit @ unit.mT)
    return Invariance(
        first=first,
        last=last,
        gram=float(r2_of(gram)),
        gram_interval=_interval(gram),
        gram_control=_control(of_gram),
        off_diagonal=float(r2_of(without_diagonal(gram))),
        off_diagonal_interval=_interval(without_diagonal(gram)),
        off_diagonal_control=_control(of_rest),
        cosine=cosine,
        cosine_interval=by_cosine,
        cosine_control=_control(of_cosine),
        norm_of_0=float(table[0].double().norm().cpu() / norms.median()),
    )


def rows_of(table: Tensor, first: int, last: int | None) -> tuple[Tensor, int, int]:
    """Returns rows first … last of a table in float64 on the CPU, and both bounds."""
    if table.ndim != 2 or not table.is_floating_point():
        raise ValueError(f"table must be floats [positions, width]; got {table.dtype} {list(table.shape)}")
    last = table.shape[0] - 1 if last is None else last
    if not 0 <= first < last < table.shape[0]:
        raise ValueError(
            f"positions must satisfy 0 ≤ first < last < {table.shape[0]}, the length of the table; "
            f"got first={first}, last={last}"
        )
    rows = table[first : last + 1].detach().double().cpu()
    if not rows.isfinite().all():
        raise ValueError("the table contains NaN or infinity")
    return rows, first, last


def _unit(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return F.normalize(torch.randn(shape, generator=generator, dtype=torch.float64), dim=-1)


def _control(values: list[float]) -> Control:
    if not values:
        return Control(NONE, NONE, NONE)
    found = torch.tensor(values, dtype=torch.float64)
    return Control(float(found.mean()), float(found.quantile(0.025)), float(found.quantile(0.975)))


def _interval(matrix: Tensor) -> tuple[float, float]:
    """95 % interval of R²: the jackknife over blocks of √n neighboring positions, each left out once.

    The other positions keep their places, so a Toeplitz matrix stays Toeplitz. We do not use the bootstrap: a position
    drawn twice fills diagonals with copies, which raises R² (by 0.03 … 0.1 in simulated tables of known R²). In that
    simulation this interval contained the true value in 97 … 100 % of the cases, so it is wider than it needs to be.
    """
    n = matrix.shape[0]
    size = max(1, round(math.sqrt(n)))
    place, values = torch.arange(n), []
    for start in range(0, n, size):
        kept = torch.cat([place[:start], place[start + size :]])
        if len(kept) < 2:
            return NONE, NONE
        part = matrix[kept][:, kept]
        part = (part - part.mean()).flatten()
        offset = (kept[None] - kept[:, None] + n - 1).flatten()
        sums, count = torch.bincount(offset, part), torch.bincount(offset)
        total = part.square().sum()
        constant = float(total) <= n**2 * (1e-14 * float(matrix.abs().max())) ** 2
        values.append(1.0 if constant else float((sums.square() / count.clamp(min=1)).sum() / total))
    found, blocks = torch.tensor(values, dtype=torch.float64), len(values)
    error = math.sqrt((blocks - 1) ** 2 / blocks * float(found.var()))  # (blocks − 1)/blocks · Σ(x − mean)²
    middle = float(r2_of(matrix))
    return max(0.0, middle - 1.96 * error), min(1.0, middle + 1.96 * error)


@torch.no_grad()
def of_heads(
    table: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    n_heads: int,
    *,
    norm: Norm | None = None,
    first: int = 1,
    last: int | None = None,
    samples: int = 20,
    seed: int = 0,
) -> list[HeadInvariance]:
    """Returns R² of F̂ = E W_Q W_Kᵀ Eᵀ / √head_dim, per head.

    w_q and w_k are [heads · head_dim, width], as in nn.Linear; w_k may have fewer heads (grouped queries). A model
    applies a layer norm to token + position before attention. The paper leaves it out, and so do we, unless the caller
    passes a `norm`: it is then applied to E. The control puts random tables with E's norms through the same weights.
    """
    rows, first, last = rows_of(table, first, last)
    if w_q.ndim != 2 or w_q.shape[0] % n_heads or w_q.shape[1] != rows.shape[1] or w_k.shape[1:] != w_q.shape[1:]:
        raise ValueError(
            f"w_q and w_k must be [heads · head_dim, {rows.shape[1]}] with {n_heads} heads; "
            f"got {list(w_q.shape)} and {list(w_k.shape)}"
        )
    if w_k.shape[0] == 0 or w_q.shape[0] % w_k.shape[0]:
        raise ValueError(f"the number of rows of w_q, {w_q.shape[0]}, must be a multiple of w_k's, {w_k.shape[0]}")
    w_q, w_k = (w.detach().double().cpu() for w in (w_q, w_k))
    norms, generator = rows.norm(dim=-1, keepdim=True), torch.Generator().manual_seed(seed)
    found = r2_of(head_logits(rows, w_q, w_k, n_heads, norm))
    control = [
        r2_of(head_logits(_unit(rows.shape, generator) * norms, w_q, w_k, n_heads, norm)).tolist()
        for _ in range(samples)
    ]
    return [
        HeadInvariance(head + 1, float(r2), _control([draw[head] for draw in control])) for head, r2 in enumerate(found)
    ]


def head_logits(rows: Tensor, w_q: Tensor, w_k: Tensor, n_heads: int, norm: Norm | None) -> Tensor:
    """Returns F̂ of each head, [heads, positions, positions]."""
    head_dim = w_q.shape[0] // n_heads
    rows = rows if norm is None else norm(rows)
    q, k = ((rows @ w.mT).unflatten(-1, (-1, head_dim)).transpose(0, 1) for w in (w_q, w_k))
    logits: Tensor = q @ k.repeat_interleave(n_heads // k.shape[0], dim=0).mT / math.sqrt(head_dim)  # [H, n, n]
    return logits


@torch.no_grad()
def of_logits(logits: Tensor, *, samples: int = 20, seed: int = 0) -> list[HeadInvariance]:
    """Returns R² of positional logits [heads, n, n] from any source. The control is the same numbers, permuted."""
    if logits.ndim != 3 or logits.shape[1] != logits.shape[2] or logits.shape[1] < 2:
        raise ValueError(f"logits must be [heads, n, n] with n ≥ 2; got {list(logits.shape)}")
    if not logits.isfinite().all():
        raise ValueError("the logits contain NaN or infinity")
    logits, generator = logits.detach().cpu(), torch.Generator().manual_seed(seed)
    control = []
    for _ in range(samples):
        order = torch.randperm(logits[0].numel(), generator=generator)
        control.append(r2_of(logits.flatten(1)[:, order].view_as(logits)).tolist())
    return [
        HeadInvariance(head + 1, float(r2), _control([draw[head] for draw in control]))
        for head, r2 in enumerate(r2_of(logits))
    ]
