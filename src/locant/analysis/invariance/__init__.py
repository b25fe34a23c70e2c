"""How translation-invariant the positions of a model are. Wennberg & Henter 2021, arXiv 2106.01950.

The contribution of position to the logits is translation-invariant if its matrix is Toeplitz, M_ij = f(j − i). Let E be
the table of positions and W_Q, W_K the weights of the first layer. The paper measures

    P = E Eᵀ          F̂ = E W_Q W_Kᵀ Eᵀ / √head_dim, per head          R² = 1 − Σ(M_ij − m_{j−i})² / Σ(M_ij − m)²

where m_r is the mean of diagonal r and m the mean of all entries. Noise has R² > 0: for n random rows of width d with
equal norms, the main diagonal alone explains n d² of n d² + n² d, so R² of P is about d/(n + d), 0.43 for 512 × 384.
So every R² of a table is reported with that of random tables whose rows have the same norms, and R² of E Eᵀ also
without its main diagonal.

`structure` tests for a later finding of the same authors (RepL4NLP 2024): a table uses few dimensions, and these are
sine/cosine pairs of low frequency. Layers and heads count from 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from locant.analysis.invariance.components import Component, Structure, structure
from locant.analysis.invariance.schemes import LENGTH, scheme_logits
from locant.analysis.invariance.scores import Control, HeadInvariance, Invariance, of_heads, of_logits, of_table
from locant.analysis.invariance.toeplitz import toeplitz_r2

if TYPE_CHECKING:
    from locant.analysis.invariance.callback import InvarianceCallback
    from locant.analysis.invariance.models import InvarianceRow, of_model
    from locant.analysis.invariance.stack import Stack, stacks

    Row = InvarianceRow

__all__ = [
    "LENGTH",
    "Component",
    "Control",
    "HeadInvariance",
    "Invariance",
    "InvarianceCallback",
    "InvarianceRow",
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
    """Imports what needs transformers when it is used: it is an optional dependency, and slow to import."""
    if name == "InvarianceCallback":  # with the Trainer, the slowest part of transformers
        from locant.analysis.invariance import callback

        return callback.InvarianceCallback
    if name not in ("InvarianceRow", "Row", "Stack", "of_model", "stacks"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from locant.analysis.invariance import models, stack

    name = "InvarianceRow" if name == "Row" else name  # its earlier name
    return getattr(stack if name in ("Stack", "stacks") else models, name)
