"""`fit`: sets the parameters of a new scheme so that it reproduces the original attention weights. No training.

With the model's own positions, a layer gives each query i the attention weights p_i. `fit` removes the positions, but
keeps the first row and the mean of the other rows of a table of absolute positions (the scheme `first`). It then goes
through the layers in order, each on the outputs of the fitted layers below, and sets the parameters θ of the layer's
scheme to

    argmin_θ Σ_i KL( p_i ‖ softmax(ℓ_i(θ)) )

over the queries of a few hundred sequences. ℓ_i(θ) are the logits of the changed model with the scheme. The problem is
convex in a bias. If a scheme supports it, the fit starts from a curve (initial_values.py). With `queries`, θ includes
an affine map of the queries of each head (queries.py), in layers whose scheme changes.

If layers share a scheme ("t5:shared=layers"), there is one θ, and the sum runs over all of these layers. Their inputs
depend on θ, so the model is run with the last θ, θ is fitted to all layers at once, and both are repeated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.adaptation import checks, sample
from locant.adaptation.cross_entropy import attention_weights, cross_entropy, entropy
from locant.adaptation.fit_time import FitClock, affordable, fewer
from locant.adaptation.initial_values import set_initial_values
from locant.adaptation.layer_cache import LayerCache, layer_cache
from locant.adaptation.part import Part, part_of
from locant.adaptation.preconditioning import Scales, minimize, parameter_scales
from locant.adaptation.queries import SCALE, QueryMap, find_query_layer
from locant.adaptation.sample import Text
from locant.adaptation.silencing import mean_row, start_from_table, with_first
from locant.attention.request import Request
from locant.hf.plan import Plan, plan_of
from locant.hf.readout import Native, native
from locant.hf.swapping import exchange
from locant.runs.float32_products import fast_products
from locant.schemes import Nope, Scheme

LENGTH = 128
"""Tokens of the longest sequences."""
TOKENS = 3072
"""Tokens of all sequences of one length."""
BATCH_TOKENS = 2048
"""Tokens per batch, at most, unless one sequence has more."""
MEMORY = 2**30
"""Bytes that the attention weights of the original may take."""
FEW_TOKENS = 1000
"""Below this many tokens of text the explained share is far above that on other text, and a notice says so."""
ITERATIONS = 20
"""Iterations of L-BFGS for a scheme alone."""
ITERATIONS_WITH_QUERIES = 40
"""Iterations of L-BFGS for a scheme with an affine map of the queries."""
SHARED_PASSES = 3
"""How often a scheme that layers share is fitted, each time on what the layers get with the values found before."""


@dataclass(frozen=True)
class HeadFit:
    """The fit of one head: KL divergences from the original attention weights."""

    layer: int  # from 1
    head: int  # from 1
    silenced: float  # KL without positions, in nats per query
    fitted: float  # KL with the scheme

    @property
    def explained(self) -> float:
        """The share of the divergence that the scheme removes: 1 − fitted / silenced."""
        return 1 - self.fitted / self.silenced if self.silenced > 1e-9 else 1.0


@dataclass
class Fit:
    """A fitted model, the fit of each head, and notices for the user."""

    model: PreTrainedModel
    spec: str
    heads: list[HeadFit] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def explained(self) -> float:
        """The explained share of all heads together; heads that depend more on position count more.

        It is measured on the sequences of the fit, not on other text. With little text it is too high.
        """
        silenced = sum(head.silenced for head in self.heads)
        return 1 - sum(head.fitted for head in self.heads) / silenced if silenced > 1e-9 else 1.0

    @property
    def summary(self) -> str:
        """The explained share in one sentence."""
        if self.explained < 0:
            return "the fit is worse than using no positions"
        return f"the scheme explains {self.explained:.0%} of the effect of position on attention"

    def of_part(self, part: Part) -> Fit:
        """Returns the fit of a part as that of the whole model, with a notice about what was not fitted."""
        notices = [part.notice] if part.notice is not None else []
        return replace(self, model=part.whole, notices=[*notices, *self.notices])

    def __str__(self) -> str:
        lines = [f"{self.spec}: {self.summary}"]
        for layer in sorted({head.layer for head in self.heads}):
            shares = " ".join(f"{head.explained:4.0%}" for head in self.heads if head.layer == layer)
            lines.append(f"layer {layer:2}: {shares}")
        return "\n".join([*lines, *self.notices])


@fast_products()
def fit(
    model: PreTrainedModel,
    spec: str,
    text: Text,
    *,
    tokenizer: Any = None,
    length: int = LENGTH,
    tokens: int = TOKENS,
    queries: bool = False,
    seconds: float | None = None,
    seed: int = 0,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Fit:
    """Swaps a model to `spec`, in place, with parameters that reproduce its attention on a text.

    Of an encoder-decoder the encoder is swapped and fitted, on the text that it reads; the decoder keeps its own
    positions, as schemes, and a notice says so.

    text      prose: a string or a list of strings, or a pathlib.Path of a file or folder. A few thousand words suffice.
    length    tokens of the longest sequences to fit on.
    tokens    tokens to fit on, for each sequence length.
    queries   whether to change the query weights too. The model is then closer to the original, but swapping to
              `native` no longer restores it.
    seconds   about how long the fit may take. If it would take longer, it uses fewer sequences, and
              ends the search in a layer early (fit_time.py).
    on_stage  called with the name of each stage.

    If it fails or is interrupted, the model is restored.
    """
    checks.check_model(model, spec)
    checks.check_numbers(length, seed)
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    tokenizer, lines = sample.tokenizer_of(model, tokenizer), sample.pieces(text)
    part = part_of(model)
    checks.check_vocabulary(part.model, tokenizer, lines)
    sampler = sample.Sampler(tokenizer, lines, seed=seed)
    batches = _batches(part.model, sampler, length, tokens)
    little = sampler.tokens(FEW_TOKENS)
    changes = _QueryChanges() if queries else None
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            found = _fit(part.model, spec, batches, on_stage, changes, seconds)
            if little < FEW_TOKENS:
                found.notices.append(
                    f"fitted on a text of {little} tokens: the share is measured on the same text, and on other text "
                    f"it is lower; pass a text of a few thousand words"
                )
            part.join()
            return found.of_part(part)
    except BaseException:
        part.restore()
        if changes is not None:
            changes.undo()
        for module, training in modes.items():
            module.training = training
        raise


def _batches(model: PreTrainedModel, sampler: sample.Sampler, length: int, tokens: int) -> list[Tensor]:
    """Sequences of every length of the ladder, the same number of tokens of each: [B, L] without padding."""
    lengths = sample.ladder(sample.longest(model, length))
    config: Any = model.config.get_text_config()
    bytes_per_pair = 4 * config.num_hidden_layers * config.num_attention_heads
    tokens = min(tokens, MEMORY // bytes_per_pair // sum(lengths))
    return [
        rows.to(model.device)
        for each in lengths
        for rows in sampler.rows(max(1, tokens // each), each).split(max(1, BATCH_TOKENS // each))
    ]


@dataclass(frozen=True)
class _Layer:
    """An attention to fit: its new scheme, and the model's own scheme in its place."""

    number: int  # from 1
    name: str
    scheme: Scheme
    own: Scheme
    unchanged: bool  # the new scheme is the model's own, as in the first layers of rope/rope/rope/nope
    shared: bool  # other layers have the same scheme object, and it has parameters


@dataclass
class _QueryChanges:
    """Query weights that a fit changed, and layers whose queries it could not change."""

    originals: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    unchanged: list[int] = field(default_factory=list)

    def remember(self, layer: nn.Module) -> None:
        self.originals += [(weight, weight.clone()) for weight in layer.parameters()]

    def undo(self) -> None:
        for weight, before in reversed(self.originals):
            weight.data.copy_(before)


def _fit(
    model: PreTrainedModel,
    spec: str,
    batches: list[Tensor],
    on_stage: Callable[[str], None],
    changes: _QueryChanges | None,
    seconds: float | None,
) -> Fit:
    on_stage("recording the attention of the original")
    before = native(model)
    goals = attention_weights(model, batches)
    exchange(model, spec if before.table is None else with_first(spec))
    if before.table is not None:
        longest = max(rows.shape[1] for rows in batches)
        start_from_table(model, before.table[0], mean_row(before.table, longest))
    plan = plan_of(model)
    assert plan is not None
    layers = _layers(plan, before)
    cache = layer_cache(model, [layer.name for layer in layers], batches)
    found = Fit(model, spec)
    changed = [layer for layer in layers if not layer.unchanged]
    if seconds is not None and changed:
        goals = fewer(_affordable(seconds, cache, changed, goals, queries=changes is not None), cache, goals)
    shared = [layer for layer in changed if layer.shared]
    if shared:
        goals = fewer(_that_fit(cache, shared), cache, goals)
    clock = FitClock(seconds, len(changed) + (0 if changes is None else len(shared)))
    done: set[int] = set()  # shared schemes that are fitted
    for layer in layers:
        on_stage(f"fitting layer {layer.number} of {len(layers)}")
        if layer.shared and id(layer.scheme) not in done:
            group = [each for each in layers if each.scheme is layer.scheme]
            on_stage(f"fitting layers {', '.join(str(each.number) for each in group)} together")
            _fit_shared(cache, group, goals, clock)
            done.add(id(layer.scheme))
        found.heads += _fit_layer(cache, layer, goals[layer.name], changes, clock)
        cache.cache_next_layer()
    found.notices += _notices(spec, layers, changes, clock.cut_short)
    return found


def _affordable(
    seconds: float, cache: LayerCache, layers: list[_Layer], goals: dict[str, list[Tensor]], *, queries: bool
) -> float:
    """The share of the sequences on which all layers can be fitted in time, by the first of them."""
    first, iterations = layers[0], ITERATIONS_WITH_QUERIES if queries else ITERATIONS
    iterations *= SHARED_PASSES if first.shared else 1
    return affordable(
        seconds / len(layers), cache, first.name, first.scheme, goals[first.name], queries=queries,
        iterations=iterations,
    )  # fmt: skip


def _that_fit(cache: LayerCache, shared: list[_Layer]) -> float:
    """The share of the sequences whose queries, keys and values fit into memory for all layers of a shared scheme."""
    config: Any = cache.model.config.get_text_config()
    numbers: int = 3 * config.hidden_size * sum(rows.numel() for rows in cache.batches)
    return MEMORY / (4 * numbers * len(shared))


def _layers(plan: Plan, before: Native) -> list[_Layer]:
    found: list[_Layer] = []
    uses = Counter(id(scheme) for stack in plan.stacks for scheme in stack.schemes)
    for stack, had in zip(plan.stacks, before.stacks, strict=True):
        own = had.layers or [Nope()] * len(stack.schemes)
        for attention, scheme, mine in zip(stack.attentions, stack.schemes, own, strict=True):
            fixed = had.embed is None and not any(True for each in (scheme, mine) for _ in each.parameters())
            same = fixed and bool(had.layers) and str(scheme) == str(mine)
            shared = uses[id(scheme)] > 1 and any(True for _ in scheme.parameters())
            found.append(_Layer(len(found) + 1, attention.name, scheme, mine, same, shared))
    return found


def _fit_shared(cache: LayerCache, group: list[_Layer], goals: dict[str, list[Tensor]], clock: FitClock) -> None:
    """Fits the scheme that layers share to all of them at once."""
    allowed = clock.next_layers(len(group)) / SHARED_PASSES
    base, count = cache.model.base_model, len(cache.batches)
    attentions = {base.get_submodule(layer.name): goals[layer.name] for layer in group}
    finished = True
    for _ in range(SHARED_PASSES):
        requests: list[Request] = []
        goal: list[Tensor] = []
        for at in range(count):
            for attention, found in cache.requests_of(at, list(attentions)).items():
                requests += found
                goal += attentions[attention][at * len(found) : (at + 1) * len(found)]
        finished = _minimize(group[0].scheme, requests, goal, group[0].own, seconds=allowed)[1] and finished
    if not finished:
        clock.cut_short += [layer.number for layer in group]


def _fit_layer(
    cache: LayerCache, layer: _Layer, goal: list[Tensor], changes: _QueryChanges | None, clock: FitClock
) -> list[HeadFit]:
    """Fits the scheme of a layer, and its queries if `changes` is given. A shared scheme is fitted already."""
    fixed = layer.unchanged or (layer.shared and changes is None)
    allowed = math.inf if fixed else clock.next_layers(1)
    attention = cache.model.base_model.get_submodule(layer.name)
    changes = None if layer.unchanged else changes
    query_layer = None if changes is None else find_query_layer(cache, attention)
    if query_layer is not None and changes is not None:
        changes.remember(query_layer.layer)
    count = len(cache.batches)
    calls = len(goal) // count
    for number_of_pass in range(2 if calls > 1 else 1):  # ALBERT's layers share one attention: fit it twice
        query_map = None if query_layer is None else query_layer.identity()
        requests = [request for at in range(count) for request in cache.requests(at, attention, calls)]
        if number_of_pass == 0:  # before the queries change
            silenced = cross_entropy(None, requests, goal)
        own = None if layer.shared else layer.own
        fitted, finished = _minimize(layer.scheme, requests, goal, own, query_map, seconds=allowed)
        if query_layer is not None and query_map is not None and not query_layer.merge(query_map):
            query_layer = query_map = None
            fitted, finished = _minimize(layer.scheme, requests, goal, own, seconds=allowed)
    if not finished:
        clock.cut_short.append(layer.number)
    if changes is not None and query_layer is None:
        changes.unchanged.append(layer.number)
    least = entropy(goal)
    pairs = zip((silenced - least).tolist(), (fitted - least).tolist(), strict=True)
    return [HeadFit(layer.number, head, *pair) for head, pair in enumerate(pairs, 1)]


def _notices(spec: str, layers: list[_Layer], changes: _QueryChanges | None, cut_short: list[int]) -> list[str]:
    notices = []
    if cut_short:
        which = f"{len(cut_short)} of {len(layers)} layers"
        notices.append(f"time ran out before the fit of {which} had converged; more time gives a closer fit")
    if not any(True for layer in layers for _ in layer.scheme.parameters()):
        result = "there was nothing to fit" if changes is None else "only the queries were fitted"
        notices.append(f"{spec} has no parameters in attention, so {result}")
    if changes is not None and changes.unchanged:
        every = len(changes.unchanged) == len(layers)
        where = "this model" if every else f"layer {', '.join(map(str, changes.unchanged))}"
        notices.append(f"the queries of {where} were not changed: no linear layer alone computes them")
    return notices


def _minimize(
    scheme: Scheme,
    requests: list[Request],
    goal: list[Tensor],
    own: Scheme | None,
    query_map: QueryMap | None = None,
    *,
    seconds: float,
) -> tuple[Tensor, bool]:
    """Minimizes the cross-entropy over the parameters of a scheme and of a query map.

    own   the model's own scheme, from which the fit may start; None to leave the parameters of the scheme alone.

    Returns the cross-entropy [H], and whether the search ended before its time did.
    """
    parameters = [] if own is None else [each for each in scheme.parameters() if each.requires_grad]
    scales: Scales = {}
    if parameters and own is not None:
        set_initial_values(scheme, requests, goal, own)
        scales.update(parameter_scales(scheme))
    if query_map is not None:
        scales.update(dict.fromkeys(query_map.parameters(), SCALE))
        parameters += query_map.parameters()
    finished = True
    if parameters:
        finished = minimize(
            lambda: cross_entropy(scheme, requests, goal, query_map).sum(),
            parameters,
            scales,
            iterations=ITERATIONS if query_map is None else ITERATIONS_WITH_QUERIES,
            seconds=seconds,
        )
    return cross_entropy(scheme, requests, goal, query_map), finished
