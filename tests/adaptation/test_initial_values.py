"""The curve from which a fit starts."""

import math

import pytest
import torch

import locant
from locant.adaptation import initial_values
from locant.adaptation.cross_entropy import cross_entropy
from locant.attention.request import prepare


def planted(bias: torch.Tensor, *, causal: bool = False):
    """Requests without the bias [H, 2L − 1], and attention weights with it."""
    h, n = bias.shape[0], (bias.shape[1] + 1) // 2
    q, k = torch.randn(6, h, n, 8), torch.randn(6, h, n, 8)
    r = torch.arange(n) - torch.arange(n)[:, None] + n - 1
    logit = q @ k.mT / math.sqrt(8) + bias[:, r]
    if causal:
        logit = logit.masked_fill(r > n - 1, -torch.inf)
    return [prepare(q, k, k, None, causal=causal)], [logit.softmax(-1)]


@pytest.mark.parametrize("causal", [False, True])
def test_least_squares_finds_the_curve_up_to_a_constant(causal):
    bias = torch.randn(3, 39) * 0.5
    offsets, found, counts = initial_values.measured_curve(*planted(bias, causal=causal))
    wanted = bias[:, offsets + 19].double()
    near = counts > 12  # attention weights determine rare offsets poorly
    apart = (found - wanted)[:, near]
    assert float((apart - apart.mean(-1, keepdim=True)).abs().max()) < 0.05
    assert bool((offsets <= 0).all()) == causal


@pytest.mark.parametrize(
    ("spec", "alone"),
    [("alibi", True), ("tisa", True), ("alibi+logn", False), ("alibi+fox", False), ("alibi+grape", False),
     ("t5+rope", False)],
)  # fmt: skip
def test_a_curve_is_read_from_a_bias_alone(spec, alone):
    assert initial_values.is_bias(locant.scheme(spec, n_heads=2, head_dim=8, d_model=16)) is alone


@pytest.mark.parametrize("spec", ["fox", "inkling"])
def test_a_scheme_that_reads_hidden_states_is_not_fitted(spec):
    requests, goal = planted(torch.zeros(2, 9), causal=True)
    with pytest.raises(
        NotImplementedError, match=f"cannot fit {spec}.*it reads hidden states.*swap the model and train"
    ):
        cross_entropy(locant.scheme(spec, n_heads=2, head_dim=8, d_model=16), requests, goal)
