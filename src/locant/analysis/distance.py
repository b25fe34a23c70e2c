"""Attention by distance: logits and weights of each head as a function of the offset r = key − query, on a text.

An observer at locant's seam receives every attention of a model, with its own positions as schemes if the model is not
swapped. So logits are those of the model itself, for any position scheme. Let ℓ_b(i, j) be the logits of sequence b,
centered in each row over the visible keys (a constant per row has no effect in a softmax):

    P(i, j) = mean_b ℓ_b(i, j)           the positional part: tokens are averaged out
    share   = mean P² / mean ℓ²          with mean P² corrected for the content that B sequences leave in the average
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from locant.attention import eager
from locant.attention.request import Request
from locant.hf.call import AttentionCall
from locant.hf.facts import has_decoder
from locant.hf.listening import observing
from locant.hf.swapping import native_as_schemes

MUCH = 0.4
"""The share of a row's weight at one place from which on a head is named after that place."""
NEAR = 8
"""The largest width of a local head, in tokens on either side."""


SEPARATOR = ", "
"""Between the two labels of a head."""


@dataclass(frozen=True)
class Head:
    """The label of a head and the numbers behind it. Numbers without a comment are shares of a row's weight."""

    layer: int  # from 1
    head: int  # from 1
    label: str  # one or two, joined by SEPARATOR
    previous: float
    itself: float
    next: float
    first: float
    width: int  # half of the weight, the first token excluded, is within this many tokens of the query
    entropy: float  # of the weights, divided by the entropy of equal weights: 1 is diffuse
    positional: float  # share of the logits' variance that is due to position alone

    @property
    def labels(self) -> list[str]:
        """Its labels, without the width of a local head."""
        return ["local" if each.startswith("local") else each for each in self.label.split(SEPARATOR)]


@dataclass(frozen=True)
class Layer:
    """One attention module on a text."""

    name: str
    offsets: Tensor  # [R]
    logit: Tensor  # [H, R] mean centred logit by offset
    weight: Tensor  # [H, R] mean weight by offset, over the queries with a visible key there
    positional: Tensor  # [H, L, L] the positional part of the logits, P; NaN where a key is not visible
    weights: Tensor  # [H, L, L] mean weights
    heads: tuple[Head, ...]


def by_distance(model: PreTrainedModel, ids: Tensor) -> list[Layer]:
    """Returns one `Layer` for each self-attention of a model, over sequences ids [B, L] without padding."""
    if ids.ndim != 2 or ids.shape[0] < 2 or ids.shape[1] < 4:
        raise ValueError(f"ids must have at least 2 sequences of 4 tokens; got shape {list(ids.shape)}")
    if has_decoder(model):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; pass its encoder: model.get_encoder()")
    sums: dict[str, _LogitSums] = {}
    names = {module: name for name, module in model.base_model.named_modules()}

    def record(call: AttentionCall) -> None:
        if call.scheme is not None:
            name = names.get(call.module, type(call.module).__name__)
            sums.setdefault(name, _LogitSums()).add(call.request())

    with native_as_schemes(model), observing(before=record), torch.no_grad():
        for row in ids:  # one at a time: the logits of all heads must fit into memory
            model.base_model(input_ids=row[None])  # without the head of the model: some require other inputs
    if not sums:
        raise ValueError(f"{type(model).__name__} ran no self-attention that locant can observe")
    return [x.layer(number, name) for number, (name, x) in enumerate(sums.items(), 1)]


class _LogitSums:
    """Sums over the sequences of the logits and weights of one attention module."""

    def __init__(self) -> None:
        self.count = 0
        self.logit = self.square = self.weight = self.entropy = torch.zeros(())
        self.visible = torch.zeros(())
        self.r = torch.zeros(())

    def add(self, request: Request) -> None:
        """Adds one sequence."""
        logit = eager.logits(request).double()
        mask = request.visible()
        visible = torch.ones_like(logit, dtype=torch.bool) if mask is None else mask.expand_as(logit)
        weight = eager.softmax(request, logit.masked_fill(~visible, -torch.inf)).nan_to_num(0.0)
        counts = visible.sum(-1, keepdim=True).clamp(min=1)
        logit = (logit - (logit * visible).sum(-1, keepdim=True) / counts) * visible
        if not logit.isfinite().all():
            raise ValueError("the attention logits contain NaN or infinity; check the weights of the model")
        entropy = -torch.xlogy(weight, weight).sum(-1) / counts.squeeze(-1).double().log().clamp(min=1e-9)
        many = counts.squeeze(-1) >= 4  # over fewer keys all heads have nearly the same entropy
        self.entropy = self.entropy + (entropy * many).sum(-1)[0] / many.sum(-1).clamp(min=1)[0]
        self.logit, self.square = self.logit + logit[0], self.square + logit[0].square()
        self.weight = self.weight + weight[0]
        self.visible, self.count = visible[0], self.count + 1
        self.r = (request.k_pos[:, None, :] - request.q_pos[:, :, None])[0]

    def layer(self, number: int, name: str) -> Layer:
        """Returns the means over the sequences added so far."""
        n, visible = self.count, self.visible
        mean, square, weight = self.logit / n, self.square / n, self.weight / n
        total = square.sum((1, 2))
        # mean_b ℓ still contains 1/B of the content's variance
        content = (square - mean.square()).sum((1, 2)) * n / (n - 1)
        positional = ((mean.square().sum((1, 2)) - content / n) / total.clamp(min=1e-30)).clamp(0, 1)
        offsets, column = self.r.unique(return_inverse=True)
        by_logit, by_weight = (_by_column(x, column, visible, len(offsets)) for x in (mean, weight))
        heads = tuple(
            describe(weight[h], visible[h], self.r, layer=number, head=h + 1, entropy=float(self.entropy[h] / n),
                     positional=float(positional[h]))
            for h in range(weight.shape[0])
        )  # fmt: skip
        hidden = mean.masked_fill(~visible, torch.nan)
        return Layer(name, offsets, by_logit.float(), by_weight.float(), hidden.float(), weight.float(), heads)


def _by_column(x: Tensor, column: Tensor, visible: Tensor, n: int) -> Tensor:
    """[H, n]: the mean of x [H, L, L] over the visible pairs of each offset; NaN where there is none."""
    flat = column.flatten().expand(x.shape[0], -1)
    counts = x.new_zeros(x.shape[0], n).scatter_add(1, flat, visible.flatten(1).to(x.dtype))
    return torch.zeros_like(counts).scatter_add(1, flat, (x * visible).flatten(1)) / counts.masked_fill(
        counts == 0, torch.nan
    )


def describe(
    weight: Tensor, visible: Tensor, r: Tensor, *, layer: int, head: int, entropy: float, positional: float
) -> Head:
    """Returns the labels of a head, from its mean weights, the visible pairs and their offsets, all [L, L].

    previous, next, itself, first-token sink   at least MUCH of the weight is there
    local of width w                           half of the weight, the first token excluded, is within w ≤ NEAR tokens,
                                               and equal weights would need more than twice that
    diffuse                                    the entropy is above 0.9 of that of equal weights
    mixed                                      none of these

    A head may attend to two places, or be local beside a first-token sink. `local` is left out beside the labels of
    near tokens, which imply it.
    """
    rows = visible.sum(-1) >= 4
    weight, visible, r = weight[rows], visible[rows], r[rows]

    def at(offset: int) -> float:
        there = (r == offset) & visible
        return float((weight * there).sum() / there.any(-1).sum().clamp(min=1))

    first = float(weight[:, 0].mean())
    equal = visible / visible.sum(-1, keepdim=True)
    width, usual = _width(weight, r), _width(equal, r)
    numbers = {"previous": at(-1), "itself": at(0), "next": at(1), "first": first}
    names = {"previous": "previous token", "itself": "itself", "next": "next token", "first": "first-token sink"}
    much = sorted((name for name in numbers if numbers[name] >= MUCH), key=lambda name: -numbers[name])
    labels = [names[name] for name in much]
    if not {*much} - {"first"} and width <= NEAR and 2 * width < usual:
        labels.append(f"local of width {width}")
    label = SEPARATOR.join(labels) or ("diffuse" if entropy > 0.9 else "mixed")
    return Head(layer, head, label, width=width, entropy=entropy, positional=positional, **numbers)


def _width(weight: Tensor, r: Tensor) -> int:
    """The smallest w with half of the weight, the first token excluded, on |r| ≤ w."""
    rest = weight.clone()
    rest[:, 0] = 0
    total = float(rest.sum())
    if total <= 0:
        return int(r.abs().max())
    distance = r.abs().flatten()
    by_distance = weight.new_zeros(int(distance.max()) + 1).scatter_add(0, distance, rest.flatten())
    return int((by_distance.cumsum(0) < total / 2).sum())
