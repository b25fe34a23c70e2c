"""What position does to the outputs of a model, from the outside: move it, shuffle it, lengthen it, average it out.

    shift     ‖h(p + s) − h(p)‖ / ‖h(p)‖        every position moved by s; h the last hidden states
    shuffle   loss of the last token after a shuffled prefix (Haviv et al. 2022, arXiv 2203.16634), or ‖e − e′‖ / ‖e‖ of
              the mean-pooled embedding e of an encoder, against that of another text
    length    loss of the same last tokens after more and more context, or what longer inputs do to the embedding of
              the same first tokens
    share     σ²_position / σ²_total of the hidden states of each layer

All take a model of transformers, swapped or not, and token ids [B, L] without padding; the model runs in eval mode.
Of an encoder-decoder it is the encoder. What cannot be run is a row with NaN and a note that says why.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Shift:
    """Every position moved by `by`. 0 and 1: the model does not see where a text begins."""

    by: int
    relative: float  # ‖h′ − h‖ / ‖h‖ over all tokens
    cosine: float  # between h′ and h, mean over tokens
    how: str  # "position_ids" or "left padding"
    note: str


@dataclass(frozen=True)
class Shuffle:
    """Tokens in another order. `change` is shuffled − plain for a loss; `scale` is what it is to be held against."""

    kind: str  # "loss" or "embedding"
    plain: float  # the loss in order; 0 for an embedding
    shuffled: float  # the loss after a shuffled prefix; ‖e′ − e‖ / ‖e‖ for an embedding
    change: float
    error: float  # standard error of the change, over sequences
    scale: float  # loss: log of the vocabulary, a uniform guess; embedding: ‖e′ − e‖ / ‖e‖ for another text
    note: str


@dataclass(frozen=True)
class Length:
    """Inputs of `length` tokens."""

    length: int
    kind: str  # "loss" or "embedding"
    value: float  # mean loss of the target tokens, or the cosine with the embedding of the shortest input
    error: float  # standard error over sequences
    scale: float  # loss: log of the vocabulary; embedding: the cosine with the shortest input of another text
    tokens: int  # that the loss or the embedding is of: the same for every length
    note: str


@dataclass(frozen=True)
class Share:
    """Shares of the variance of hidden states; they add up to 1. Where there is none they scatter around 0."""

    layer: int  # 0: the embeddings
    position: float
    error: float  # standard error of `position`: jackknife over sequences
    sequence: float  # what all tokens of a text have in common
    rest: float
    shuffled: float  # `position` again, with the tokens of every text in random order
    shuffled_error: float
    variance: float  # the whole, summed over coordinates

    @property
    def interval(self) -> tuple[float, float]:
        """`position` ± 2 standard errors."""
        return self.position - 2 * self.error, self.position + 2 * self.error


# ---- shift ----------------------------------------------------------------------------------------


@torch.no_grad()
def shift(
    model: PreTrainedModel, ids: Tensor, by: Sequence[int] = (1, 2, 5, 16, 64, 256), *, start: int = 0
) -> list[Shift]:
    """How much the last hidden states change when every position moves by s: one row for each s.

    By position_ids where the model takes them, otherwise by s padding tokens to the left, which are masked. Every
    shift takes position 0 away, which many models treat as no other (MiniLM on English: a change of 0.73 for one step
    from 0, of 0.16 for one step from 1): `start` is where the text begins before it is moved.
    """
    from locant.hf.facts import first_position, layer_stack, limits
    from locant.hf.modes import evaluating

    ids = _checked(model, ids, sequences=1, length=2)
    if any(step < 1 for step in by) or start < 0:
        raise ValueError(f"by must be 1 or more and start 0 or more, got {list(by)} and {start}")
    stack, offset = layer_stack(model), first_position(model)
    limit, trained = limits(model)
    _fits(model, start + ids.shape[1])
    takes = "position_ids" in inspect.signature(type(stack).forward).parameters
    rows = []
    with evaluating(model):
        plain = _moved(model, stack, ids, offset, start, takes)
        for step in by:
            end, note = start + step + ids.shape[1], ""
            if limit is not None and end > limit:
                note = f"not run: position {end - 1} is past the last one, {limit - 1}"
                rows.append(Shift(step, math.nan, math.nan, "position_ids" if takes else "left padding", note))
                continue
            if trained is not None and end > trained:
                note = f"past the {trained} positions of the config"
            moved = _moved(model, stack, ids, offset, start + step, takes)
            relative = float((moved - plain).norm() / plain.norm())
            cosine = float(F.cosine_similarity(moved, plain, dim=-1).mean())
            rows.append(Shift(step, relative, cosine, "position_ids" if takes else "left padding", note))
    return rows


def _moved(model: PreTrainedModel, stack: nn.Module, ids: Tensor, offset: int, first: int, takes: bool) -> Tensor:
    """The last hidden states, float64, with positions from `first` on."""
    if takes:
        places = torch.arange(first, first + ids.shape[1], device=ids.device).expand_as(ids) + offset
        return _finite(_run(stack, ids, position_ids=places).last_hidden_state)
    padded = F.pad(ids, (first, 0), value=int(model.config.pad_token_id or 0))
    mask = F.pad(torch.ones_like(ids), (first, 0))
    return _finite(_run(stack, padded, attention_mask=mask).last_hidden_state)[:, first:]


# ---- shuffle --------------------------------------------------------------------------------------


@torch.no_grad()
def shuffle(
    model: PreTrainedModel, ids: Tensor, *, targets: int = 1, keep: int = 1, draws: int = 4, seed: int = 0
) -> Shuffle:
    """What the order of tokens is worth.

    A causal language model: the loss of the last `targets` tokens when the tokens before them are shuffled. Any other:
    the change of the mean-pooled last hidden states. The first `keep` tokens stay where they are ([CLS], <s>), for an
    encoder the last `keep` too ([SEP]). Mean over `draws` shuffles.
    """
    from locant.hf.facts import is_causal, layer_stack
    from locant.hf.modes import evaluating

    ids = _checked(model, ids, sequences=2, length=2 * keep + targets + 2)
    generator = torch.Generator().manual_seed(seed)
    _fits(model, ids.shape[1])
    with evaluating(model):
        causal = is_causal(model, ids)
        if causal and _has_head(model):
            end = ids.shape[1] - targets
            plain = _losses(model, ids, targets)
            orders = [_shuffled(ids, keep, end, generator) for _ in range(draws)]
            shuffled = torch.stack([_losses(model, order, targets) for order in orders]).mean(0)
            change, uniform = shuffled - plain, math.log(_vocabulary(model))
            return Shuffle(
                "loss", float(plain.mean()), float(shuffled.mean()), float(change.mean()), _error(change), uniform, ""
            )
        stack = layer_stack(model)
        plain = _pooled(stack, ids)
        orders = [_shuffled(ids, keep, ids.shape[1] - keep, generator) for _ in range(draws)]
        length = plain.norm(dim=-1)
        change = torch.stack([(_pooled(stack, order) - plain).norm(dim=-1) / length for order in orders]).mean(0)
        other = (plain.roll(1, 0) - plain).norm(dim=-1) / length
        note = "causal, but without a head for language modelling: its embedding" if causal else ""
        value = float(change.mean())
        return Shuffle("embedding", 0.0, value, value, _error(change), float(other.mean()), note)


def _shuffled(ids: Tensor, first: int, end: int, generator: torch.Generator) -> Tensor:
    """Each sequence with its tokens first … end − 1 in an order of its own."""
    order = torch.rand(ids.shape[0], end - first, generator=generator).argsort(-1).to(ids.device)
    return torch.cat([ids[:, :first], ids[:, first:end].gather(1, order), ids[:, end:]], dim=1)


# ---- length ---------------------------------------------------------------------------------------


@torch.no_grad()
def length(model: PreTrainedModel, ids: Tensor, lengths: Sequence[int]) -> list[Length]:
    """What longer inputs do, on the same tokens for every length, so that nothing but the length differs.

    A causal language model: the loss of the last tokens of `ids` (half as many as the shortest input has) when the
    input is the last n tokens. Any other: the first tokens of `ids` (as many as the shortest input has) are pooled, and
    the row has the cosine between their embedding in an input of n tokens and in the shortest.
    """
    from locant.hf.facts import is_causal, layer_stack, limits
    from locant.hf.modes import evaluating

    if not lengths or min(lengths) < 4:
        raise ValueError(f"lengths must be 4 tokens or more, got {list(lengths)}")
    ids = _checked(model, ids, sequences=2, length=max(lengths))
    limit, trained = limits(model)
    rows = []
    shortest = min(lengths)
    _fits(model, shortest)
    with evaluating(model):
        causal = is_causal(model, ids[:, :shortest])
        by_loss = causal and _has_head(model)
        stack = layer_stack(model)
        tokens = shortest // 2 if by_loss else shortest
        scale, before = math.log(_vocabulary(model)), torch.empty(0)
        if not by_loss:
            before = _pooled(stack, ids[:, :shortest])
            scale = float(F.cosine_similarity(before, before.roll(1, 0)).mean())
        for n in lengths:
            kind, note = "loss" if by_loss else "embedding", ""
            if limit is not None and n > limit:
                note = f"not run: the model has {limit} positions"
                rows.append(Length(n, kind, math.nan, math.nan, scale, tokens, note))
                continue
            if trained is not None and n > trained:
                note = f"past the {trained} positions of the config"
            if by_loss:
                values = _losses(model, ids[:, -n:], tokens)
            else:
                hidden = _finite(_run(stack, ids[:, :n]).last_hidden_state)
                values = F.cosine_similarity(hidden[:, :shortest].mean(1), before)
            rows.append(Length(n, kind, float(values.mean()), _error(values), scale, tokens, note))
    return rows


# ---- share ----------------------------------------------------------------------------------------


@torch.no_grad()
def share(model: PreTrainedModel, ids: Tensor, *, seed: int = 0) -> list[Share]:
    """Which share of the variance of the hidden states is due to position: one row for the embeddings, one per layer.

    The control runs the model on the same tokens in random order within each text: words that like certain places
    ([CLS] at 0) count as position in `position`, but not in `shuffled`.
    """
    from locant.hf.facts import layer_stack
    from locant.hf.modes import evaluating

    ids = _checked(model, ids, sequences=3, length=3)
    _fits(model, ids.shape[1])
    stack = layer_stack(model)
    mixed = _shuffled(ids, 0, ids.shape[1], torch.Generator().manual_seed(seed))
    with evaluating(model):
        plain = _run(stack, ids, output_hidden_states=True).hidden_states
        control = _run(stack, mixed, output_hidden_states=True).hidden_states
    rows = []
    for layer, (hidden, other) in enumerate(zip(plain, control, strict=True)):
        one, two = decompose(_finite(hidden)), decompose(_finite(other))
        rows.append(
            Share(layer, one.position, one.error, one.sequence, one.rest, two.position, two.error, one.variance)
        )
    return rows


@dataclass(frozen=True)
class Decomposition:
    """Shares of variance, and the whole."""

    position: float
    error: float
    sequence: float
    rest: float
    variance: float


def decompose(hidden: Tensor) -> Decomposition:
    """Two-way analysis of variance of h[b, m] (any number of coordinates): h_bm = μ + p_m + s_b + e_bm.

        σ²_e = MS(h_bm − h̄_b − h̄_m + h̄)    σ²_p = Var_m(mean_b h) − σ²_e/B    σ²_s = Var_b(mean_m h) − σ²_e/M

    The mean over B texts still has 1/B of the content in it: that is taken off, without bias whatever the correlation
    between the tokens of a text. A share may therefore come out below 0.
    """
    if hidden.ndim != 3 or hidden.shape[0] < 3 or hidden.shape[1] < 2:
        raise ValueError(f"hidden must be [B, L, width] with B ≥ 3 and L ≥ 2, got {list(hidden.shape)}")
    x = hidden.double()
    x = x - x.mean((0, 1))
    b, m, _ = x.shape
    size = x.square().sum((1, 2))  # [B]
    if float(size.sum()) == 0:
        raise ValueError("the hidden states are the same at every position of every sequence: no variance to share")
    of_sequence = x.mean(1)  # [B, D]
    every = _components(b, m, size.sum(), x.mean(0), of_sequence.square().sum())
    # Each sequence left out once, from sums alone.
    jackknife = torch.stack(
        [
            _components(
                b - 1, m, size.sum() - size[i], (x.sum(0) - x[i]) / (b - 1),
                of_sequence.square().sum() - of_sequence[i].square().sum(),
            )
            for i in range(b)
        ]
    )  # fmt: skip
    shares = jackknife[:, 0] / jackknife.sum(-1)
    error = math.sqrt((b - 1) ** 2 / b * float(shares.var()))
    position, sequence, rest = (every / every.sum()).tolist()
    return Decomposition(position, error, sequence, rest, float(every.sum()))


def _components(b: int, m: int, size: Tensor, of_place: Tensor, of_sequence: Tensor) -> Tensor:
    """σ²_p, σ²_s, σ²_e from Σ‖h‖², mean_b h [m, D] and Σ_b ‖mean_m h‖²."""
    grand = of_place.mean(0).square().sum()
    places = of_place.square().sum() - m * grand  # Σ_m ‖h̄_m − h̄‖²
    texts = of_sequence - b * grand
    rest = (size - b * m * grand - b * places - m * texts) / ((b - 1) * (m - 1))
    return torch.stack([places / (m - 1) - rest / b, texts / (b - 1) - rest / m, rest])


# ---- models ---------------------------------------------------------------------------------------


def _checked(model: PreTrainedModel, ids: Tensor, *, sequences: int, length: int) -> Tensor:
    """ids on the model's device; ValueError for what the measurement cannot be made of."""
    if getattr(model.base_model, "main_input_name", "input_ids") != "input_ids":
        raise ValueError(f"{type(model).__name__} does not take token ids")
    if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"ids must be whole numbers [sequences, tokens], got {ids.dtype} {list(ids.shape)}")
    if ids.shape[0] < sequences:
        raise ValueError(f"too few sequences: got {ids.shape[0]}, this needs {sequences} or more")
    if ids.shape[1] < length:
        raise ValueError(f"too short: got sequences of {ids.shape[1]} tokens, this needs {length} or more")
    size = _vocabulary(model)
    if int(ids.min()) < 0 or int(ids.max()) >= size:
        raise ValueError(f"ids must lie in 0 … {size - 1}, got {int(ids.min())} … {int(ids.max())}")
    config: Any = model.config
    padding = getattr(config, "pad_token_id", None)
    others = [getattr(config, name, None) for name in ("eos_token_id", "bos_token_id")]
    if padding is not None and padding not in others and bool((ids == padding).any()):
        raise ValueError(f"ids hold padding (token {padding}); give texts of one length, cut to the shortest")
    return ids.long().to(next(model.parameters()).device)


def _vocabulary(model: PreTrainedModel) -> int:
    tokens: Any = model.get_input_embeddings()
    return int(tokens.weight.shape[0])


def _fits(model: PreTrainedModel, length: int) -> None:
    from locant.hf.facts import limits

    limit, _ = limits(model)
    if limit is not None and length > limit:
        raise ValueError(f"too long: {length} tokens, and the model has {limit} positions")


def _run(module: nn.Module, ids: Tensor, **given: Any) -> Any:
    return module(input_ids=ids, return_dict=True, **given)


def _finite(hidden: Tensor) -> Tensor:
    if not bool(hidden.isfinite().all()):
        raise ValueError("the outputs of the model hold NaN or infinity: there is nothing to measure")
    return hidden.double()


def _pooled(stack: nn.Module, ids: Tensor) -> Tensor:
    return _finite(_run(stack, ids).last_hidden_state).mean(1)


def _has_head(model: PreTrainedModel) -> bool:
    return model is not model.base_model and model.get_output_embeddings() is not None


def _losses(model: PreTrainedModel, ids: Tensor, targets: int) -> Tensor:
    """Mean loss of the last `targets` tokens of each sequence, [B]."""
    logits = _finite(_run(model, ids).logits)[:, -targets - 1 : -1]
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, -targets:].flatten(), reduction="none")
    return losses.view(ids.shape[0], targets).mean(1)


def _error(values: Tensor) -> float:
    return float(values.std() / math.sqrt(len(values)))
