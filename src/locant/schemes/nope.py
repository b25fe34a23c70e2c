"""NoPE: no position at all.

    logit = scale · q_i·k_j

A causal model can still infer positions from the variance of its attention output (Chi et al. 2023, arXiv 2305.13571;
Haviv et al. 2022, arXiv 2203.16634). A bidirectional one cannot.
"""

from locant.schemes.base import Scheme


class Nope(Scheme):
    """No positions. Parameters: 0."""
