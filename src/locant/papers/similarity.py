"""Similarity of sentences: STS-B without training, by the cosine of two vectors (adaptation/scores.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from locant.papers.place import Place
from locant.papers.steps import Input, open_model, shape_of_input

TOKENS = 2 * 1500 * 30
"""Tokens of the pairs in dev.tsv, roughly; for the estimate of the cost."""


@dataclass(frozen=True)
class Similarity:
    """Measures one model; the function of a `Measuring` step. `original` is the model whose pooling is used."""

    model: Input
    original: Input
    data: Input

    def __call__(self, at: Place) -> dict[str, Any]:
        """Returns Spearman's correlation with the human scores."""
        from locant.adaptation.scores import Stsb
        from locant.hf.pooling import pooling_of
        from locant.hf.sentence_folder import sentence_folder

        task = Stsb(str(self.data.path(at)), pooling_of(sentence_folder(str(self.original.path(at))), None))
        model, tokenizer = open_model(self.model.path(at))
        with torch.no_grad():
            return {"correlation": task(model.eval(), tokenizer)}

    def cost(self, at: Place) -> float:
        """Returns the floating-point operations."""
        return shape_of_input(self.original, at).reading(TOKENS, 30)
