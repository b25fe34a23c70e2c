"""Which number of a model is explained: a logit, a span, or a number of the caller's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch import Tensor

Wanted = int | tuple[int, int] | Callable[[Any], Tensor] | None
"""A class or token, a span (start, end), a function of the model's output, or None for the model's own choice."""


@dataclass(frozen=True)
class Output:
    """A number of the model's output, and its name in words."""

    read: Callable[[Any], Tensor]
    words: str


def choose(found: Any, wanted: Wanted, at: int | None, ids: Tensor, model: Any, tokenizer: Any) -> Output:
    """Returns the number to explain, from the outputs of a plain run. ValueError for an index out of range."""
    if callable(wanted):
        if at is not None:
            raise ValueError("at is for logits, and output is a function; leave at out, and choose in the function")
        return Output(wanted, "the output of a function of the caller")
    if wanted is not None and not isinstance(wanted, (Integral, tuple)):
        raise ValueError(
            f"output must be a whole number, a span (start, end), or a function; got {type(wanted).__name__} {wanted!r}"
        )
    if getattr(found, "start_logits", None) is not None:
        if at is not None:
            raise ValueError("at is for models with logits at every token; choose a span with output=(start, end)")
        return _span(found, wanted)
    logits = getattr(found, "logits", None)
    others = [name for name in (found.keys() if hasattr(found, "keys") else ()) if name.endswith("logits")]
    if logits is None and others:
        raise ValueError(
            f"{type(model).__name__} returns {' and '.join(others)}; choose one number of them with output=, such as "
            f"output=lambda out: out.{others[0]}[0, 0, 0]"
        )
    if logits is None:
        raise ValueError(
            f"{type(model).__name__} has no logits to explain; use similarity(model, first, second) for the embeddings "
            f"of two texts, or pass output=, a function from the model's output to one number"
        )
    if isinstance(wanted, tuple):
        raise ValueError(
            f"a span needs a model that answers questions; {type(model).__name__} has logits: pass a number"
        )
    if logits.ndim == 2:
        return _class(logits, wanted, at, model)
    return _token(logits, wanted, at, ids, model, tokenizer)


def _class(logits: Tensor, wanted: int | None, at: int | None, model: Any) -> Output:
    if at is not None:
        raise ValueError("at is for models with logits at every token; this one has one row of logits: leave at out")
    count = logits.shape[-1]
    label = int(logits[0].argmax()) if wanted is None else _in_range("output", wanted, count, "classes")
    named = getattr(model.config, "id2label", None) or {}
    return Output(lambda out: out.logits[0, label], f"logit of class {label} ({named.get(label, label)})")


def _token(
    logits: Tensor, wanted: int | None, at: int | None, ids: Tensor, model: Any, tokenizer: Any
) -> Output:  # fmt: skip
    length, count = logits.shape[1:3]
    masked = getattr(tokenizer, "mask_token_id", None)
    if at is None and masked is not None and ids.shape[1] == length and int((ids[0] == masked).sum()) == 1:
        at = int((ids[0] == masked).int().argmax())
    place = length - 1 if at is None else _in_range("at", at, length, "tokens")
    token = int(logits[0, place].argmax()) if wanted is None else _in_range("output", wanted, count, "logits")
    if model.get_output_embeddings() is None:  # every token has a class
        named = (getattr(model.config, "id2label", None) or {}).get(token, token)
        return Output(lambda out: out.logits[0, place, token], f"logit of class {token} ({named}) at position {place}")
    word = "" if tokenizer is None else f" ({tokenizer.decode([token])!r})"
    return Output(lambda out: out.logits[0, place, token], f"logit of token {token}{word} at position {place}")


def _span(found: Any, wanted: int | tuple[int, int] | None) -> Output:
    starts, ends = found.start_logits[0], found.end_logits[0]
    if isinstance(wanted, (int, Integral)):
        raise ValueError(f"an answer is a span: pass output=(start, end), or leave it out; got {wanted}")
    if wanted is None:
        both = (starts[:, None] + ends[None, :]).triu()
        hidden = both.new_full(both.shape, -float("inf")).tril(-1)
        best = int((both + hidden).argmax())
        first, last = best // len(ends), best % len(ends)
    elif len(wanted) != 2:
        raise ValueError(f"a span is two numbers: pass output=(start, end); got {wanted}")
    else:
        first, last = (_in_range("output", each, len(starts), "tokens") for each in wanted)
        if last < first:
            raise ValueError(f"a span ends at or after its start; got {wanted}")
    return Output(
        lambda out: out.start_logits[0, first] + out.end_logits[0, last],
        f"start and end logits of the span {first} … {last}",
    )


def _in_range(name: str, index: int, count: int, what: str) -> int:
    """The index, counted from the end if it is negative. ValueError if there is no such entry."""
    if not isinstance(index, Integral) or isinstance(index, bool) or not -count <= index < count:
        raise ValueError(f"{name} must be from {-count} to {count - 1}: the model has {count} {what}; got {index!r}")
    return int(index) % count
