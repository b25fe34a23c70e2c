"""How the variance of a transformer's hidden states depends on position, predicted and measured.

A causal model without position embeddings knows position all the same: token m averages m values, and the average of
more values has less variance. Chi et al., "Latent Positional Information is in the Self-Attention Variance of
Transformer Language Models Without Positional Embeddings", ACL 2023, arXiv 2305.13571.

The setting: pre-layer-norm, width d, everything random, N(0, σ²), no biases. Position m = 1 … L.

    plain        layer norm 1;  q, k, v dσ²;  logits s² = d²σ⁴;  Σ weights² 1/m;  attention output d²σ⁴/m;
                 residual σ² + d²σ⁴/m. Tokens are taken to be independent, in every layer.
    corrected    `predict`: the same with softmax weights that are not uniform, and with the correlation of tokens.
    measured     `measure`: any Hugging Face model, random or trained.

All three are the same table of rows (layer, step, source, values), one value for each m.
"""

from __future__ import annotations

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
from locant.analysis.variance.measurement import measure, settings
from locant.analysis.variance.table import CORRECTED, MEASURED, PLAIN, Row, Variances, meets_floor, slope
from locant.analysis.variance.theory import LARGEST, FeedForward, Sigmas, concentration, floor_position, predict

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
    "Variances",
    "concentration",
    "floor_position",
    "measure",
    "meets_floor",
    "predict",
    "settings",
    "slope",
]
