"""Translation invariance of position tables in training: its rise, and whether it goes with the loss.

R² is that of E Eᵀ without the main diagonal, as a run logs it (`invariance/off_diagonal`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from locant.experiments.results import RunResult
from locant.experiments.statistics import Estimate, estimate
from locant.papers.claim import Measured, Part, Table
from locant.papers.effects import rank_correlation

R2 = "invariance/off_diagonal"
ENDS = 0.1
"""Share of the logged steps that count as the start of a run, and as its end."""


@dataclass(frozen=True)
class TrainedTable:
    """One trained model: its size, its budget, R² at the end, and its test loss."""

    shape: str  # "3 × 96"
    steps: int
    seed: int
    r2: float
    loss: float


def logged(run: RunResult) -> list[tuple[int, float, float]]:
    """Returns step, R² and training loss of every logged step that has both."""
    return [(int(row["step"]), float(row[R2]), float(row["loss"])) for row in run.steps if R2 in row and "loss" in row]


def start_and_end(run: RunResult) -> tuple[float, float]:
    """Returns the mean R² over the first tenth of the logged steps, and over the last tenth."""
    values = [r2 for _, r2, _ in logged(run)]
    if not values:
        raise ValueError(f"the run {run.run.name} has no logged R²: its model has no table of positions")
    part = max(1, math.floor(ENDS * len(values)))
    return math.fsum(values[:part]) / part, math.fsum(values[-part:]) / part


def trend(run: RunResult) -> float:
    """Returns Spearman's correlation of R² with the step, from −1 (falls throughout) to 1 (rises throughout)."""
    rows = logged(run)
    return correlation([step for step, _, _ in rows], [r2 for _, r2, _ in rows])


def along(run: RunResult) -> float:
    """Returns Spearman's correlation of R² with minus the training loss over the logged steps of one run."""
    rows = logged(run)
    return correlation([r2 for _, r2, _ in rows], [-loss for _, _, loss in rows])


def correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Returns Spearman's correlation; 0 if one side is constant or there are fewer than three points."""
    if len(x) < 3:
        return 0.0
    return _pearson(_ranks(x), _ranks(y))


def over_models(models: Sequence[TrainedTable]) -> Estimate:
    """Returns the rank correlation of R² with minus the test loss over models. The bootstrap draws whole groups: models
    of one size and one budget are not independent."""
    groups = [(one.shape, one.steps) for one in models]
    return rank_correlation([one.r2 for one in models], [-one.loss for one in models], groups)


def beyond_size_and_budget(models: Sequence[TrainedTable]) -> Estimate:
    """Returns the correlation of the ranks of R² and of minus the loss inside groups of one size and budget.

    The mean rank of its group is subtracted from every rank: what is left has nothing to do with size or training time.
    """
    groups = [(one.shape, one.steps) for one in models]
    x, y = (_inside(_ranks(values), groups) for values in ([m.r2 for m in models], [-m.loss for m in models]))
    return rank_correlation(x.tolist(), y.tolist(), groups)


Runs = Sequence[tuple[str, RunResult]]
"""Runs with the name of their shape."""


def rise(runs: Runs, beside: Runs, asks_rise: str, asks_trend: str) -> Measured:
    """Returns the rise of R² over runs. The runs `beside` them are in the tables only."""
    ends = [start_and_end(run) for _, run in runs]
    trends = [trend(run) for _, run in runs]
    parts = [
        Part(asks_rise, "all models", estimate([end - start for start, end in ends])),
        Part(asks_trend, "all models", estimate(trends)),
    ]
    shown = [*runs, *beside]
    rows = [(shape, run.run.seed, *start_and_end(run), trend(run)) for shape, run in shown]
    by_step = [(shape, run.run.seed, step, r2, loss) for shape, run in shown for step, r2, loss in logged(run)]
    tables = {
        "rise": Table(("shape", "seed", "R² at the start", "R² at the end", "trend"), rows),
        "by step": Table(("shape", "seed", "step", "R²", "loss"), by_step),
    }
    rose = sum(end > start for start, end in ends)
    return Measured(
        parts, tables, [f"R² rose in {rose} of {len(ends)} models, by {parts[0].effect.mean:.3f} on average."]
    )


def performance(models: list[TrainedTable], longest: Runs, asks: str) -> Measured:
    """Returns the correlation of R² with the loss over models, inside groups, and along the steps of the long runs."""
    over = over_models(models)
    inside = beyond_size_and_budget(models)
    in_runs = estimate([along(run) for _, run in longest])
    header = ("among", "correlation", "low", "high", "independent groups")
    others = [
        (name, each.mean, each.low, each.high, each.count)
        for name, each in (
            ("all models", over),
            ("models of one size and one budget", inside),
            ("steps of each of the longest runs", in_runs),
        )
    ]
    rows = [(one.shape, one.steps, one.seed, one.r2, one.loss) for one in models]
    return Measured(
        [Part(asks, f"{len(models)} models", over)],
        {
            "models": Table(("shape", "steps", "seed", "R²", "loss"), rows),
            "correlations": Table(header, others),
        },
        [
            f"Over {len(models)} models the rank correlation is {over.mean:.2f}; among models of one size and budget "
            f"it is {inside.mean:.2f}, and along the steps of a run {in_runs.mean:.2f}."
        ],
    )


def _inside(ranks: NDArray[np.float64], groups: Sequence[object]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = ranks.copy()
    for each in dict.fromkeys(groups):
        own = np.array([group == each for group in groups])
        found[own] -= ranks[own].mean()
    return found


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    from scipy.stats import rankdata  # optional, and takes a second

    ranks: NDArray[np.float64] = np.asarray(rankdata(values), dtype=np.float64)
    return ranks


def _pearson(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    x, y = x - x.mean(), y - y.mean()
    size = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    return float((x * y).sum()) / size if size > 0 else 0.0
