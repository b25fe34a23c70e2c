"""Drawn scores have the Fisher information as their second moment, the noise scale is found, intervals cover."""

import pytest
import torch
from torch import Tensor

import locant
from locant.analysis.certainty import attention, bands
from locant.analysis.certainty.flat import Flat
from locant.analysis.certainty.scores import Scores, calibrated
from locant.attention.request import Request, prepare
from tests import hf_models

L, H, D = 12, 2, 4


def content(count: int, draw: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Queries and keys of some sequences."""
    return [tuple(torch.randn(1, H, L, D, generator=draw, dtype=torch.float64) for _ in range(2)) for _ in range(count)]


def requests(scheme, pairs, *, causal: bool = False) -> list[Request]:
    return [prepare(q, k, k, scheme, causal=causal) for q, k in pairs]


def sampled(weights: Tensor, draws: int, draw: torch.Generator) -> Tensor:
    """The mean of `draws` keys of each query, as one-hot rows."""
    keys = torch.multinomial(weights.flatten(0, 2), draws, replacement=True, generator=draw)
    return torch.nn.functional.one_hot(keys, L).double().mean(1).view_as(weights)


def exact(flat: Flat, request: Request) -> Tensor:
    """Σ_i J_iᵀ (diag(w_i) − w_i w_iᵀ) J_i, query by query."""
    logit, log = attention.log_weights(request)
    weight, total = log.detach().exp(), torch.zeros(len(flat), len(flat), dtype=torch.float64)
    for head in range(H):
        for i in range(L):
            w = weight[0, head, i]
            rows = []
            for j in range(L):
                towards = torch.zeros_like(logit)
                towards[0, head, i, j] = 1
                rows.append(flat.score(logit, towards))
            jacobian = torch.stack(rows)
            total += jacobian.mT @ (w.diag() - w[:, None] * w) @ jacobian
    return total


@pytest.mark.parametrize("causal", [False, True])
def test_the_second_moment_of_drawn_scores_is_the_gauss_newton_matrix(causal):
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    flat = Flat(locant.scheme("tisa:kernels=1", n_heads=H, head_dim=D))
    (request,) = requests(flat.scheme, content(1, draw), causal=causal)
    drawn, _ = attention.scores(flat, request, 1000, draw)
    wanted = exact(flat, request)
    found = drawn.mT @ drawn / len(drawn)
    size = wanted.diagonal().clamp(min=1e-12).sqrt()
    torch.testing.assert_close(found / size / size[:, None], wanted / size / size[:, None], rtol=0, atol=0.2)


def test_the_noise_scale_of_means_of_m_draws_is_1_over_m():
    draw = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    flat = Flat(locant.scheme("toeplitz:clip=2", n_heads=H, head_dim=D))
    for m in (1, 9):
        scores = Scores()
        for request in requests(flat.scheme, content(150, draw)):
            goal = sampled(attention.weights(request).detach(), m, draw)
            drawn, observed = attention.scores(flat, request, 3, draw, goal)
            scores.drawn.append(drawn)
            scores.observed.append(observed)
        blocks, learned = (
            flat.blocks(torch.arange(1 - L, L)),
            torch.linspace(-1, 1, 10),
        )  # far from what the prior explains
        assert [len(block) for block in blocks] == [5, 5]
        found = calibrated(scores, blocks, learned, flat.scale, factor=1.0, temper=True)
        assert sum(found.noise) / H == pytest.approx(1 / m, rel=0.2)
        plain = calibrated(scores, blocks, learned, flat.scale, factor=1.0, temper=False)
        assert sum(plain.noise) / H == pytest.approx(1 / m, rel=0.2)  # reported, and not applied
        # a constant bias is undetermined; the other four directions have the covariance T H⁻¹
        ratio = found.posterior.variances(_contrast(5)) / plain.posterior.variances(_contrast(5))
        assert float(ratio.mean()) == pytest.approx(1 / m, rel=0.25)


def _contrast(size: int) -> Tensor:
    rows = torch.zeros(2, H * size, dtype=torch.float64)
    rows[0, 0], rows[0, 1], rows[1, size], rows[1, size + 2] = 1, -1, 1, -1
    return rows


def test_the_mean_of_the_inverse_is_corrected():
    """With few draws per parameter, the inverse of a second moment is too large; the factor removes that."""
    draw = torch.Generator().manual_seed(0)
    size, inverse = 10, torch.zeros(10, 10, dtype=torch.float64)
    for _ in range(400):
        scores = Scores([torch.randn(1, size, generator=draw, dtype=torch.float64) for _ in range(25)])
        inverse += scores.curvature(torch.arange(size)).inverse() / 400
    assert float(inverse.diagonal().mean()) == pytest.approx(1 / 25, rel=0.1)
    with pytest.raises(ValueError, match="11 draws do not determine the curvature of 10 parameters"):
        Scores([torch.ones(1, 10)] * 11).curvature(torch.arange(10))


def fitted(flat: Flat, pairs, goals: list[Tensor]) -> None:
    """Sets the parameters to the maximum of the likelihood of the goals."""
    q, k = (torch.cat(each) for each in zip(*pairs, strict=True))
    goal = torch.cat(goals)
    optimizer = torch.optim.LBFGS(flat.parameters, max_iter=40, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = -(goal * attention.log_weights(prepare(q, k, k, flat.scheme))[1]).sum() / len(goal)
        loss.backward()
        return loss

    optimizer.step(closure)


def coverage(spec: str, truth, fits: int, sequences: int) -> float:
    """The share of intervals that contain the true curve, over simulated fits and offsets."""
    offsets, inside = bands.Offsets(L - 1, L - torch.arange(1 - L, L).abs()), []
    for seed in range(fits):
        draw = torch.Generator().manual_seed(seed)
        true = Flat(locant.scheme(spec, n_heads=H, head_dim=D))
        truth(true.scheme)
        true = Flat(true.scheme)
        pairs = content(sequences, draw)
        with torch.no_grad():
            goals = [sampled(attention.weights(request), 1, draw) for request in requests(true.scheme, pairs)]
        flat = Flat(true.scheme)  # the search starts at the truth, and ends at the nearest maximum
        fitted(flat, pairs, goals)
        flat = Flat(flat.scheme)
        scores = Scores()
        for request in requests(flat.scheme, pairs):
            scores.drawn.append(attention.scores(flat, request, 10, draw)[0])
        post = calibrated(
            scores, flat.blocks(torch.arange(1 - L, L)), flat.learned, flat.scale, factor=1.0, temper=False
        ).posterior
        information = torch.zeros(len(flat), len(flat), dtype=torch.float64)
        found = bands.bands_of(flat, post, offsets, place="", level=0.95, samples=0, information=information)
        curve = bands._Outputs(true, offsets)
        wanted = curve.split(curve(true.scheme).detach())["bias"]
        for band in found.bands:
            values = wanted[band.head - 1].tolist()
            inside.append([low <= y <= high for low, y, high in zip(band.low, values, band.high, strict=True)])
    return float(torch.tensor(inside).double().mean())


@pytest.mark.slow
def test_coverage_of_a_simulated_attention_with_a_table():
    def truth(scheme):
        scheme.table.data = torch.tensor([[0.0, 0.5, 1.0, 0.2, -0.5], [0.3, 0.0, -0.6, 0.4, 0.8]])

    assert 0.92 <= coverage("toeplitz:clip=2", truth, 200, 16) <= 0.98


@pytest.mark.slow
def test_coverage_of_a_simulated_attention_with_tisa():
    def truth(scheme):
        scheme.amplitude.data = torch.tensor([[1.5], [-1.2]])
        scheme.sharpness.data = torch.tensor([[0.2], [0.1]])
        scheme.offset.data = torch.tensor([[-2.0], [1.5]])

    assert 0.92 <= coverage("tisa:kernels=1", truth, 200, 24) <= 0.98


def test_tokens_have_the_fisher_information_of_their_predictions():
    from transformers import AutoModelForCausalLM

    from locant.analysis.certainty import tokens
    from locant.analysis.certainty.gradients import gradients_of

    model = hf_models.make("gpt2", AutoModelForCausalLM, n_layer=1, vocab_size=12)
    locant.swap(model, "tisa:kernels=1")
    scheme = model.transformer.h[0].attn.locant
    ids, draw = torch.tensor([[3, 5, 7, 4, 9, 11]]), torch.Generator().manual_seed(0)
    with gradients_of(model, [scheme]):
        assert not model.transformer.wte.weight.requires_grad
        log, known = tokens.predictions(model, ids, mask_token=None, special=set(), generator=draw)
        assert known.tolist() == [5, 7, 4, 9, 11]
        ((drawn, observed),) = tokens.scores([scheme], log, known, 500, draw)
        flat = list(scheme.parameters())
        wanted = torch.zeros(12, 12, dtype=torch.float64)
        for t in range(5):
            rows = [torch.cat([g.flatten() for g in torch.autograd.grad(log[t, v], flat, retain_graph=True)])
                    for v in range(12)]  # fmt: skip
            jacobian, p = torch.stack(rows).double(), log[t].detach().double().exp()
            wanted += jacobian.mT @ (p[:, None] * jacobian)
    assert model.transformer.wte.weight.requires_grad
    assert observed.shape == (12,)
    size = wanted.diagonal().clamp(min=1e-12).sqrt()
    found = drawn.mT @ drawn / len(drawn)
    torch.testing.assert_close(found / size / size[:, None], wanted / size / size[:, None], rtol=0, atol=0.2)
