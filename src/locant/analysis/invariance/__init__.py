"""How translation-invariant the positions of a model are. Wennberg & Henter 2021, arXiv 2106.01950.

What position adds to a logit is translation-invariant when its matrix is Toeplitz, M_ij = f(j − i). With E the table of
positions and W_Q, W_K of the first layer, the paper looks at

    P = E Eᵀ          F̂ = E W_Q W_Kᵀ Eᵀ / √head_dim, per head          R² = 1 − Σ(M_ij − m_{j−i})² / Σ(M_ij − m)²

with m_r the mean of diagonal r and m the mean of all. R² is not 0 for noise: of n random rows of width d with equal
norms, the main diagonal alone explains n d² of n d² + n² d, so that R² of P is about d/(n + d), 0.43 for 512 × 384.
Every R² of a table therefore comes with that of random tables with the same norms of rows, and R² of E Eᵀ also without
its main diagonal.

`structure` looks for what the same authors found later (RepL4NLP 2024): a table lives in few dimensions, which are
sine/cosine pairs of low frequency. Layers and heads count from 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from locant.analysis.invariance.components import Component, Structure, structure
from locant.analysis.invariance.models import Row, of_model
from locant.analysis.invariance.schemes import LENGTH, scheme_logits
from locant.analysis.invariance.scores import Control, HeadInvariance, Invariance, of_heads, of_logits, of_table
from locant.analysis.invariance.stack import Stack, stacks
from locant.analysis.invariance.toeplitz import toeplitz_r2

if TYPE_CHECKING:
    from locant.analysis.invariance.callback import InvarianceCallback

__all__ = [
    "LENGTH",
    "Component",
    "Control",
    "HeadInvariance",
    "Invariance",
    "InvarianceCallback",
    "Row",
    "Stack",
    "Structure",
    "of_heads",
    "of_logits",
    "of_model",
    "of_table",
    "scheme_logits",
    "stacks",
    "structure",
    "toeplitz_r2",
]


def __getattr__(name: str) -> Any:
    """`InvarianceCallback` is imported when it is asked for: the rest needs no transformers."""
    if name == "InvarianceCallback":
        from locant.analysis.invariance.callback import InvarianceCallback

        return InvarianceCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
