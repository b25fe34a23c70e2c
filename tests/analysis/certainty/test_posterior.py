"""The posterior where it is known in closed form: a linear model with normal noise."""

import math

import pytest
import torch

from locant.analysis.certainty.posterior import posterior

N, P, SIGMA = 60, 5, 0.7


def linear(seed: int = 0, width: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs [N, P], outputs [N], the scales of the parameters, and the parameters they were drawn with."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(N, P, generator=draw, dtype=torch.float64)
    scale = torch.tensor([1.0, 0.1, 3.0, 1.0, 0.5], dtype=torch.float64)
    theta = width * scale * torch.randn(P, generator=draw, dtype=torch.float64)
    return x, x @ theta + SIGMA * torch.randn(N, generator=draw, dtype=torch.float64), scale, theta


def maximum(x, y, scale, alpha: float) -> torch.Tensor:
    """The maximum of the posterior with the prior N(0, s² / α), by Bayes' rule."""
    precision = x.mT @ x / SIGMA**2 + alpha * torch.diag(1 / scale**2)
    return torch.linalg.solve(precision, x.mT @ y / SIGMA**2)


def found_for(x, y, scale, damping: float | None = None):
    """The posterior of a model that was trained to the maximum of its posterior; the damping is repeated until then."""
    curvature, alpha = x.mT @ x / SIGMA**2, damping or 1.0
    for _ in range(1 if damping else 60):
        found = posterior([(torch.arange(P), curvature)], maximum(x, y, scale, alpha), scale, damping)
        if abs(found.damping - alpha) <= 1e-10 * alpha:
            break
        alpha = found.damping
    return found


def marginal(x, y, scale, alpha: float) -> float:
    """log N(y; 0, σ² I + X diag(s²) Xᵀ / α): the evidence, written from its definition."""
    covariance = SIGMA**2 * torch.eye(N, dtype=torch.float64) + (x * scale**2) @ x.mT / alpha
    root = torch.linalg.cholesky(covariance)
    inside = torch.linalg.solve_triangular(root, y[:, None], upper=False).square().sum()
    return float(-inside / 2 - root.diagonal().log().sum() - N / 2 * math.log(2 * math.pi))


def test_the_posterior_of_a_linear_model_is_that_of_bayes_rule():
    x, y, scale, _ = linear()
    found = found_for(x, y, scale, damping=2.5)
    precision = x.mT @ x / SIGMA**2 + 2.5 * torch.diag(1 / scale**2)
    torch.testing.assert_close(found.covariance, precision.inverse(), rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(found.mean, torch.linalg.solve(precision, x.mT @ y / SIGMA**2), rtol=1e-6, atol=1e-12)
    assert found.determined == pytest.approx(P - 2.5 * float((found.covariance.diagonal() / scale**2).sum()), rel=1e-6)


def test_the_damping_maximizes_the_evidence():
    for seed in range(2):
        x, y, scale, _ = linear(seed)
        found = found_for(x, y, scale)
        best = marginal(x, y, scale, found.damping)
        grid = torch.linspace(math.log(1e-3), math.log(1e3), 301).exp().tolist()
        values = [marginal(x, y, scale, alpha) for alpha in grid]
        at = max(range(len(grid)), key=values.__getitem__)
        assert grid[at - 1] <= found.damping <= grid[at + 1]
        assert best >= max(values) - 1e-9
        # MacKay's fixed point: α = γ / Σ (m / s)²
        assert found.damping == pytest.approx(found.determined / float((found.mean / scale).square().sum()), rel=1e-5)


def test_the_damping_is_at_the_maximum_of_the_evidence_for_given_parameters():
    x, y, scale, _ = linear(3)
    learned, curvature = maximum(x, y, scale, 0.0), x.mT @ x / SIGMA**2
    found = posterior([(torch.arange(P), curvature)], learned, scale)
    size = float((learned / scale).square().sum())

    def by_definition(alpha: float) -> float:
        precision = curvature + alpha * torch.diag(1 / scale**2)
        return float(P * math.log(alpha) - torch.logdet(precision * scale * scale[:, None]) - alpha * size) / 2

    grid = torch.linspace(math.log(1e-3), math.log(1e3), 2001, dtype=torch.float64).exp().tolist()
    values = [by_definition(alpha) for alpha in grid]
    at = max(range(len(grid)), key=values.__getitem__)
    assert grid[at - 1] <= found.damping <= grid[at + 1]
    assert found.evidence == pytest.approx(by_definition(found.damping), rel=1e-9)


def test_a_direction_that_nothing_depends_on_has_the_prior():
    curvature = torch.zeros(3, 3, dtype=torch.float64)
    curvature[0, 0], curvature[1, 1] = 100.0, 4.0
    scale = torch.tensor([1.0, 1.0, 5.0])
    found = posterior([(torch.arange(3), curvature)], torch.tensor([2.0, -1.0, 7.0]), scale, damping=0.5)
    assert found.covariance[2, 2] == pytest.approx(25 / 0.5)
    assert found.mean.tolist() == [2.0, -1.0, 7.0]
    assert found.determined == pytest.approx(100 / 100.5 + 4 / 4.5)


def test_without_any_information_the_prior_has_the_scale_of_the_parameters():
    found = posterior([(torch.arange(2), torch.zeros(2, 2))], torch.ones(2), torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(found.covariance.diagonal(), torch.tensor([1.0, 9.0], dtype=torch.float64))


def test_blocks_share_their_damping_and_equal_one_large_block():
    x, _, scale, _ = linear(1)
    curvature = x.mT @ x
    curvature[:2, 2:] = curvature[2:, :2] = 0
    learned = torch.linspace(-1, 1, P)
    whole = posterior([(torch.arange(P), curvature)], learned, scale)
    parts = [torch.tensor([2, 3, 4]), torch.tensor([0, 1])]
    found = posterior([(index, curvature[index[:, None], index]) for index in parts], learned, scale)
    assert found.damping == pytest.approx(whole.damping, rel=1e-6)
    torch.testing.assert_close(found.covariance, whole.covariance)
    torch.testing.assert_close(found.mean, whole.mean)
    rows = torch.randn(7, P, dtype=torch.float64)
    torch.testing.assert_close(found.variances(rows), (rows @ whole.covariance @ rows.mT).diagonal())


def test_random_parameters_have_the_moments_of_the_posterior():
    x, y, scale, _ = linear()
    found = found_for(x, y, scale)
    drawn = found.draw(20_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.mean(0), found.mean, rtol=0, atol=0.02)
    torch.testing.assert_close(drawn.T.cov(), found.covariance, rtol=0.1, atol=2e-4)


def test_coverage_of_a_linear_model():
    inside = []
    for seed in range(300):
        x, y, scale, theta = linear(seed)
        found = posterior([(torch.arange(P), x.mT @ x / SIGMA**2)], maximum(x, y, scale, 0.0), scale)
        sd = found.covariance.diagonal().sqrt()
        inside.append(((theta - found.mean).abs() <= 1.96 * sd).double())
    assert 0.92 <= float(torch.stack(inside).mean()) <= 0.98


def test_a_curvature_that_is_negative_or_not_finite_is_refused():
    with pytest.raises(ValueError, match="positive semi-definite, got eigenvalues from -1 to 2"):
        posterior([(torch.arange(2), torch.diag(torch.tensor([2.0, -1.0])))], torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match="not finite; check the weights"):
        posterior([(torch.arange(1), torch.tensor([[math.nan]]))], torch.ones(1), torch.ones(1))
