"""`certainty`: how sure the learned curves of a model's schemes are. The model is left as it was found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from locant.analysis import text as texts
from locant.analysis.certainty import attention, tokens, vectors
from locant.analysis.certainty.bands import Band, Bands, Bucket, Bump, Offsets, bands_of
from locant.analysis.certainty.flat import Flat
from locant.analysis.certainty.scores import calibrated
from locant.analysis.certainty.unit import Unit
from locant.analysis.certainty.visible import visible_pairs
from locant.analysis.places import place_of
from locant.hf.differentiable import check_differentiable
from locant.hf.encoder import encoder_of
from locant.hf.exclusive import exclusive
from locant.hf.facts import has_decoder, is_causal, limits
from locant.hf.finite import check_finite
from locant.hf.modes import evaluating
from locant.hf.plan import current_schemes, plan_of
from locant.hf.readout import native
from locant.hf.running import vocabulary
from locant.hf.swapping import check_model, exchange, restore
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


def certainty(
    model: PreTrainedModel,
    text: str | Tensor,
    *,
    tokenizer: Any = None,
    original: PreTrainedModel | None = None,
    likelihood: str = "auto",
    learned_from: float | None = None,
    length: int | None = None,
    sequences: int | None = None,
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
    length        tokens of a sequence, 64 by default; intervals cover offsets up to length − 1.
    sequences     how many to cut out of a text, 48 by default. Token ids have a length and a number of their own.
    reach         largest offset of the curves, 1 or more; by default all that the sequences have.
    level         of the intervals.
    samples       intervals are quantiles over this many random parameters; 0: the delta method.

    Of an encoder-decoder the encoder is measured. Schemes in the token embedding are left out: they have no curve of
    logits over the offset. Other threads that analyse the model wait, and those that run it get a RuntimeError.
    """
    _check(model, original, likelihood)
    _check_numbers(learned_from, length, sequences, reach, level, samples)
    with exclusive(*(each for each in (model, original) if each is not None)):
        return _measured(model, text, tokenizer, original, likelihood, learned_from, length, sequences, reach, level,
                         samples, seed)  # fmt: skip


def _measured(
    model: PreTrainedModel, text: str | Tensor, tokenizer: Any, original: PreTrainedModel | None, likelihood: str,
    learned_from: float | None, length: int | None, sequences: int | None, reach: int | None, level: float,
    samples: int, seed: int,
) -> Certainty:  # fmt: skip
    with encoder_of(model) as part, _as_schemes(part):
        _learned(part)  # before anything is said about the text
    ids = _ids(model, text, tokenizer, length, sequences)
    if original is not None:
        _check_ids(original, ids, "the original")
    with encoder_of(model) as part, _as_schemes(part):
        kind = _kind(part, likelihood, original)
        units = _units(part, ids, joint=kind != "attention")
        draws = _draws(units, len(ids))
        generator = torch.Generator().manual_seed(seed)
        observations = _observer(part, kind, tokenizer, original, ids)(part, units, ids, draws, generator)
    factor = 1.0 if learned_from is None else learned_from / ids.numel()
    longest = ids.shape[1] - 1 if reach is None else min(reach, ids.shape[1] - 1)
    temper = kind != "tokens" and original is not None
    places, found = [], []
    for unit in units:
        fitted = calibrated(unit.scores, unit.blocks, unit.flat.learned, unit.flat.scale, factor=factor, temper=temper)
        noise = None if fitted.noise is None else sum(fitted.noise) / len(fitted.noise)
        size, post = len(unit.flat), fitted.posterior
        places.append(Place(unit.place, str(unit.scheme), size, post.determined, post.damping, noise, draws * len(ids)))
        found.append(bands_of(unit.flat, post, Offsets(longest, unit.pairs), place=unit.place, level=level,
                              samples=samples, information=unit.information(observations)))  # fmt: skip
    learned = ids.numel() if learned_from is None else round(learned_from)
    return Certainty(kind, temper, level, len(ids), observations, learned, tuple(places), **_joined(found))


def _observer(
    model: PreTrainedModel, kind: str, tokenizer: Any, original: PreTrainedModel | None, ids: Tensor
) -> Callable[..., int]:
    """Returns the function that adds the scores of a likelihood to the units, and returns the observations."""
    if kind == "attention":
        return partial(attention.observe, original=original)
    if {weight.dtype for weight in model.parameters()} & {torch.bfloat16, torch.float16}:
        raise ValueError("the model is in half precision, which rounds small gradients to zero; call model.float()")
    if kind == "vectors":
        assert original is not None
        return partial(vectors.observe, original=original)
    if is_causal(model, ids):
        return partial(tokens.observe, mask_token=None, special=set())
    mask_token, special = tokens.masking(model, _tokenizer(model, tokenizer))
    return partial(tokens.observe, mask_token=mask_token, special=special)


@contextmanager
def _as_schemes(model: PreTrainedModel) -> Iterator[None]:
    """Runs a model in eval mode with its own positions as schemes; a table that layers share is one scheme.

    The caller's random numbers stay as they were.
    """
    with torch.random.fork_rng(devices=[]), evaluating(model):
        if plan_of(model) is not None:
            yield
            return
        try:
            exchange(model, native(model))
            yield
        finally:
            restore(model)


def _joined(found: list[Bands]) -> dict[str, Any]:
    names = ("bands", "averages", "bumps", "buckets")
    return {name: tuple(row for each in found for row in getattr(each, name)) for name in names}


def _check(model: Any, original: Any, likelihood: str) -> None:
    for each in (model, original):
        if each is None:
            continue
        if hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) is not None:
            raise TypeError(
                "the model is compiled, and its attention cannot be observed; pass the model as it was before "
                "torch.compile"
            )
        check_model(each)
        check_differentiable(each)
        check_finite(each)
        if getattr(each.base_model, "main_input_name", "input_ids") != "input_ids":
            raise ValueError(f"{type(each).__name__} does not read tokens; certainty is for models of text")
    if torch.is_inference_mode_enabled():
        raise ValueError("certainty needs gradients, which torch.inference_mode() forbids; call it outside")
    if likelihood not in LIKELIHOODS:
        raise ValueError(f"likelihood must be one of {', '.join(LIKELIHOODS)}; got {likelihood!r}")


def _check_numbers(
    learned_from: Any, length: Any, sequences: Any, reach: Any, level: Any, samples: Any
) -> None:  # fmt: skip
    if not _is_number(level) or not 0 < level < 1:
        raise ValueError(f"level must be above 0 and below 1, such as 0.95; got {level!r}")
    if not _is_whole(samples) or (samples != 0 and samples < 100):
        raise ValueError(
            f"samples must be 0, or a whole number of 100 or more for the edges of an interval; got {samples!r}"
        )
    if reach is not None and (not _is_whole(reach) or reach < 1):
        raise ValueError(f"reach must be a whole number of 1 or more, or left out for all offsets; got {reach!r}")
    if length is not None and (not _is_whole(length) or length < 4):
        raise ValueError(f"length must be a whole number of 4 or more tokens; got {length!r}")
    if sequences is not None and (not _is_whole(sequences) or sequences < FEWEST):
        raise ValueError(f"sequences must be {FEWEST} or more, for the noise between them; got {sequences!r}")
    if learned_from is not None and not (_is_number(learned_from) and 0 < learned_from < math.inf):
        raise ValueError(f"learned_from must be a number of tokens above 0; got {learned_from!r}")


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def _is_whole(x: Any) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool)


def _ids(
    model: PreTrainedModel, text: str | Tensor, tokenizer: Any, length: int | None, sequences: int | None
) -> Tensor:  # fmt: skip
    """The token ids [sequences, length] to measure on."""
    if isinstance(text, Tensor):
        if length is not None or sequences is not None:
            raise ValueError(
                "length and sequences say how a text is cut, and token ids are cut already; leave length and "
                "sequences out"
            )
        whole = text.dtype in (torch.int64, torch.int32)
        if not whole or text.ndim != 2 or text.shape[0] < FEWEST or text.shape[1] < 4:
            raise ValueError(
                f"token ids must have {FEWEST} or more sequences of 4 or more tokens, as int64; got {text.dtype} "
                f"{list(text.shape)}"
            )
        ids = text
    elif not isinstance(text, str) or not text.strip():
        got = "an empty text" if isinstance(text, str) else type(text).__name__
        raise ValueError(f"certainty is measured on a text, got {got}; pass prose that the model was not trained on")
    else:
        tokenizer = _tokenizer(model, tokenizer)
        most = min([length or LENGTH, *(limit for limit in limits(model) if limit is not None)])
        ids = texts.sequences(tokenizer, text, count=sequences or SEQUENCES, length=most)
    _check_ids(model, ids, type(model).__name__)
    return ids.to(model.device)


def _check_ids(model: PreTrainedModel, ids: Tensor, name: str) -> None:
    """Raises ValueError unless a model can read token ids."""
    known, longest = vocabulary(model.base_model), limits(model).positions
    wrong = ids[(ids < 0) | (ids >= known)]
    if len(wrong):
        raise ValueError(
            f"token {int(wrong[0])} is not one of the {known} tokens of {name}; pass the tokenizer that the model was "
            f"trained with"
        )
    if longest is not None and ids.shape[1] > longest:
        raise ValueError(f"sequences have {ids.shape[1]} tokens, and {name} reads {longest}; use shorter sequences")


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


def _units(model: PreTrainedModel, ids: Tensor, *, joint: bool) -> list[Unit]:
    """The schemes of a swapped model that have parameters, each once.

    joint   whether the heads of a layer depend on each other.
    """
    placed = _learned(model)
    units, reach = [], ids.shape[1] - 1
    pairs = visible_pairs(model, ids[:1], set(placed))
    for scheme, layers in placed.items():
        if scheme not in pairs:
            raise ValueError(f"{type(model).__name__} ran no attention with {scheme}; check that it is complete")
        flat = Flat(scheme)
        r = pairs[scheme].nonzero()[:, 0] - reach
        unit = Unit(place_of("", layers), scheme, flat, flat.blocks(r, joint=joint), pairs[scheme])
        if unit.largest > LARGEST:
            alone = max(len(block) for block in flat.blocks(r))
            attend = ", or likelihood='attention', under which heads are independent" if alone <= LARGEST else ""
            raise ValueError(
                f"{scheme} has {unit.largest:,} parameters that depend on each other; certainty can invert the "
                f"covariance of at most {LARGEST:,}. Use a scheme with fewer, such as a smaller clip{attend}"
            )
        units.append(unit)
    return units


def _draws(units: list[Unit], sequences: int) -> int:
    """Draws for each sequence."""
    largest = max(unit.largest for unit in units)
    return math.ceil(max(DRAWS_PER_PARAMETER * largest, DRAWS) / sequences)
