"""The variance of any Hugging Face model after every step of its layers, over sequences and coordinates."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from locant.analysis import twin
from locant.analysis.layout import LayerTracker, find_layout, observed
from locant.analysis.steps import KEY, LOGITS, QUERY, STEPS, VALUE, WEIGHTS
from locant.analysis.variance.table import MEASURED, VarianceRow, Variances
from locant.analysis.variance.theory import FeedForward, Sigmas
from locant.hf.call import OWN_LOGITS, AttentionCall
from locant.hf.facts import has_decoder
from locant.hf.finding import family_of
from locant.hf.length import named_length
from locant.hf.modes import evaluating
from locant.hf.plan import plan_of


def settings(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the arguments of `predict` except the length, from a GPT-2: `predict(**settings(model), length=512)`.

    Sigmas are root mean squares over the layers. GPT-2's default initialization makes both c_proj smaller.
    """
    base: Any = model.base_model
    if model.config.model_type != "gpt2":
        raise ValueError(
            f"settings takes a GPT-2 model; got {model.config.model_type}: pass the sigmas to predict yourself"
        )

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
    bidirectional: bool = False,
) -> Variances:
    """Returns the variance over sequences and coordinates at every position, after every step of every layer.

    The input is `tokens`, [sequences, length], if given; else `sequences` pieces of `length` tokens from random places
    of `text_ids`, one long text; else random tokens of the whole vocabulary. `bidirectional` runs a causal model with a
    mask that hides nothing (twin.py).

    A layer has a row for each step that `find_layout` finds: `layer norm` in models with a norm before attention;
    `logits` and `weights` where position adds nothing to q·k inside attention; `residual` where a module receives
    input + attention output; `feed-forward output` where a module computes the last summand of the layer. Models whose
    attention locant cannot find have `input` and `layer output`.
    """
    ids = _sequences(model, tokens, sequences, length, seed, text_ids)
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ValueError(f"the weights of the model contain NaN or infinity: {name}")
    layout = find_layout(model)
    tracker, sums = LayerTracker(layout.layers), _Moments()

    def after_attention(call: AttentionCall, out: Tensor) -> None:
        if call.module in layout.attentions and tracker.layer >= 0:
            sums.add_attention(tracker.layer, call)

    base: Any = model.base_model
    heads = getattr(model.config, "num_attention_heads", 12)
    batch = min(64, max(1, 2**24 // (heads * ids.shape[1] ** 2)))
    observing = observed(model, layout.attentions, after_attention)
    if bidirectional:
        twin.check(base, ids)
    with evaluating(base), observing, tracker.recording(layout, sums.add):
        for part in ids.split(batch):
            tracker.layer = -1
            base(input_ids=part, **(twin.arguments(base, part) if bidirectional else {}))
    return sums.table(len(layout.roles))


def _sequences(
    model: PreTrainedModel, tokens: Tensor | None, sequences: int, length: int, seed: int, text_ids: Tensor | None
) -> Tensor:
    """The token ids to measure on, checked."""
    config: Any = model.config
    if has_decoder(model) or model.main_input_name != "input_ids":
        raise ValueError(
            f"measure takes models with one stack of layers over tokens; got {config.model_type}. For an "
            f"encoder-decoder pass model.get_encoder()"
        )
    if tokens is not None and text_ids is not None:
        raise ValueError("pass tokens or text_ids, not both")
    if tokens is not None:
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise ValueError(f"tokens must be ids [sequences, length]; got {list(tokens.shape)} of {tokens.dtype}")
        sequences, length = tokens.shape
    if sequences < 2:
        raise ValueError(f"a variance over sequences needs at least 2 of them; got {sequences}")
    if length < 2:
        raise ValueError(f"sequences must have at least 2 tokens; got {length}")
    longest = named_length(config)
    if longest is not None and plan_of(model) is None:
        with suppress(NotImplementedError):  # RoBERTa's positions start at 2
            longest -= family_of(model).shift(model.base_model)
    if longest is not None and length > longest:
        raise ValueError(f"sequences are too long: got {length} tokens, the model has {longest} positions")
    embeddings: Any = model.get_input_embeddings()
    vocabulary: int = embeddings.weight.shape[0]
    generator = torch.Generator().manual_seed(seed)
    if tokens is None and text_ids is not None:
        if text_ids.ndim != 1 or text_ids.is_floating_point() or len(text_ids) < length:
            raise ValueError(
                f"text_ids must be one row of at least {length} ids; got {list(text_ids.shape)} of {text_ids.dtype}"
            )
        starts = torch.randint(0, len(text_ids) - length + 1, (sequences, 1), generator=generator)
        tokens = text_ids.cpu()[starts + torch.arange(length)]
    elif tokens is None:
        tokens = torch.randint(0, vocabulary, (sequences, length), generator=generator)
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise ValueError(f"tokens must be from 0 to {vocabulary - 1}; got {int(tokens.min())} to {int(tokens.max())}")
    return tokens.to(next(model.parameters()).device)


class _Moments:
    """Σ x, Σ x² and the number of summands at every position, for every step of every layer."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, str], tuple[Tensor | int, Tensor | int, Tensor | int]] = {}

    def add(self, layer: int, step: str, x: Tensor) -> None:
        """Adds hidden states x, [batch, length, width]."""
        x = x.float()
        self._keep(layer, step, x.sum(-1).double().sum(0), _squares(x).sum(0), x.shape[0] * x.shape[2])

    def add_attention(self, layer: int, call: AttentionCall) -> None:
        """Adds queries, keys and values of a call; and logits and weights if the logits are q·k alone."""
        for step, x in ((QUERY, call.query), (KEY, call.key), (VALUE, call.value)):
            self.add(layer, step, x.transpose(1, 2).flatten(2))
        others = (call.position_bias, call.others.get("softcap"), call.others.get("s_aux"))
        plain = all(x is None for x in others) and not call.others.get(OWN_LOGITS)
        if plain and (call.scheme is None or call.scheme.silent):
            self._add_logits(layer, call.query, call.key, call.scale, call.mask, call.is_causal)

    def _add_logits(
        self, layer: int, query: Tensor, key: Tensor, scale: float | None, mask: Tensor | None, causal: bool
    ) -> None:
        length = query.shape[2]
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        logits = query.float() * (query.shape[3] ** -0.5 if scale is None else scale) @ key.float().mT
        if mask is None:
            hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1) & causal
        else:
            hidden = ~mask if mask.dtype == torch.bool else mask < 0
        logits.masked_fill_(hidden, 0)
        count = logits.shape[:2].numel() * length - hidden.expand(logits.shape).sum((0, 1, 3))
        self._keep(layer, LOGITS, logits.sum(-1).double().sum((0, 1)), _squares(logits).sum((0, 1)), count)
        together = _squares(logits.masked_fill_(hidden, -math.inf).softmax(-1)).sum((0, 1))
        self._keep(layer, WEIGHTS, 0 * together, together, logits.shape[:2].numel())  # Σ w², not a variance

    def _keep(self, layer: int, step: str, first: Tensor, second: Tensor, count: Tensor | int) -> None:
        a, b, c = self.kept.get((layer, step), (0, 0, 0))
        self.kept[layer, step] = (a + first, b + second, c + count)

    def table(self, layers: int) -> Variances:
        """Returns the variances of all steps that were added."""
        rows = []
        for layer in range(layers):
            for step in STEPS:
                if (layer, step) in self.kept:
                    first, second, count = self.kept[layer, step]
                    values = torch.as_tensor(second / count - (first / count) ** 2)
                    rows.append(VarianceRow(layer + 1, step, MEASURED, tuple(values.tolist())))
        return Variances(tuple(rows))


def _squares(x: Tensor) -> Tensor:
    """Σ x² over the last dimension, without a tensor of squares."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return length.double().square()
