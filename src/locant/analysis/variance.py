"""How the variance of a transformer's hidden states depends on position, predicted and measured.

A causal model without position embeddings knows position all the same: token m averages m values, and the average of
more values has less variance. Chi et al., "Latent Positional Information is in the Self-Attention Variance of
Transformer Language Models Without Positional Embeddings", ACL 2023, arXiv 2305.13571.

The setting: pre-layer-norm, width d, everything random, N(0, σ²), no biases. Position m = 1 … L.

    plain        layer norm 1;  q, k, v dσ²;  logits s² = d²σ⁴;  Σ weights² 1/m;  attention output d²σ⁴/m;
                 residual σ² + d²σ⁴/m. Tokens are taken to be independent, in every layer.
    corrected    `predict`: the same with softmax weights that are not uniform, and with the correlation of tokens.
    measured     `measure`: any Hugging Face model, random or trained.

All three are the same table of rows (layer, step, source, values), one value for each m.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLAIN, CORRECTED, MEASURED = "plain", "corrected", "measured"

INPUT, NORM, QUERY, KEY, VALUE = "input", "layer norm", "query", "key", "value"
LOGITS, WEIGHTS, ATTENTION = "logits", "weights", "attention output"
RESIDUAL, FEED_FORWARD, OUTPUT = "residual", "feed-forward output", "layer output"
STEPS = [INPUT, NORM, QUERY, KEY, VALUE, LOGITS, WEIGHTS, ATTENTION, RESIDUAL, FEED_FORWARD, OUTPUT]
"""In the order of a layer. Logits are scaled; `weights` is no variance but Σ_n w_mn²; attention output is after W_o."""


@dataclass(frozen=True)
class Row:
    """The variance after one step of one layer (from 1), at positions 1, 2, 3, …"""

    layer: int
    step: str
    source: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Variances:
    rows: tuple[Row, ...]

    def row(self, layer: int, step: str, source: str) -> Row:
        for row in self.rows:
            if (row.layer, row.step, row.source) == (layer, step, source):
                return row
        has = sorted({(row.step, row.source) for row in self.rows if row.layer == layer})
        raise KeyError(f"no {source} {step!r} of layer {layer}; of this layer there are {has}")

    def records(self) -> list[dict[str, str | int | float]]:
        """Long form, for a csv file."""
        return [
            {"layer": row.layer, "step": row.step, "source": row.source, "m": m, "variance": value}
            for row in self.rows
            for m, value in enumerate(row.values, start=1)
        ]


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
    """W_out g(W_in x) with `width` units between."""

    width: int
    sigma_in: float
    sigma_out: float
    activation: Callable[[Tensor], Tensor] = lambda x: F.gelu(x, approximate="tanh")


# ---- theory -------------------------------------------------------------------------------------------

LARGEST = 2.0
"""Variance of the logits beyond which `predict` refuses: its expansion is about uniform attention."""


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
    """The plain and the corrected theory of a random model; without `feed_forward`, of one with attention only.

    Corrected: what is carried from layer to layer is c(m, n) = E⟨x_m, x_n⟩/d, [L, L], beginning with σ²·1.

        layer norm         ρ(m, n) = c(m, n) / √((c(m, m) + ε)(c(n, n) + ε))
        logits             covariance s² ρ(m, m') ρ(n, n'),  s² = d²σ_q²σ_k²
        attention output   c_o(m, m') = d²σ_v²σ_o² Σ_{n≤m, n'≤m'} E[w_mn w_m'n'] ρ(n, n')
                           E[w_mn w_m'n'] ∝ E exp(s² ρ̂(m, m') ρ̂(n, n')), summing to 1
        feed-forward       c_f(m, m') = F σ_out² E[g(u_m) g(u_m')],  cov(u) = dσ_in² ρ
        residual           c ← c + c_o, then c ← c + c_f

    ρ̂ is what ρ is in one draw: products of n vectors of d coordinates scatter by 1/d about their mean, and there are m²
    of them, so that this matters as soon as m ~ d. The exponential is summed as a series, each term of which is a
    product of a function of (m, m') and a double running sum over (n, n'): O(L²). The ratio of means that stands for
    the mean of a ratio is corrected by what the exact Σ w² of independent logits says (`concentration`).
    """
    _check_sizes(d, heads, length, layers)
    s = Sigmas(sigma, sigma, sigma, sigma, sigma) if isinstance(sigma, (int, float)) else sigma
    for name, value in vars(s).items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"sigma must be positive and finite, got {name} = {value}")
    spread = d**2 * s.query**2 * s.key**2
    if spread > LARGEST:
        raise ValueError(
            f"the logits have variance d²σ_q²σ_k² = {spread:.3g}; the theory is one of nearly uniform attention and "
            f"holds up to {LARGEST}: take a smaller sigma"
        )
    rows = [*_plain(d, s, length, layers, causal, feed_forward)]
    c = s.embedding**2 * torch.eye(length, dtype=torch.float64)
    for layer in range(1, layers + 1):
        found = {INPUT: c.diagonal()}
        rho = _normed(c, epsilon)
        size = rho.diagonal()
        seen = _mean_over_seen(size, causal)
        found |= {NORM: size, QUERY: d * s.query**2 * size, KEY: d * s.key**2 * size, VALUE: d * s.value**2 * size}
        mixed, found[WEIGHTS] = _attention(rho, spread, d, d // heads, causal)
        added = d**2 * s.value**2 * s.output**2 * mixed
        c = c + added
        found |= {LOGITS: spread * size * seen, ATTENTION: added.diagonal(), RESIDUAL: c.diagonal()}
        if feed_forward is not None:
            more = _feed_forward(_normed(c, epsilon), d, feed_forward)
            c = c + more
            found |= {FEED_FORWARD: more.diagonal(), OUTPUT: c.diagonal()}
        rows += [Row(layer, step, CORRECTED, tuple(found[step].tolist())) for step in STEPS if step in found]
    return Variances(tuple(rows))


def _check_sizes(d: int, heads: int, length: int, layers: int) -> None:
    for name, value in {"d": d, "heads": heads, "length": length, "layers": layers}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if d % heads:
        raise ValueError(f"d = {d} is not a multiple of heads = {heads}")


def _plain(
    d: int, s: Sigmas, length: int, layers: int, causal: bool, feed_forward: FeedForward | None
) -> Iterator[Row]:
    seen = torch.arange(1, length + 1) if causal else torch.full((length,), length)
    one = torch.ones(length, dtype=torch.float64)
    stream = s.embedding**2 * one
    for layer in range(1, layers + 1):
        found = {INPUT: stream, NORM: one, QUERY: d * s.query**2 * one, KEY: d * s.key**2 * one}
        found |= {VALUE: d * s.value**2 * one, LOGITS: d**2 * s.query**2 * s.key**2 * one, WEIGHTS: one / seen}
        found[ATTENTION] = d**2 * s.value**2 * s.output**2 / seen
        stream = found[RESIDUAL] = stream + found[ATTENTION]
        if feed_forward is not None:
            found[FEED_FORWARD] = one * _feed_forward(torch.ones(1, 1, dtype=one.dtype), d, feed_forward)[0]
            stream = found[OUTPUT] = stream + found[FEED_FORWARD]
        yield from (Row(layer, step, PLAIN, tuple(found[step].tolist())) for step in STEPS if step in found)


def _normed(c: Tensor, epsilon: float) -> Tensor:
    size = (c.diagonal() + epsilon).sqrt()
    return c / (size[:, None] * size)


def _mean_over_seen(x: Tensor, causal: bool) -> Tensor:
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
    below = _sum_over_seen(next(tokens), causal)
    for k in range(6 + math.ceil(8 * spread)):
        factor = spread**k / math.factorial(k) * next(queries)
        above = _sum_over_seen(next(tokens), causal)
        if k == 0:
            even = above / count  # under uniform weights
        total += factor * below
        mixed += factor * above
        same += factor.diagonal() * m
        below = above
    mixed, same = mixed / total, same / total.diagonal()

    # What keys have in common shifts all logits of a query and does nothing: what is left of their variance.
    others = (even.diagonal() * m - _mean_over_seen(rho.diagonal(), causal)) / (m - 1).clamp(min=1)
    own = spread * rho.diagonal() * (rho.diagonal() - others).clamp(min=0)
    ratio_of_means = own.exp() / (own.exp() + m - 1) - 1 / m
    excess = concentration(own, m) - 1 / m
    share = torch.where(ratio_of_means > 1e-9 / m, excess / ratio_of_means.clamp(min=1e-300), 1.0)
    mend = (share[:, None] * share).sqrt()
    return even + (mixed - even) * mend, 1 / m + (same - 1 / m) * share


def _sum_over_seen(x: Tensor, causal: bool) -> Tensor:
    """Σ x(n, n') over the n that m sees and the n' that m' sees, for all m, m'. x is symmetric."""
    return x.cumsum(1).mT.contiguous().cumsum(1) if causal else x.sum().expand_as(x)


def _powers(mean: Tensor, variance: Tensor) -> Iterator[Tensor]:
    """E x^k of a Gaussian for k = 0, 1, 2, …: E x^k = mean · E x^{k−1} + (k − 1) · variance · E x^{k−2}."""
    older, newer = torch.zeros_like(mean), torch.ones_like(mean)
    for k in itertools.count():
        yield newer
        older, newer = newer, mean * newer + k * variance * older


def concentration(spread: Tensor, m: Tensor) -> Tensor:
    """E Σ w² of a softmax over m independent logits N(0, spread): exact, from 1 at m = 1 to exp(spread)/m for large m.

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

    g(√a z) = Σ α_k He_k(z)/√k! gives E[g(u)g(u')] = Σ α_k α'_k r^k with r the correlation; what is beyond the last
    polynomial is counted with it, so that r = 1 is exact.
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


# ---- what the tables say ------------------------------------------------------------------------------


def slope(row: Row, first: int = 1, last: int | None = None) -> float:
    """The slope of log variance against log m from position `first` to `last`, where every octave counts the same.

    −1 for the first layer of the plain theory, 0 where position does not show.
    """
    last = len(row.values) if last is None else last
    if not 1 <= first < last <= len(row.values):
        raise ValueError(f"positions {first} to {last} are not a range within 1 … {len(row.values)}")
    values = torch.tensor(row.values[first - 1 : last], dtype=torch.float64)
    if not (values > 0).all():
        raise ValueError(f"{row.source} {row.step!r} of layer {row.layer} has variances that are not positive")
    m = torch.arange(first, last + 1, dtype=torch.float64)
    x, y, weight = m.log(), values.log(), 1 / m / (1 / m).sum()
    x, y = x - (weight * x).sum(), y - (weight * y).sum()
    return float((weight * x * y).sum() / (weight * x * x).sum())


def floor_position(d: int, sigma: float | Sigmas) -> float:
    """Where the signal d²σ⁴/m of the first layer sinks to the floor σ² it is added to: m = d²σ²."""
    if isinstance(sigma, Sigmas):
        return d**2 * sigma.value**2 * sigma.output**2 / sigma.embedding**2
    return d**2 * sigma**2


def meets_floor(variances: Variances, layer: int, source: str) -> int | None:
    """The first position where the attention output has no more variance than what it is added to; None if nowhere."""
    signal = variances.row(layer, ATTENTION, source).values
    floor = variances.row(layer, INPUT, source).values
    return next((m for m, (a, b) in enumerate(zip(signal, floor, strict=True), start=1) if a <= b), None)


# ---- measurement --------------------------------------------------------------------------------------


def settings(model: PreTrainedModel) -> dict[str, Any]:
    """What `predict` takes, but for the length, read from a GPT-2: `predict(**settings(model), length=512)`.

    Sigmas are root mean squares over the layers; GPT-2's own initialisation makes both c_proj smaller than the rest.
    """
    base: Any = model.base_model
    if model.config.model_type != "gpt2":
        raise ValueError(f"settings reads GPT-2, got {model.config.model_type}: give predict the sigmas yourself")

    def rms(weights: list[Tensor]) -> float:
        return float(torch.stack([weight.detach().double().square().mean() for weight in weights]).mean().sqrt())

    d = base.config.n_embd
    joint = [block.attn.c_attn.weight.split(d, dim=1) for block in base.h]
    query, key, value = (rms([parts[i] for parts in joint]) for i in range(3))
    output = rms([block.attn.c_proj.weight for block in base.h])
    feed_forward = FeedForward(
        base.h[0].mlp.c_fc.weight.shape[1],
        rms([block.mlp.c_fc.weight for block in base.h]),
        rms([block.mlp.c_proj.weight for block in base.h]),
        base.h[0].mlp.act,
    )
    return {
        "d": d,
        "heads": base.config.n_head,
        "sigma": Sigmas(rms([base.wte.weight]), query, key, value, output),
        "layers": base.config.n_layer,
        "feed_forward": feed_forward,
        "epsilon": base.config.layer_norm_epsilon,
    }


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    *,
    tokens: Tensor | None = None,
    sequences: int = 64,
    length: int = 512,
    seed: int = 0,
    text_ids: Tensor | None = None,
) -> Variances:
    """The variance over sequences and coordinates at every position, after every step of every layer that is there.

    The model reads `tokens`, [sequences, length], if given; else `sequences` pieces of `length` tokens from random
    places of `text_ids`, one long text; else tokens drawn at random from the whole vocabulary.

    A step is a row where it can be seen: `layer norm` in models that normalise what goes into attention; `logits` and
    `weights` where position adds nothing to q·k inside attention; `residual` where a module takes input + attention
    output; `feed-forward output` where the layer ends in residual + a module's output. Models whose attention cannot be
    found have `input` and `layer output`.
    """
    ids = _sequences(model, tokens, sequences, length, seed, text_ids)
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ValueError(f"the weights of the model are not finite: {name}")
    from locant.hf.plan import evaluating

    watch = _Watch(model)
    base: Any = model.base_model
    heads = getattr(model.config, "num_attention_heads", 12)
    batch = min(64, max(1, 2**24 // (heads * ids.shape[1] ** 2)))
    with evaluating(base), watch.attached():
        base(input_ids=ids[:2, :8])
        watch.learnt = True
        for part in ids.split(batch):
            watch.layer = -1
            base(input_ids=part)
    return watch.table()


def _sequences(
    model: PreTrainedModel, tokens: Tensor | None, sequences: int, length: int, seed: int, text_ids: Tensor | None
) -> Tensor:
    from locant.hf.families import family_of
    from locant.hf.plan import plan_of

    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False) or model.main_input_name != "input_ids":
        raise ValueError(f"measure takes models with one stack of layers over tokens, got {config.model_type}")
    if tokens is not None and text_ids is not None:
        raise ValueError("give tokens or text_ids, not both")
    if tokens is not None:
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise ValueError(f"tokens must be ids, [sequences, length], got {list(tokens.shape)} of {tokens.dtype}")
        sequences, length = tokens.shape
    if sequences < 2:
        raise ValueError(f"a variance over sequences needs at least 2 of them, got {sequences}")
    if length < 2:
        raise ValueError(f"sequences must have at least 2 tokens, got {length}")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and plan_of(model) is None:
        with suppress(NotImplementedError):  # RoBERTa's positions begin at 2
            longest -= family_of(model).shift(model.base_model)
    if longest is not None and length > longest:
        raise ValueError(f"length {length} is more than the model's {longest} positions")
    embeddings: Any = model.get_input_embeddings()
    vocabulary: int = embeddings.weight.shape[0]
    generator = torch.Generator().manual_seed(seed)
    if tokens is None and text_ids is not None:
        if text_ids.ndim != 1 or text_ids.is_floating_point() or len(text_ids) < length:
            raise ValueError(
                f"text_ids must be one row of at least {length} ids, got {list(text_ids.shape)} of {text_ids.dtype}"
            )
        starts = torch.randint(0, len(text_ids) - length + 1, (sequences, 1), generator=generator)
        tokens = text_ids.cpu()[starts + torch.arange(length)]
    elif tokens is None:
        tokens = torch.randint(0, vocabulary, (sequences, length), generator=generator)
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise ValueError(f"tokens must be from 0 to {vocabulary - 1}, got {int(tokens.min())} to {int(tokens.max())}")
    return tokens.to(next(model.parameters()).device)


class _Watch:
    """Listens to a model. In a first, short run it learns which module takes or gives what; then it adds up.

    Layers are told apart by the order they run in, since ALBERT runs one module many times.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        from locant.hf.families import family_of
        from locant.hf.plan import find_attentions, plan_of

        self.model, self.base = model, model.base_model
        plan = plan_of(model)
        try:
            if plan is not None:
                found = [attention for stack in plan.stacks for attention in stack.attentions]
            else:
                found = [one for stack in find_attentions(model, family_of(model)).values() for one in stack]
            names = [attention.name for attention in found]
        except NotImplementedError:
            names = []
        self.swapped = plan is not None
        self.attentions = {self.base.get_submodule(name) for name in names}
        self.layers = {self.base.get_submodule(name) for name in map(_layer_of, names)} or _longest_list(self.base)
        self.learnt = False
        self.layer = -1
        self.rows: torch.Size | None = None  # batch and length of what the layer takes
        self.roles: list[dict[tuple[nn.Module, str], str]] = []  # of each layer: (module, "in" or "out") -> step
        self.seen: list[tuple[nn.Module, Tensor | None, Tensor | None]] = []
        self.mixed: Tensor | None = None  # Σ w v, heads side by side, as attention hands it to W_o
        self.sums: dict[tuple[int, str], tuple[Tensor | int, Tensor | int, Tensor | int]] = {}  # Σ x, Σ x², how many

    @contextmanager
    def attached(self) -> Iterator[None]:
        from transformers import AttentionInterface

        from locant.hf import interface

        with ExitStack() as stack:
            inner = {module for layer in self.layers for module in layer.modules()} - self.layers
            for layer in self.layers:
                stack.enter_context(layer.register_forward_pre_hook(self._begin, with_kwargs=True))
            for module in inner:
                stack.enter_context(module.register_forward_hook(self._ran, with_kwargs=True))
            for layer in self.layers:
                stack.enter_context(layer.register_forward_hook(self._end, with_kwargs=True))
            if self.attentions:  # a model as transformers made it runs through our attention for a while
                implementation = self.model.config._attn_implementation
                AttentionInterface.register(interface.NAME, self._attend)
                stack.callback(interface.register)
                if not self.swapped:
                    self.model.set_attn_implementation(interface.NAME)
                    stack.callback(self.model.set_attn_implementation, implementation)
            yield

    def _begin(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self.layer += 1
        self.seen, self.mixed = [], None
        x = _tensor(args, kwargs)
        self.rows = None if x is None else x.shape[:2]
        if self.learnt:
            self._add(INPUT, x)

    def _end(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.learnt:
            self._add(OUTPUT, _tensor((output,), {}))
        else:
            self.roles.append(self._learn(_tensor(args, kwargs), _tensor((output,), {})))

    def _ran(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        taken, given = _tensor(args, kwargs, self.rows), _tensor((output,), {}, self.rows)
        if not self.learnt:
            copies = [None if x is None else x.clone() for x in (taken, given)]  # a later step may work in place
            self.seen.append((module, copies[0], copies[1]))
            return
        roles = self.roles[self.layer]
        for side, x in (("in", taken), ("out", given)):
            if (module, side) in roles:
                self._add(roles[module, side], x)

    def _learn(self, x: Tensor | None, y: Tensor | None) -> dict[tuple[nn.Module, str], str]:
        """Which module takes and gives what, by comparing numbers."""
        roles: dict[tuple[nn.Module, str], str] = {}
        if x is None or y is None or self.mixed is None:
            return roles
        attention = next(((m, taken) for m, taken, _ in self.seen if m in self.attentions), None)
        if attention is not None and attention[1] is not None and not _same(attention[1], x):
            roles[attention[0], "in"] = NORM
        projection = next(((m, given) for m, taken, given in self.seen if _same(taken, self.mixed)), None)
        if projection is None or projection[1] is None or projection[1].shape != x.shape:
            return roles
        roles[projection[0], "out"] = ATTENTION
        residual = x + projection[1]
        after = next((m for m, taken, _ in self.seen if _same(taken, residual)), None)
        if after is not None:
            roles[after, "in"] = RESIDUAL
            last = next((m for m, _, given in self.seen if given is not None and _adds_up(residual, given, y)), None)
            if last is not None:
                roles[last, "out"] = FEED_FORWARD
        return roles

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        from locant.hf import interface
        from locant.schemes import Nope

        out, weights = interface.attention(module, query, key, value, attention_mask, **kwargs)
        if module not in self.attentions or self.layer < 0:
            return out, weights
        if not self.learnt:
            self.mixed = out.flatten(2).clone()
            return out, weights
        for step, x in ((QUERY, query), (KEY, key), (VALUE, value)):
            self._add(step, x.transpose(1, 2).flatten(2))
        scheme = interface.scheme_of(module)
        bent = any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "s_aux"))
        if (scheme is None or isinstance(scheme, Nope)) and not bent:
            causal = kwargs.get("is_causal")
            causal = getattr(module, "is_causal", False) if causal is None else causal
            self._add_logits(query, key, kwargs.get("scaling"), attention_mask, bool(causal))
        return out, weights

    def _add_logits(self, query: Tensor, key: Tensor, scale: float | None, mask: Tensor | None, causal: bool) -> None:
        length = query.shape[2]
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        logits = query.float() * (query.shape[3] ** -0.5 if scale is None else scale) @ key.float().mT
        if mask is None:
            hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1) & causal
        else:
            hidden = ~mask if mask.dtype == torch.bool else mask < 0
        logits.masked_fill_(hidden, 0)
        count = logits.shape[:2].numel() * length - hidden.expand(logits.shape).sum((0, 1, 3))
        self._keep(LOGITS, logits.sum(-1).double().sum((0, 1)), _squares(logits).sum((0, 1)), count)
        together = _squares(logits.masked_fill_(hidden, -math.inf).softmax(-1)).sum((0, 1))
        self._keep(WEIGHTS, 0 * together, together, logits.shape[:2].numel())  # Σ w², and not its variance

    def _add(self, step: str, x: Tensor | None) -> None:
        """x is [batch, length, width]."""
        if x is not None:
            x = x.float()
            self._keep(step, x.sum(-1).double().sum(0), _squares(x).sum(0), x.shape[0] * x.shape[2])

    def _keep(self, step: str, first: Tensor, second: Tensor, count: Tensor | int) -> None:
        a, b, c = self.sums.get((self.layer, step), (0, 0, 0))
        self.sums[self.layer, step] = (a + first, b + second, c + count)

    def table(self) -> Variances:
        rows = []
        for layer in range(len(self.roles)):
            for step in STEPS:
                if (layer, step) in self.sums:
                    first, second, count = self.sums[layer, step]
                    values = torch.as_tensor(second / count - (first / count) ** 2)
                    rows.append(Row(layer + 1, step, MEASURED, tuple(values.tolist())))
        return Variances(tuple(rows))


def _tensor(args: tuple[Any, ...], kwargs: dict[str, Any], rows: torch.Size | None = None) -> Tensor | None:
    """The hidden states among what a module takes or gives, [batch, length, width]; OPT lays the rows end to end."""
    found: Any = args[0] if args else kwargs.get("hidden_states")
    if isinstance(found, tuple):
        found = found[0]
    if not isinstance(found, Tensor):
        return None
    if rows is not None and found.ndim == 2 and found.shape[0] == rows.numel():
        found = found.unflatten(0, rows)
    return found if found.ndim == 3 else None


def _squares(x: Tensor) -> Tensor:
    """Σ x² over the last dimension, without a tensor of squares."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return length.double().square()


def _same(a: Tensor | None, b: Tensor) -> bool:
    """Up to rounding. Not looser: what attention adds to a trained model's hidden states may be small beside them."""
    if a is None or a.shape != b.shape:
        return False
    return bool((a - b).norm() <= 1e-6 * b.norm() if b.dtype in (torch.float32, torch.float64) else torch.equal(a, b))


def _adds_up(a: Tensor, b: Tensor, total: Tensor) -> bool:
    return a.shape == b.shape and _same(a + b, total)


def _layer_of(name: str) -> str:
    """encoder.layer.0.attention.self -> encoder.layer.0"""
    parts = name.split(".")
    last = max(i for i, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[: last + 1])


def _longest_list(base: nn.Module) -> set[nn.Module]:
    lists = [set(module) for module in base.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=set())
