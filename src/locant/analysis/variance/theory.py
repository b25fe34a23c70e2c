"""The variance of a random transformer at every position: the plain theory and the corrected one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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
from locant.analysis.variance.table import CORRECTED, PLAIN, VarianceRow, Variances


@dataclass(frozen=True)
class Sigmas:
    """Standard deviations of the token embeddings and of the four matrices of attention."""

    embedding: float
    query: float
    key: float
    value: float
    output: float


@dataclass(frozen=True)
class FeedForward:
    """W_out g(W_in x) with `width` hidden units."""

    width: int
    sigma_in: float
    sigma_out: float
    activation: Callable[[Tensor], Tensor] = lambda x: F.gelu(x, approximate="tanh")


LARGEST = 2.0
"""The largest variance of the logits that `predict` accepts: it expands around uniform attention."""


def predict(
    d: int,
    heads: int,
    sigma: float | Sigmas,
    length: int,
    layers: int,
    *,
    causal: bool = True,
    feed_forward: FeedForward | None = None,
    epsilon: float = 1e-5,
) -> Variances:
    """Returns the plain and the corrected theory of a random model; without `feed_forward`, of attention alone.

    The corrected theory propagates c(m, n) = E⟨x_m, x_n⟩/d, [L, L], from layer to layer, starting with σ²·1.

        layer norm         ρ(m, n) = c(m, n) / √((c(m, m) + ε)(c(n, n) + ε))
        logits             covariance s² ρ(m, m') ρ(n, n'),  s² = d²σ_q²σ_k²
        attention output   c_o(m, m') = d²σ_v²σ_o² Σ_{n≤m, n'≤m'} E[w_mn w_m'n'] ρ(n, n')
                           E[w_mn w_m'n'] ∝ E exp(s² ρ̂(m, m') ρ̂(n, n')), summing to 1
        feed-forward       c_f(m, m') = F σ_out² E[g(u_m) g(u_m')],  cov(u) = dσ_in² ρ
        residual           c ← c + c_o, then c ← c + c_f

    ρ̂ is the value of ρ in one draw. Products of vectors of d coordinates have a variance of about 1/d, and there are
    m² of them, so this matters as soon as m ~ d. The exponential is summed as a series. Each of its terms is a function
    of (m, m') times a double running sum over (n, n'): O(L²). A ratio of means stands for the mean of a ratio; the
    exact Σ w² of independent logits (`concentration`) gives the correction.
    """
    _check_sizes(d, heads, length, layers)
    s = Sigmas(sigma, sigma, sigma, sigma, sigma) if isinstance(sigma, (int, float)) else sigma
    for name, value in vars(s).items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"sigma must be positive and finite; got {name} = {value}")
    spread = d**2 * s.query**2 * s.key**2
    if spread > LARGEST:
        raise ValueError(
            f"the logits have variance d²σ_q²σ_k² = {spread:.3g}; the theory assumes nearly uniform attention and "
            f"holds up to {LARGEST}: use a smaller sigma"
        )
    rows = [*_plain(d, s, length, layers, causal, feed_forward)]
    c = s.embedding**2 * torch.eye(length, dtype=torch.float64)
    for layer in range(1, layers + 1):
        found = {INPUT: c.diagonal()}
        rho = _normed(c, epsilon)
        size = rho.diagonal()
        visible = _mean_over_visible(size, causal)
        found |= {NORM: size, QUERY: d * s.query**2 * size, KEY: d * s.key**2 * size, VALUE: d * s.value**2 * size}
        mixed, found[WEIGHTS] = _attention(rho, spread, d, d // heads, causal)
        added = d**2 * s.value**2 * s.output**2 * mixed
        c = c + added
        found |= {LOGITS: spread * size * visible, ATTENTION: added.diagonal(), RESIDUAL: c.diagonal()}
        if feed_forward is not None:
            more = _feed_forward(_normed(c, epsilon), d, feed_forward)
            c = c + more
            found |= {FEED_FORWARD: more.diagonal(), OUTPUT: c.diagonal()}
        rows += [VarianceRow(layer, step, CORRECTED, tuple(found[step].tolist())) for step in STEPS if step in found]
    return Variances(tuple(rows))


def _check_sizes(d: int, heads: int, length: int, layers: int) -> None:
    for name, value in {"d": d, "heads": heads, "length": length, "layers": layers}.items():
        if value < 1:
            raise ValueError(f"{name} must be 1 or more; got {value}")
    if d % heads:
        raise ValueError(f"d must be a multiple of heads; got d = {d} and heads = {heads}")


def _plain(
    d: int, s: Sigmas, length: int, layers: int, causal: bool, feed_forward: FeedForward | None
) -> Iterator[VarianceRow]:
    visible = torch.arange(1, length + 1) if causal else torch.full((length,), length)
    one = torch.ones(length, dtype=torch.float64)
    stream = s.embedding**2 * one
    for layer in range(1, layers + 1):
        found = {INPUT: stream, NORM: one, QUERY: d * s.query**2 * one, KEY: d * s.key**2 * one}
        found |= {VALUE: d * s.value**2 * one, LOGITS: d**2 * s.query**2 * s.key**2 * one, WEIGHTS: one / visible}
        found[ATTENTION] = d**2 * s.value**2 * s.output**2 / visible
        stream = found[RESIDUAL] = stream + found[ATTENTION]
        if feed_forward is not None:
            found[FEED_FORWARD] = one * _feed_forward(torch.ones(1, 1, dtype=one.dtype), d, feed_forward)[0]
            stream = found[OUTPUT] = stream + found[FEED_FORWARD]
        yield from (VarianceRow(layer, step, PLAIN, tuple(found[step].tolist())) for step in STEPS if step in found)


def _normed(c: Tensor, epsilon: float) -> Tensor:
    size = (c.diagonal() + epsilon).sqrt()
    return c / (size[:, None] * size)


def _mean_over_visible(x: Tensor, causal: bool) -> Tensor:
    count = torch.arange(1, len(x) + 1, dtype=x.dtype)
    return x.cumsum(0) / count if causal else x.mean().expand(len(x))


def _attention(rho: Tensor, spread: float, d: int, head_dim: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Σ E[w_mn w_m'n'] ρ(n, n') for all m, m', and Σ_n E[w_mn²] for all m."""
    length = len(rho)
    m = torch.arange(1, length + 1, dtype=rho.dtype) if causal else torch.full((length,), length, dtype=rho.dtype)
    count = m[:, None] * m
    tokens = _powers(rho, ((1 - rho**2) ** 2 / d).fill_diagonal_(0))  # layer norm fixes the length
    queries = _powers(rho, (1 + rho**2) / head_dim)
    total, mixed, same = torch.zeros_like(rho), torch.zeros_like(rho), torch.zeros_like(m)
    below = _sum_over_visible(next(tokens), causal)
    for k in range(6 + math.ceil(8 * spread)):
        factor = spread**k / math.factorial(k) * next(queries)
        above = _sum_over_visible(next(tokens), causal)
        if k == 0:
            even = above / count  # under uniform weights
        total += factor * below
        mixed += factor * above
        same += factor.diagonal() * m
        below = above
    mixed, same = mixed / total, same / total.diagonal()

    # A component common to all keys shifts all logits of a query, without effect. `own` is the variance without it.
    others = (even.diagonal() * m - _mean_over_visible(rho.diagonal(), causal)) / (m - 1).clamp(min=1)
    own = spread * rho.diagonal() * (rho.diagonal() - others).clamp(min=0)
    ratio_of_means = own.exp() / (own.exp() + m - 1) - 1 / m
    excess = concentration(own, m) - 1 / m
    share = torch.where(ratio_of_means > 1e-9 / m, excess / ratio_of_means.clamp(min=1e-300), 1.0)
    mend = (share[:, None] * share).sqrt()
    return even + (mixed - even) * mend, 1 / m + (same - 1 / m) * share


def _sum_over_visible(x: Tensor, causal: bool) -> Tensor:
    """Σ x(n, n') over the n visible to m and the n' visible to m', for all m, m'. x is symmetric."""
    return x.cumsum(1).mT.contiguous().cumsum(1) if causal else x.sum().expand_as(x)


def _powers(mean: Tensor, variance: Tensor) -> Iterator[Tensor]:
    """E x^k of a Gaussian for k = 0, 1, 2, …: E x^k = mean · E x^{k−1} + (k − 1) · variance · E x^{k−2}."""
    older, newer = torch.zeros_like(mean), torch.ones_like(mean)
    for k in itertools.count():
        yield newer
        older, newer = newer, mean * newer + k * variance * older


def concentration(spread: Tensor, m: Tensor) -> Tensor:
    """Returns E Σ w² of a softmax over m independent logits N(0, spread), exactly.

    It is 1 at m = 1 and exp(spread)/m for large m.

    E Σ w² = m E[e^{2x_1} / Z²] = m ∫ t E[e^{2x} exp(−t e^x)] E[exp(−t e^x)]^{m−1} dt, since 1/Z² = ∫ t exp(−tZ) dt.
    """
    nodes, weights = _gauss_hermite(32)
    low, high = -math.log(float(m.max())) - 14, 8 + 6 * math.sqrt(float(spread.max()))
    log_t = torch.linspace(low, high, 3 * math.ceil(high - low), dtype=torch.float64)
    t = log_t.exp()
    found = []
    for one, count in zip(spread.split(256), m.split(256), strict=True):  # [256, t, nodes] at a time
        e = (one.sqrt()[:, None] * nodes).exp()[:, None]
        damped = (-t[:, None] * e).exp() * weights
        first, rest = (damped * e * e).sum(-1), damped.sum(-1)
        found.append((count[:, None] * t**2 * first * rest ** (count[:, None] - 1)).sum(-1) * (log_t[1] - log_t[0]))
    return torch.cat(found)


def _feed_forward(rho: Tensor, d: int, layer: FeedForward) -> Tensor:
    """F σ_out² E[g(u_m) g(u_n)] for Gaussian u of covariance dσ_in² ρ, by Hermite polynomials (Mehler's formula).

    g(√a z) = Σ α_k He_k(z)/√k! gives E[g(u)g(u')] = Σ α_k α'_k r^k with r the correlation. The rest of the series is
    added to its last term, so r = 1 is exact.
    """
    nodes, weights = _gauss_hermite(96)
    size = rho.diagonal()
    r = rho / (size[:, None] * size).sqrt()
    g = layer.activation((d * layer.sigma_in**2 * size).sqrt()[:, None] * nodes)
    total = (g.square() * weights).sum(-1)
    older, newer = torch.zeros_like(nodes), torch.ones_like(nodes)
    kernel, power = torch.zeros_like(r), torch.ones_like(r)
    for k in range(24):
        alpha = (g * newer * weights).sum(-1)
        kernel += alpha[:, None] * alpha * power
        total = total - alpha**2
        power = power * r
        older, newer = newer, (nodes * newer - math.sqrt(k) * older) / math.sqrt(k + 1)
    rest = total.clamp(min=0).sqrt()
    kernel += rest[:, None] * rest * power
    return layer.width * layer.sigma_out**2 * kernel


def _gauss_hermite(n: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of E f(z), z ~ N(0, 1): eigenvectors of the Jacobi matrix (Golub & Welsch 1969)."""
    beside = torch.arange(1, n, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return nodes, vectors[0] ** 2


def floor_position(d: int, sigma: float | Sigmas) -> float:
    """Returns the m at which the signal of the first layer, d²σ⁴/m, falls to the floor σ² that it is added to: d²σ²."""
    if isinstance(sigma, Sigmas):
        return d**2 * sigma.value**2 * sigma.output**2 / sigma.embedding**2
    return d**2 * sigma**2
