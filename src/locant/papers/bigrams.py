"""The cross-entropy of a smoothed bigram model: a language model that reaches less has learned from longer contexts.

Interpolated Kneser–Ney with one discount D = n₁ / (n₁ + 2n₂), n_k the number of pairs seen k times:

    p(w | v) = max(c(v, w) − D, 0) / c(v) + D · n(v) / c(v) · p₁(w)        n(v): different tokens seen after v
    p₁(w) = (n(· w) + 1) / (Σ n(· w) + V)                                 n(· w): different tokens seen before w

It is the strongest of the simple smoothings, so a model that beats it beats the others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
UNSEEN = 0.5
"""The discount of a text in which no pair occurs only once: unseen pairs must have some probability."""


def cross_entropy(train: Ids, before: Ids, after: Ids, vocabulary: int) -> float:
    """Returns the mean of −log p(after | before) in nats, of a model counted on the stream `train`."""
    pairs, counts = np.unique(train[:-1] * vocabulary + train[1:], return_counts=True)
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    discount = once / (once + 2 * twice) if once else UNSEEN
    first, second = pairs // vocabulary, pairs % vocabulary
    total = np.bincount(first, counts, vocabulary)  # c(v)
    followers = np.bincount(first, minlength=vocabulary)  # n(v)
    preceding = np.bincount(second, minlength=vocabulary)  # n(· w)
    lower = (preceding + 1) / (preceding.sum() + vocabulary)
    wanted = before * vocabulary + after
    at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    seen = np.where(pairs[at] == wanted, counts[at], 0)
    context = np.maximum(total[before], 1)
    left = np.where(total[before] > 0, discount * followers[before] / context, 1.0)
    return float(-np.log(np.maximum(seen - discount, 0) / context + left * lower[after]).mean())
