"""`fit`: sets a new scheme's parameters so that attention does what it did before. Nothing is trained end to end.

With the model's own positions, layer l gives each query i weights p_i over the keys it sees. Then the positions are
taken away; a table of absolute ones leaves its first row and the mean of the others behind (the scheme `first`). Layer
by layer, because later layers see what earlier ones now do, the scheme's parameters θ of this layer alone are set to

    argmin_θ Σ_i KL( p_i ‖ softmax(ℓ_i(θ)) )

over the queries of a few hundred sequences, where ℓ_i(θ) are the logits of the changed model with the scheme. This is
convex in a bias. It starts from a least-squares answer (start.py) where a scheme's own start is far from any. With
`queries` the layer's queries are turned as well (queries.py): θ are then the scheme's parameters and A and a.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from locant.adaptation import sample
from locant.adaptation.below import below
from locant.adaptation.queries import UNIT, Turn, find
from locant.adaptation.sample import Text
from locant.adaptation.start import start, units
from locant.attention import eager
from locant.attention.request import prepare
from locant.hf.call import AttentionCall
from locant.hf.listening import observing
from locant.hf.plan import plan_of
from locant.hf.readout import native
from locant.hf.swapping import native_as_schemes, swap
from locant.schemes import First, Nope, Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from locant.attention.request import Request

LENGTH, TOKENS = 128, 3072
"""Tokens of the longest sequences, and how many tokens there are at each length."""
MEMORY = 2**30
"""Bytes that the weights of the original may take."""
ITERATIONS, WITH_QUERIES = 20, 40
"""Of L-BFGS: for a scheme alone, and with queries."""


@dataclass(frozen=True)
class HeadFit:
    """How much of what position did in a head the new scheme does: 1 − KL with the scheme / KL without positions."""

    layer: int  # from 1
    head: int  # from 1
    silenced: float  # KL without positions, in nats per query
    fitted: float  # KL with the scheme

    @property
    def explained(self) -> float:
        return 1 - self.fitted / self.silenced if self.silenced > 1e-9 else 1.0


@dataclass
class Fit:
    """A fitted model and what is to be said about it."""

    model: PreTrainedModel
    spec: str
    heads: list[HeadFit] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def explained(self) -> float:
        """Over all heads; those count most in which position did most."""
        silenced = sum(head.silenced for head in self.heads)
        return 1 - sum(head.fitted for head in self.heads) / silenced if silenced > 1e-9 else 1.0

    @property
    def summary(self) -> str:
        if self.explained < 0:
            return "heads look elsewhere than they did, farther from it than without positions"
        return f"{self.explained:.0%} of what position does in attention is explained"

    def __str__(self) -> str:
        lines = [f"{self.spec}: {self.summary}"]
        for layer in sorted({head.layer for head in self.heads}):
            shares = " ".join(f"{head.explained:4.0%}" for head in self.heads if head.layer == layer)
            lines.append(f"layer {layer:2}: {shares}")
        return "\n".join([*lines, *self.notices])


def fit(
    model: PreTrainedModel,
    spec: str,
    text: Text,
    *,
    tokenizer: Any = None,
    length: int = LENGTH,
    tokens: int = TOKENS,
    queries: bool = False,
    seed: int = 0,
    say: Callable[[str], None] = lambda stage: None,
) -> Fit:
    """Swaps a model to `spec`, in place, with parameters that do what its own positions did on the text.

    text      prose: a string or a list of strings, or a pathlib.Path of a file or folder. A few thousand words will do.
    length    tokens of the longest sequences that are looked at.
    tokens    how many of them are looked at, at each length.
    queries   whether the weights that make queries are set as well, not only the scheme's parameters. The model is then
              nearer to what it was; what it was cannot be had back by swapping to `native`.
    """
    sample.check(model, spec)
    sample.check_numbers(length, seed)
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    tokenizer, lines = sample.tokenizer_of(model, tokenizer), sample.pieces(text)
    sample.check_words(model, tokenizer, lines)
    batches = _batches(model, sample.Sampler(tokenizer, lines, seed=seed), length, tokens)
    turned: list[tuple[Tensor, Tensor]] = []  # weights of queries, and what they were
    modes = {part: part.training for part in model.modules()}
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            return _fit(model, spec, batches, say, turned if queries else None)
    except BaseException:
        swap(model, "native")
        for weight, before in reversed(turned):
            weight.data.copy_(before)
        for part, training in modes.items():
            part.training = training
        raise


def _batches(model: PreTrainedModel, sampler: sample.Sampler, length: int, tokens: int) -> list[Tensor]:
    """Sequences of every length of the ladder, as many tokens of each: [B, L] without padding."""
    rungs = sample.ladder(sample.longest(model, length))
    config: Any = model.config
    weights = 4 * config.num_hidden_layers * config.num_attention_heads  # bytes for a pair of tokens
    tokens = min(tokens, MEMORY // weights // sum(rungs))
    return [
        rows.to(model.device)
        for rung in rungs
        for rows in sampler.rows(max(1, tokens // rung), rung).split(max(1, 2048 // rung))
    ]


def _fit(
    model: PreTrainedModel,
    spec: str,
    batches: list[Tensor],
    say: Callable[[str], None],
    turned: list[tuple[Tensor, Tensor]] | None,
) -> Fit:

    say("looking at the model as it is")
    before = native(model)
    goals = _weights(model, batches)
    swap(model, spec if before.table is None else with_first(spec))
    if before.table is not None:
        _leave(model, before.table[0], _mean(before.table, max(rows.shape[1] for rows in batches)))
    plan = plan_of(model)
    assert plan is not None
    found = Fit(model, spec)
    layers = [
        (attention.name, scheme, own)
        for stack, had in zip(plan.stacks, before.stacks, strict=True)
        for attention, scheme, own in zip(
            stack.attentions, stack.schemes, had.layers or [Nope()] * len(stack.schemes), strict=True
        )
    ]
    runs = below(model, [name for name, _, _ in layers], batches)
    unturned: list[int] = []
    for number, (name, scheme, own) in enumerate(layers, 1):
        say(f"layer {number} of {len(layers)}")
        goal, attention = goals[name], model.base_model.get_submodule(name)
        maker = None if turned is None else find(runs, attention)
        if maker is not None and turned is not None:
            turned += [(weight, weight.clone()) for weight in maker.layer.parameters()]
        passes = 2 if len(goal) > len(batches) else 1  # ALBERT's layers share one attention: all of it, twice
        for number_of_pass in range(passes):
            calls = len(goal) // len(batches)
            turn = None if maker is None else maker.turn()
            requests = [call for at in range(len(batches)) for call in runs.reach(at, attention, calls)]
            if number_of_pass == 0:  # later its queries are turned
                silenced = _cross_entropy(None, requests, goal)
            fitted = _set(scheme, requests, goal, own, turn)
            if maker is not None and turn is not None and not maker.put(turn):
                maker = turn = None
                fitted = _set(scheme, requests, goal, own)
        if turned is not None and maker is None:
            unturned.append(number)
        runs.finish()
        least = _entropy(goal)
        found.heads += [
            HeadFit(number, head, *pair)
            for head, pair in enumerate(zip((silenced - least).tolist(), (fitted - least).tolist(), strict=True), 1)
        ]
    if not any(True for _, scheme, _ in layers for _ in scheme.parameters()):
        but = "nothing to fit" if turned is None else "nothing to fit but queries"
        found.notices.append(f"{spec} has no parameters in attention: there was {but}")
    if unturned:
        where = "this model" if len(unturned) == len(layers) else f"layer {', '.join(map(str, unturned))}"
        found.notices.append(f"no linear layer alone makes the queries of {where}: they stay as they were")
    return found


def with_first(spec: str) -> str:
    """A spec, or each part of one that differs from layer to layer, with what a table leaves behind."""
    parts = [part.strip() for part in spec.split("/")]
    there = ({each.partition(":")[0].strip().lower() for each in part.split("+")} for part in parts)
    return "/".join(part if "first" in names else f"{part}+first" for part, names in zip(parts, there, strict=True))


@contextmanager
def silenced(model: PreTrainedModel, length: int) -> Iterator[None]:
    """A model without positions for a while; of a table, the mean of its rows (see `_mean`) stays in all places."""

    table = native(model).table
    try:
        swap(model, "nope" if table is None else "first")
        if table is not None:
            _leave(model, _mean(table, length), _mean(table, length))
        yield
    finally:
        swap(model, "native")


def _mean(table: Tensor, length: int) -> Tensor:
    """Without the first row, which is an outlier, and rows that were not looked at."""
    return table[1:length].mean(0) if length > 1 else table[0]


def _leave(model: PreTrainedModel, first: Tensor, rest: Tensor) -> None:
    """What a table leaves behind when it is taken away."""
    for part in model.modules():
        if isinstance(part, First):
            with torch.no_grad():
                part.first.copy_(first)
                part.rest.copy_(rest)


def _set(scheme: Scheme, requests: list[Request], goal: list[Tensor], own: Scheme, turn: Turn | None = None) -> Tensor:
    """[H] the cross-entropy when the parameters of a scheme, and of a turn of its queries, make it small."""
    parameters = [parameter for parameter in scheme.parameters() if parameter.requires_grad]
    sizes: dict[Any, Tensor | float] = {}
    if parameters:
        start(scheme, requests, goal, own)
        sizes.update(units(scheme))
    if turn is not None:
        sizes.update(dict.fromkeys(turn.parameters(), UNIT))
        parameters += turn.parameters()
    if not parameters:
        return _cross_entropy(scheme, requests, goal)
    # L-BFGS in units in which every parameter is about 1: the widths of TISA's bumps range over four decades.
    scale = [sizes[parameter] for parameter in parameters]
    scaled = [(parameter / size).requires_grad_() for parameter, size in zip(parameters, scale, strict=True)]
    optimizer = torch.optim.LBFGS(
        scaled, max_iter=ITERATIONS if turn is None else WITH_QUERIES, history_size=20, line_search_fn="strong_wolfe"
    )

    @torch.no_grad()
    def put() -> None:
        for parameter, value, size in zip(parameters, scaled, scale, strict=True):
            parameter.copy_(value * size)

    def closure() -> Tensor:
        put()
        for parameter in parameters:
            parameter.grad = None
        with torch.enable_grad():
            loss = _cross_entropy(scheme, requests, goal, turn).sum()
        for parameter, value, size in zip(parameters, scaled, scale, strict=True):
            value.grad = torch.zeros_like(value) if parameter.grad is None else parameter.grad * size
        return loss

    optimizer.step(closure)
    put()
    scheme.zero_grad()
    return _cross_entropy(scheme, requests, goal, turn)


def _cross_entropy(
    scheme: Scheme | None, requests: list[Request], goal: list[Tensor], turn: Turn | None = None
) -> Tensor:
    """[H] the mean over queries of −Σ p ln softmax(ℓ): the divergence KL(p ‖ softmax(ℓ)) and the entropy of p.

    Where gradients are on, they are added up batch by batch.
    """
    queries = sum(p.shape[0] * p.shape[2] for p in goal)
    total: Tensor = torch.zeros(goal[0].shape[1], device=goal[0].device)
    for request, p in zip(requests, goal, strict=True):
        log = _log_weights(request, scheme, turn).masked_fill(
            p == 0, 0.0
        )  # −∞ where nothing is seen: it counts for nothing
        loss = -(p * log).sum((0, 2, 3)) / queries
        if torch.is_grad_enabled():
            loss.sum().backward()
        total = total + loss.detach()
    return total


def _entropy(goal: list[Tensor]) -> Tensor:
    """[H] the mean over queries of −Σ p ln p: what no scheme gets below."""
    queries = sum(p.shape[0] * p.shape[2] for p in goal)
    return -torch.stack([torch.xlogy(p, p).sum((0, 2, 3)) for p in goal]).sum(0) / queries


def _log_weights(request: Request, scheme: Scheme | None, turn: Turn | None = None) -> Tensor:

    q_pos, k_pos = request.positions or (None, None)
    where: Any = {"q_pos": q_pos, "k_pos": k_pos, "mask": request.mask, "causal": request.causal}
    q = request.q if turn is None else turn(request.q)
    logit = eager.logits(prepare(q, request.k, request.v, scheme, scale=request.scale, **where))
    visible = request.visible()
    return (logit if visible is None else logit.masked_fill(~visible, -torch.inf)).log_softmax(-1)


def _weights(model: PreTrainedModel, batches: list[Tensor]) -> dict[str, list[Tensor]]:
    """By attention, for each call of it, [B, H, L, L]: where it looks."""
    names = {module: name for name, module in model.base_model.named_modules()}
    found: dict[str, list[Tensor]] = {}

    def record(call: AttentionCall) -> None:
        if call.scheme is not None:
            request = call.request()
            found.setdefault(names[call.module], []).append(_log_weights(request, request.scheme).exp())

    with native_as_schemes(model), observing(before=record):
        for rows in batches:
            model.base_model(input_ids=rows)
    return found
