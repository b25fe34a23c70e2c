"""Attribution: the relevance of one output by token, by offset and by position.

A run by the rules of `rules` (attention weights, divisors and gates held) makes an output f a linear function of the
embeddings x_t of the tokens, of the rows e_t of a position table, of vectors u that a scheme adds to values, and of
biases b. With the gradients g of that run, relevance is gradient × input, and it is conserved:

    f = Σ_t R_t + Σ_t T_t + U + B      R_t = x_t·g(x_t)    T_t = e_t·g(e_t)    U = Σ u·g(u)    B = Σ b·g(b)

Position also acts through attention weights. In a second backward pass every head has the weights w⁰ that it would
have without rotation, gain, vectors, bias and temperature, with all else held (`attending`). That gives the relevance
C_t that passes through content alone in all layers, and the rest passed through a positional term at least once:

    R_t = C_t + P_t
    share of position = Σ_t (|P_t| + |T_t|) / Σ_t (|C_t| + |P_t| + |T_t|)          (|U| is added above and below)

A position table also acts on attention weights, through hidden states. The rules hold the weights, so this effect is
in no T_t: for models with a table the share counts what the rows themselves carry.

Similarity of two embeddings: e = Σ_t c_t + constants, where c_t is the part of the embedding that comes from token t.
So e·e' = Σ_s Σ_t c_s·c'_t + …, a relevance for every pair of tokens (Eberle et al. 2020, arXiv 2003.05199).

Every call measures conservation, and raises if the sum differs from the output by more than 1e-4 of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from locant.analysis.attribution import checks, outputs
from locant.analysis.attribution.attending import KINDS, Flow
from locant.analysis.attribution.explaining import (
    Explained,
    Run,
    by_rules,
    conservation,
    explained,
)
from locant.analysis.attribution.outputs import Output, Wanted
from locant.analysis.attribution.relevance import Attribution, Similarity
from locant.analysis.attribution.rules import Linearized
from locant.analysis.attribution.words import words_of
from locant.hf.exclusive import exclusive
from locant.hf.facts import has_decoder
from locant.hf.interrupts import check
from locant.hf.modes import evaluating
from locant.hf.pooling import Pooling

__all__ = ["KINDS", "Attribution", "Flow", "Similarity", "attribute", "similarity"]

Text = str | Tensor | Mapping[str, Any]
"""A text, token ids [1, L], or the arguments of a model as its tokenizer returns them."""
Pool = Callable[[Tensor, Tensor], Tensor]
"""From hidden states [1, L, d] and a mask [1, L] to one vector of length 1."""
TEXTS = ("input_ids", "decoder_input_ids")
"""Arguments of a model that are texts."""
PAIRS_AT_ONCE = 32
"""Tokens whose parts of an embedding are computed in one pass."""


@torch.inference_mode(mode=False)
@torch.enable_grad()
def attribute(
    model: PreTrainedModel, text: Text, *, tokenizer: Any = None, output: Wanted = None, at: int | None = None
) -> Attribution:
    """Returns the relevance of one output by token, by offset and by position.

    text        a string (which needs `tokenizer`), token ids [1, L], or the arguments of the model: of an
                encoder-decoder, with decoder_input_ids.
    output      the class, the token of the vocabulary, or (start, end) of an answer; by default what the model itself
                chooses. A function from the model's output to one number explains that number.
    at          the token at which a language model predicts; by default the only [MASK], or the last token.

    The model runs in eval mode and is the same afterwards. It takes two forward and two backward passes, and short runs
    of a few tokens that read the model's positions. NotImplementedError names what has no conserving rule. Other
    threads that analyse the model wait, and those that run it get a RuntimeError.
    """
    checks.check_model(model)
    given = _inputs(model, text, tokenizer)
    texts = _texts(given)
    with exclusive(model), evaluating(model):
        with torch.no_grad():
            plain = model(**given)
        check()
        chosen = outputs.choose(plain, output, at, texts[-1], model, tokenizer)
        value = _number(chosen, plain)
        with by_rules(model, texts) as (mode, run):
            found = model(**given)
            found = _read(mode, output, found) if callable(output) else chosen.read(found)
        return _attribution(run, found, value, chosen.words, texts, tokenizer)


@torch.inference_mode(mode=False)
@torch.enable_grad()
def similarity(
    model: PreTrainedModel, first: Text, second: Text, *, tokenizer: Any = None, pooling: Pool | None = None
) -> Similarity:
    """Returns which tokens, and which pairs of tokens, make the embeddings of two texts similar.

    pooling     makes a vector of length 1 of hidden states and mask; by default their mean (`locant.hf.pooling`).
    """
    checks.check_model(model)
    if has_decoder(model):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; pass its encoder: model.get_encoder()")
    base: Any = model.base_model
    pool = Pooling() if pooling is None else pooling
    if not callable(pool):
        raise TypeError(
            f"pooling must be a function of hidden states and mask, such as locant.hf.pooling.Pooling(('cls',)); got "
            f"{pooling!r}"
        )
    sides = [_inputs(model, text, tokenizer) for text in (first, second)]

    def vector(given: dict[str, Any]) -> Tensor:
        states = base(**given).last_hidden_state
        found = pool(states, given.get("attention_mask", torch.ones_like(given["input_ids"])))
        if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != 1:
            got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"pooling must return one vector for each text, [1, size]; got {got}")
        return found[0]

    with exclusive(model), evaluating(model):
        with torch.no_grad():
            vectors = [vector(given) for given in sides]
        value = float(vectors[0].double() @ vectors[1].double())
        found, parts = [], []
        for given, other in ((sides[0], vectors[1]), (sides[1], vectors[0])):
            texts = _texts(given)
            with by_rules(model, texts) as (_, run):
                mine = vector(given)
            words = "cosine similarity of the two texts"
            found.append(_attribution(run, (mine * other).sum(), value, words, texts, tokenizer))
            parts.append(_parts(run, mine))
    return Similarity(value, found[0], found[1], _pairs(parts, vectors))


def _inputs(model: PreTrainedModel, text: Text, tokenizer: Any) -> dict[str, Any]:
    """The arguments of the model, checked and on its device."""
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError("a text needs a tokenizer: pass tokenizer=, or token ids [1, L] in place of the text")
        if not text.strip():
            raise ValueError("the text is empty; pass one with words")
        given = dict(tokenizer(text, return_tensors="pt", verbose=False))
    elif isinstance(text, Tensor):
        given = {"input_ids": text}
    elif isinstance(text, Mapping) and "input_ids" in text:
        given = dict(text)
    else:
        raise TypeError(f"text must be a string, token ids, or a dict with input_ids; got {type(text).__name__}")
    here = next(model.parameters()).device
    given = {name: x.to(here) if isinstance(x, Tensor) else x for name, x in given.items()}
    checks.check_arguments(given)
    checks.check_ids(model, given["input_ids"])
    if has_decoder(model) and "decoder_input_ids" not in given:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder: pass a dict with input_ids and decoder_input_ids, or "
            f"explain its encoder, model.get_encoder()"
        )
    if has_decoder(model):
        checks.check_ids(model, given["decoder_input_ids"], "decoder_input_ids")
    for name in TEXTS:  # copies: the two texts are told apart by their tensors
        if name in given:
            given[name] = given[name].long().clone()
    return given


def _texts(given: dict[str, Any]) -> list[Tensor]:
    return [given[name] for name in TEXTS if name in given]


def _read(mode: Linearized, function: Callable[[Any], Tensor], found: Any) -> Tensor:
    """The number that a function of the caller makes of the model's output, by the rules."""
    with mode.reading() as held:
        value = function(found)
    if not value.requires_grad and held:
        raise ValueError(
            f"the function passed as output returns a number through {held[-1]}, which the rules hold constant, so no "
            f"relevance passes; return what {held[-1]} is computed from: a logit, or a difference of logits"
        )
    return value


def _number(chosen: Output, found: Any) -> float:
    with torch.no_grad():
        value = chosen.read(found)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"output must be a function that returns one number as a tensor; got {got}")
    if not bool(value.isfinite()):
        raise ValueError("the output of the model is NaN or infinite; check its weights")
    return float(value)


def _attribution(
    run: Run, value: Tensor, expected: float, words: str, texts: list[Tensor], tokenizer: Any
) -> Attribution:
    lengths = [text.shape[1] for text in texts]
    found: Explained = explained(run, value.reshape(()), lengths)
    error = conservation(expected, found)
    return Attribution(
        output=words, value=expected, tokens=words_of(texts, tokenizer), relevance=found.relevance,
        content=found.content, position=found.position, values=found.values, biases=found.biases,
        layers=tuple(found.flows), error=error,
    )  # fmt: skip


def _parts(run: Run, vector: Tensor) -> Tensor:
    """[L, d]: the part of an embedding that comes from each token.

    The embedding is linear in the tokens, e = Σ_t J_t x_t. Its gradient by x in the direction u is Jᵀu, which is linear
    in u, and the gradient of that by u, in the direction of x_t alone, is J_t x_t.
    """
    leaves = [leaf for _, leaf in run.tokens]
    direction = torch.zeros_like(vector, requires_grad=True)
    backwards = torch.autograd.grad(vector, leaves, direction, create_graph=True, allow_unused=True)
    length, rows = leaves[0].shape[1], []
    for start in range(0, length, PAIRS_AT_ONCE):
        chosen = range(start, min(start + PAIRS_AT_ONCE, length))
        total = torch.zeros(len(chosen), len(vector), dtype=torch.float64)
        for leaf, backward in zip(leaves, backwards, strict=True):
            if backward is None:
                continue
            alone = torch.stack([_only(leaf.detach(), at) for at in chosen])
            (part,) = torch.autograd.grad(backward, direction, alone, is_grads_batched=True, retain_graph=True)
            total += part.detach().double().cpu()
        rows.append(total)
    return torch.cat(rows)


def _only(x: Tensor, at: int) -> Tensor:
    """[1, L, width] with nothing but one token."""
    found = torch.zeros_like(x)
    found[:, at] = x[:, at]
    return found


def _pairs(parts: list[Tensor], vectors: list[Tensor]) -> Tensor:
    """The products of all parts of two embeddings; the last part is what tokens do not explain."""
    whole = []
    for part, vector in zip(parts, vectors, strict=True):
        rest = vector.double().cpu() - part.sum(0)
        whole.append(torch.cat([part, rest[None]]))
    return whole[0] @ whole[1].mT
