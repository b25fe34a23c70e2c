"""`certainty`: how sure the learned curves of a model's schemes are. The model is left as it was found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from locant.analysis import text as texts
from locant.analysis.certainty import attention, tokens, vectors
from locant.analysis.certainty.bands import Band, Bands, Bucket, Bump, Offsets, bands_of
from locant.analysis.certainty.flat import Flat
from locant.analysis.certainty.gradients import gradients_of
from locant.analysis.certainty.scores import Scores, calibrated
from locant.analysis.places import place_of
from locant.hf.call import AttentionCall
from locant.hf.encoder import encoder_of
from locant.hf.facts import has_decoder, is_causal, limits
from locant.hf.finite import check_finite
from locant.hf.listening import observing
from locant.hf.modes import evaluating
from locant.hf.plan import current_schemes, plan_of
from locant.hf.readout import native
from locant.hf.running import vocabulary
from locant.hf.swapping import check_model, exchange, native_as_schemes
from locant.schemes import Scheme

LENGTH, SEQUENCES = 64, 48
"""Tokens of a sequence, and sequences, by default."""
FEWEST = 8
"""Sequences from whose differences a noise scale can be estimated."""
LARGEST = 1024
"""Parameters that may have one covariance matrix."""
DRAWS_PER_PARAMETER, DRAWS = 4, 384
"""Drawn scores for each parameter of the largest block, and the fewest: the curvature is then right to 5 or 10 %."""
LIKELIHOODS = ("auto", "attention", "tokens", "vectors")


@dataclass(frozen=True)
class Place:
    """The posterior of one scheme in a few numbers."""

    place: str  # "layer 2"
    scheme: str
    parameters: int
    determined: float  # γ: how many of them the text determines; the others have the prior
    damping: float  # α
    noise: float | None  # T, the mean over heads; None where no original was given
    draws: int


@dataclass(frozen=True)
class Certainty:
    """The intervals of every learned curve of a model, and what they rest on."""

    likelihood: str  # "attention", "tokens" or "vectors"
    tempered: bool  # whether the noise scale widens or narrows the intervals
    level: float
    sequences: int
    observations: int  # queries of each head, predicted tokens, or vectors
    tokens: int  # for which the intervals hold: the measured ones, or those that the parameters were learned from
    places: tuple[Place, ...]
    bands: tuple[Band, ...]  # one per place, quantity and head
    averages: tuple[Band, ...]  # the same for the mean over heads
    bumps: tuple[Bump, ...]  # the kernels of TISA
    buckets: tuple[Bucket, ...]  # the buckets of T5

    @property
    def doubtful(self) -> tuple[Band, ...]:
        """The bands for which the delta method is doubtful; pass samples=1000 for them."""
        return tuple(band for band in self.bands if band.doubtful)

    def rows(self) -> list[dict[str, str | int | float]]:
        """Returns the bands in long form, for a csv file."""
        return [
            {"place": band.place, "head": band.head or 0, "scheme": band.scheme, "field": band.field, "r": r,
             "value": value, "sd": sd, "low": low, "high": high}
            for band in self.bands
            for r, value, sd, low, high in zip(
                band.r, band.value, band.sd, band.low, band.high, strict=True
            )
        ]  # fmt: skip

    def __str__(self) -> str:
        lines = [
            f"certainty by {self.likelihood}: {self.sequences} sequences, {self.observations:,} observations, "
            f"intervals for {self.tokens:,} tokens"
        ]
        for place in self.places:
            own = [band for band in self.bands if band.place == place.place]
            noise = "" if place.noise is None else f", noise {place.noise:.2g}"
            lines.append(
                f"{place.place}: {place.scheme}, {place.determined:.0f} of {place.parameters} parameters determined"
                f"{noise}; signal by head: {' '.join(f'{band.signal:.0%}' for band in own)}"
            )
        return "\n".join(lines)


@dataclass
class _Unit:
    """A scheme with parameters, and where it is."""

    place: str
    scheme: Scheme
    flat: Flat
    blocks: list[Tensor]
    scores: Scores = field(default_factory=Scores)

    @property
    def largest(self) -> int:
        return max(len(block) for block in self.blocks)

    def information(self, observations: int) -> Tensor:
        """Returns the curvature of the loss per observation, with zeros between blocks."""
        found = torch.zeros(2 * self.flat.learned.shape, dtype=torch.float64)
        for index in self.blocks:
            found[index[:, None], index[None, :]] = self.scores.curvature(index) / observations
        return found


def certainty(
    model: PreTrainedModel,
    text: str | Tensor,
    *,
    tokenizer: Any = None,
    original: PreTrainedModel | None = None,
    likelihood: str = "auto",
    learned_from: int | None = None,
    length: int = LENGTH,
    sequences: int = SEQUENCES,
    reach: int | None = None,
    level: float = 0.95,
    samples: int = 0,
    seed: int = 0,
) -> Certainty:
    """Returns intervals for every learned curve of the schemes in a model's attention.

    text          prose that the parameters were not learned from, or token ids [sequences, length] without padding.
    tokenizer     by default the one in the folder of the model.
    original      the model whose attention or vectors the schemes reproduce, for the noise scale of the likelihoods
                  "attention" and "vectors"; the latter needs it.
    likelihood    "tokens": the model's own predictions of tokens. "attention": the loss of `locant.fit`. "vectors":
                  the distance of an encoder's sentence vectors from the original's. By default "tokens" if the model
                  predicts tokens, and otherwise "attention".
    learned_from  tokens that the parameters were learned from. By default the intervals are those that the measured
                  text alone would leave: a scheme that was learned from 100 times as much has them 10 times narrower.
    length        tokens of a sequence; intervals cover offsets up to length − 1.
    sequences     how many to measure on.
    reach         largest offset of the curves.
    level         of the intervals.
    samples       intervals are quantiles over this many random parameters; 0: the delta method.

    Of an encoder-decoder the encoder is measured. Schemes in the token embedding are left out: they have no curve of
    logits over the offset.
    """
    _check(model, original, likelihood, level, samples)
    with encoder_of(model) as part, _as_schemes(part):
        _learned(part)  # before anything is said about the text
    ids = _ids(model, text, tokenizer, length, sequences)
    with encoder_of(model) as part, _as_schemes(part):
        kind = _kind(part, likelihood, original)
        units = _units(part, ids.shape[1] - 1)
        draws = _draws(units, len(ids))
        generator = torch.Generator().manual_seed(seed)
        causal = is_causal(part, ids)
        observations: int = _observer(kind, tokenizer, original, causal=causal)(part, units, ids, draws, generator)
        if not all(unit.scores.drawn for unit in units):
            raise ValueError(f"{type(model).__name__} ran no attention with its schemes; check that it is complete")
    factor = 1.0 if learned_from is None else learned_from / ids.numel()
    offsets = Offsets(min(reach or ids.shape[1] - 1, ids.shape[1] - 1), causal)
    temper = kind != "tokens" and original is not None
    places, found = [], []
    for unit in units:
        fitted = calibrated(unit.scores, unit.blocks, unit.flat.learned, unit.flat.scale, factor=factor, temper=temper)
        noise = None if fitted.noise is None else sum(fitted.noise) / len(fitted.noise)
        size, post = len(unit.flat), fitted.posterior
        places.append(Place(unit.place, str(unit.scheme), size, post.determined, post.damping, noise, draws * len(ids)))
        found.append(bands_of(unit.flat, post, offsets, place=unit.place, level=level, samples=samples,
                              information=unit.information(observations)))  # fmt: skip
    return Certainty(
        kind, temper, level, len(ids), observations, learned_from or ids.numel(), tuple(places), **_joined(found)
    )  # fmt: skip


def _observer(kind: str, tokenizer: Any, original: Any, *, causal: bool) -> Any:
    """Returns the function that adds the scores of a likelihood to the units, and returns the observations."""
    return {
        "tokens": partial(_by_tokens, tokenizer=tokenizer, causal=causal),
        "vectors": partial(_by_vectors, original=original),
        "attention": partial(_by_attention, original=original),
    }[kind]


@contextmanager
def _as_schemes(model: PreTrainedModel) -> Iterator[None]:
    """Runs a model in eval mode with its own positions as schemes; a table that layers share is one scheme.

    The caller's random numbers stay as they were.
    """
    with torch.random.fork_rng(devices=[]), evaluating(model):
        if plan_of(model) is not None:
            yield
            return
        exchange(model, native(model))
        try:
            yield
        finally:
            exchange(model, "native")


def _joined(found: list[Bands]) -> dict[str, Any]:
    names = ("bands", "averages", "bumps", "buckets")
    return {name: tuple(row for each in found for row in getattr(each, name)) for name in names}


def _check(model: Any, original: Any, likelihood: str, level: float, samples: int) -> None:
    for each in (model, original):
        if each is None:
            continue
        if hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) is not None:
            raise TypeError(
                "the model is compiled, and its attention cannot be observed; pass the model as it was before "
                "torch.compile"
            )
        check_model(each)
        check_finite(each)
    if torch.is_inference_mode_enabled():
        raise ValueError("certainty needs gradients, which torch.inference_mode() forbids; call it outside")
    if likelihood not in LIKELIHOODS:
        raise ValueError(f"likelihood must be one of {', '.join(LIKELIHOODS)}; got {likelihood!r}")
    if not 0 < level < 1:
        raise ValueError(f"level must be above 0 and below 1, such as 0.95; got {level!r}")
    if samples and samples < 100:
        raise ValueError(f"samples must be 0, or 100 or more for the edges of an interval; got {samples}")


def _ids(model: PreTrainedModel, text: str | Tensor, tokenizer: Any, length: int, sequences: int) -> Tensor:
    """The token ids [sequences, length] to measure on."""
    if sequences < FEWEST:
        raise ValueError(f"sequences must be {FEWEST} or more, for the noise between them; got {sequences}")
    if isinstance(text, Tensor):
        if text.ndim != 2 or text.shape[0] < FEWEST or text.shape[1] < 4:
            raise ValueError(
                f"token ids must have {FEWEST} or more sequences of 4 or more tokens; got {list(text.shape)}"
            )
        ids = text
    elif not isinstance(text, str) or not text.strip():
        got = "an empty text" if isinstance(text, str) else type(text).__name__
        raise ValueError(f"certainty is measured on a text, got {got}; pass prose that the model was not trained on")
    else:
        tokenizer = _tokenizer(model, tokenizer)
        most = min([length, *(limit for limit in limits(model) if limit is not None)])
        ids = texts.sequences(tokenizer, text, count=sequences, length=most)
    known, longest = vocabulary(model.base_model), limits(model).positions
    if int(ids.max()) >= known:
        raise ValueError(
            f"token {int(ids.max())} is not one of the {known} tokens of {type(model).__name__}; pass the tokenizer "
            f"that the model was trained with"
        )
    if longest is not None and ids.shape[1] > longest:
        raise ValueError(f"sequences have {ids.shape[1]} tokens, and the model reads {longest}; use shorter sequences")
    return ids.to(model.device)


def _tokenizer(model: PreTrainedModel, tokenizer: Any) -> Any:
    if tokenizer is not None:
        return tokenizer
    try:
        return AutoTokenizer.from_pretrained(model.name_or_path, trust_remote_code=False)
    except Exception:  # transformers raises many classes for a missing tokenizer
        raise ValueError(
            f"found no tokenizer for {model.name_or_path or type(model).__name__}; pass tokenizer=…"
        ) from None


def _kind(model: PreTrainedModel, likelihood: str, original: PreTrainedModel | None) -> str:
    """Which likelihood to use."""
    able = not has_decoder(model) and tokens.predicts_tokens(model)
    if likelihood == "tokens" and not able:
        raise ValueError(
            f"{type(model).__name__} predicts no tokens; use likelihood='attention', or load the model with its head"
        )
    if likelihood == "vectors" and original is None:
        raise ValueError("likelihood='vectors' compares with the vectors of the original; pass original=…")
    if likelihood != "auto":
        return likelihood
    return "tokens" if able else "attention"


def _learned(model: PreTrainedModel) -> dict[Scheme, list[int]]:
    """The schemes of a swapped model that have parameters, each with the numbers of its layers."""
    plan = plan_of(model)
    assert plan is not None
    placed: dict[Scheme, list[int]] = {}
    every: list[str] = []
    for stack in plan.stacks:
        for number, scheme in enumerate(current_schemes(model, stack), 1):
            every.append(str(scheme))
            if any(True for _ in scheme.parameters()):
                placed.setdefault(scheme, []).append(number)
    if not placed:
        raise ValueError(
            f"{', '.join(dict.fromkeys(every))}: no parameters in attention, so there is no learned curve to be "
            f"certain of; use a model with a scheme that learns one, such as tisa:kernels=5"
        )
    return placed


def _units(model: PreTrainedModel, reach: int) -> list[_Unit]:
    """The schemes of a swapped model that have parameters, with room for their scores."""
    units = []
    for scheme, layers in _learned(model).items():
        flat = Flat(scheme)
        unit = _Unit(place_of("", layers), scheme, flat, flat.blocks(reach))
        if unit.largest > LARGEST:
            raise ValueError(
                f"{scheme} has {unit.largest:,} parameters that depend on each other; certainty can invert the "
                f"covariance of at most {LARGEST:,}. Use a scheme with fewer, such as a smaller clip"
            )
        units.append(unit)
    return units


def _draws(units: list[_Unit], sequences: int) -> int:
    """Draws for each sequence."""
    largest = max(unit.largest for unit in units)
    return math.ceil(max(DRAWS_PER_PARAMETER * largest, DRAWS) / sequences)


def _by_tokens(
    model: PreTrainedModel, units: list[_Unit], ids: Tensor, draws: int, generator: torch.Generator, tokenizer: Any,
    causal: bool,
) -> int:  # fmt: skip
    """Collects scores by the predictions of tokens; returns the number of predicted tokens."""
    _check_precision(model)
    mask_token, special = None, set()
    if not causal:
        tokenizer = _tokenizer(model, tokenizer)
        mask_token = getattr(tokenizer, "mask_token_id", None)
        if mask_token is None:
            raise ValueError(
                f"{type(model).__name__} predicts masked tokens, but its tokenizer has no mask token; pass one that "
                f"has, or use likelihood='attention'"
            )
        before, after = texts.special_tokens(tokenizer)
        special = {*before, *after}
    schemes, count = [unit.scheme for unit in units], 0
    with gradients_of(model, schemes):
        for row in ids:
            log, known = tokens.predictions(
                model, row[None], mask_token=mask_token, special=special, generator=generator
            )
            count += len(known)
            for unit, (drawn, observed) in zip(
                units, tokens.scores(schemes, log, known, draws, generator), strict=True
            ):
                unit.scores.drawn.append(drawn)
                unit.scores.observed.append(observed)
    return count


def _by_vectors(
    model: PreTrainedModel, units: list[_Unit], ids: Tensor, draws: int, generator: torch.Generator,
    original: PreTrainedModel,
) -> int:  # fmt: skip
    """Collects scores by the vectors of sequences; returns the number of sequences."""
    _check_precision(model)
    schemes = [unit.scheme for unit in units]
    square, numbers = 0.0, 0
    with encoder_of(original) as part, evaluating(part), gradients_of(model, schemes):
        for row in ids:
            with torch.no_grad():
                goal = vectors.vector(part, row[None].to(part.device)).to(model.device)
            found = vectors.vector(model, row[None])
            square, numbers = square + float((goal - found.detach()).square().sum()), numbers + len(goal)
            for unit, (drawn, observed) in zip(
                units, vectors.scores(schemes, found, goal, draws, generator), strict=True
            ):
                unit.scores.drawn.append(drawn)
                unit.scores.observed.append(observed)
    variance = square / numbers
    if variance < 1e-12:
        raise ValueError("the model returns the vectors of the original; there is no difference to measure noise by")
    for unit in units:
        unit.scores.drawn = [each / math.sqrt(variance) for each in unit.scores.drawn]
        unit.scores.observed = [each / variance for each in unit.scores.observed]
    return len(ids)


def _check_precision(model: PreTrainedModel) -> None:
    if {weight.dtype for weight in model.parameters()} & {torch.bfloat16, torch.float16}:
        raise ValueError("the model is in half precision, which rounds small gradients to zero; call model.float()")


def _by_attention(
    model: PreTrainedModel, units: list[_Unit], ids: Tensor, draws: int, generator: torch.Generator,
    original: PreTrainedModel | None,
) -> int:  # fmt: skip
    """Collects scores by attention weights; returns the number of queries of each head."""
    of = {unit.scheme: unit for unit in units}
    names = {module: name for name, module in model.base_model.named_modules()}
    goals: dict[str, list[Tensor]] = {}
    now: dict[Scheme, list[tuple[Tensor, Tensor | None]]] = {}
    count = 0

    def record(call: AttentionCall) -> None:
        unit = of.get(call.scheme) if call.scheme is not None else None
        if unit is None:
            return
        with torch.enable_grad():
            request = attention.request_of(call, unit.flat.scheme)
            goal = goals[names[call.module]].pop(0) if original is not None else None
            its = attention.scores(unit.flat, request, draws, generator, goal)
        now.setdefault(unit.scheme, []).append(its)
        nonlocal count
        count += call.query.shape[2] if unit is units[0] else 0

    for row in ids:
        if original is not None:
            goals = _weights(original, row[None])
            missing = {names[m] for m in names if getattr(m, "locant", None) in of} - goals.keys()
            if missing:
                raise ValueError(
                    f"the original has no attention {sorted(missing)[0]}; pass the model that this one was made from"
                )
        now.clear()
        with observing(before=record), torch.no_grad():
            model.base_model(input_ids=row[None])
        for scheme, found in now.items():
            scores = of[scheme].scores
            scores.drawn.append(torch.stack([drawn for drawn, _ in found]).sum(0))
            if original is not None:
                observed = [each for _, each in found if each is not None]
                scores.observed.append(torch.stack(observed).sum(0))
    return count


@torch.no_grad()
def _weights(original: PreTrainedModel, ids: Tensor) -> dict[str, list[Tensor]]:
    """The attention weights of every call of each attention of the original, by the name of the module."""
    with encoder_of(original) as part, native_as_schemes(part):
        names = {module: name for name, module in part.base_model.named_modules()}
        found: dict[str, list[Tensor]] = {}

        def record(call: AttentionCall) -> None:
            if call.scheme is not None:
                found.setdefault(names[call.module], []).append(attention.weights(call.request()))

        with observing(before=record):
            part.base_model(input_ids=ids.to(part.device))
    return found
