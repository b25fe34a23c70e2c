"""Gradients of a loss over many long texts, at the memory of one (Gao et al. 2021, arXiv 2101.06983).

A contrastive loss depends on the vectors of all texts of a batch. It needs their graphs one at a time only: first all
vectors are computed without gradients, then the gradient of the loss with respect to the vectors. Then each text is
read again with gradients, and its part of that gradient goes on to the weights. This costs one more forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from locant.adaptation.batch import Batch


def cached_backward(
    encode: Callable[[Batch], Tensor], batches: Sequence[Batch], loss: Callable[[Tensor], Tensor]
) -> Tensor:
    """Adds the gradients of `loss` to the weights of `encode`, and returns the loss as a constant.

    encode    makes vectors [B, d] of a batch of texts. It must do the same each time: no dropout.
    batches   the texts; the graph of one batch is in memory at a time.
    loss      a function of the vectors of all texts, [texts, d].
    """
    with torch.no_grad():
        parts = [encode(batch) for batch in batches]
    vectors = torch.cat(parts).requires_grad_()
    with torch.enable_grad():
        value = loss(vectors)
    (gradient,) = torch.autograd.grad(value, vectors)
    for batch, part in zip(batches, gradient.split([len(part) for part in parts]), strict=True):
        with torch.enable_grad():
            torch.autograd.backward(encode(batch), part)  # without a name, so that this graph ends before the next
    return value.detach()
