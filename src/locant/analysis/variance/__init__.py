"""How the variance of a transformer's hidden states depends on position, predicted and measured.

A causal model encodes position even without position embeddings: token m averages m values, and the average of more
values has less variance. Chi et al., "Latent Positional Information is in the Self-Attention Variance of Transformer
Language Models Without Positional Embeddings", ACL 2023, arXiv 2305.13571.

The setting: pre-layer-norm, width d, all weights random, N(0, σ²), no biases. Position m = 1 … L.

    plain        layer norm 1;  q, k, v dσ²;  logits s² = d²σ⁴;  Σ weights² 1/m;  attention output d²σ⁴/m;
                 residual σ² + d²σ⁴/m. It assumes independent tokens in every layer.
    corrected    `predict`: the same with softmax weights that are not uniform, and with correlated tokens.
    measured     `measure`: any Hugging Face model, random or trained.

All three are tables of the same kind: rows (layer, step, source, values) with one value for each m.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from locant.analysis.steps import (
    ATTENTION,
    FEED_FORWARD,
    INPUT,
    KEY,
    LOGITS,
    NORM,
    OUTPUT,
    QUERY,
    RESIDUAL,
    STEPS,
    VALUE,
    WEIGHTS,
)
from locant.analysis.variance.table import CORRECTED, MEASURED, PLAIN, VarianceRow, Variances, meets_floor, slope
from locant.analysis.variance.theory import LARGEST, FeedForward, Sigmas, concentration, floor_position, predict

if TYPE_CHECKING:
    from locant.analysis.variance.measurement import measure, settings

Row = VarianceRow
"""The earlier name of VarianceRow."""

__all__ = [
    "ATTENTION",
    "CORRECTED",
    "FEED_FORWARD",
    "INPUT",
    "KEY",
    "LARGEST",
    "LOGITS",
    "MEASURED",
    "NORM",
    "OUTPUT",
    "PLAIN",
    "QUERY",
    "RESIDUAL",
    "STEPS",
    "VALUE",
    "WEIGHTS",
    "FeedForward",
    "Row",
    "Sigmas",
    "VarianceRow",
    "Variances",
    "concentration",
    "floor_position",
    "measure",
    "meets_floor",
    "predict",
    "settings",
    "slope",
]


def __getattr__(name: str) -> Any:
    """Imports what needs transformers when it is used: it is an optional dependency, and slow to import."""
    if name not in ("measure", "settings"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from locant.analysis.variance import measurement

    return getattr(measurement, name)
