"""Passes token positions from a stack, the module that runs the layers, to its attention modules.

`follow` gives a stack a forward that computes the positions of queries and keys once per pass and passes them to
`interface.attention` as a keyword argument. As an argument, and not as state of the model, they are still right when
gradient checkpointing runs a layer again, or when a second batch starts before the first one's backward pass.

`cached` stores the positions of cached keys. Without position_ids they are 0, 1, 2, … and only a static cache stores
them.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from locant.hf.cached import STORED, is_static, remember, with_cached
from locant.hf.call import Positions
from locant.hf.carrying import CARRIER, Carrier, Pass, bind_checkpointing, unbind_checkpointing
from locant.hf.counting import Count, in_attention
from locant.hf.interface import ARGUMENT, EMBED, NAME
from locant.hf.methods import replace_method

IDS = ("position_ids", "token_type_ids")
"""Arguments for which BERT's embeddings (and Flaubert itself) keep a buffer, up to the old maximum length."""
FOLLOW = "locant_follow"
"""Attribute of a stack whose forward passes positions on."""


@dataclass(frozen=True)
class Following:
    """How a stack numbers its tokens, and what it was before."""

    count: Count
    shift: int  # the number that the caller's position_ids start at (2 for RoBERTa)
    native_count: bool  # left padding is counted if the model counts it; otherwise the first token is at 0
    attention_by_index: bool  # with native_count, attention counts every token
    names: tuple[str, ...]  # of the arguments of its forward
    stored: tuple[str, ...]  # those of IDS that it takes, and reads from a buffer if the caller gives none
    hands_on: bool  # takes any keyword argument, and hands it on to its layers
    before: Any  # a forward that the stack had in place of that of its class


def follow(stack: nn.Module, *, count: Count, shift: int, native_count: bool, attention_by_index: bool) -> None:
    """Makes a stack (a module that runs layers) pass the positions of its tokens to every attention module in it.

    The arguments are those of `Following`. The stack gets a `forward` of its own rather than a hook: some callers
    (sentence-transformers) call `forward` directly, and hooks do not run there.
    """
    parameters = list(inspect.signature(type(stack).forward).parameters.values())[1:]  # without self
    names = tuple(each.name for each in parameters)
    any_named = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    owners = [x for x in (stack, getattr(stack, "embeddings", None)) if isinstance(x, nn.Module)]
    stored = tuple(name for name in IDS if name in names and any(name in owner._buffers for owner in owners))
    stack.__dict__[FOLLOW] = Following(
        count, shift, native_count, attention_by_index, names, stored, any_named, stack.__dict__.get("forward")
    )
    carrier = Carrier()
    for module in stack.modules():
        module.__dict__[CARRIER] = carrier
    replace_method(stack, "forward", _forward)


def unfollow(stack: nn.Module) -> None:
    """Undoes `follow`."""
    if FOLLOW in stack.__dict__:
        unbind_checkpointing(stack)
        for module in stack.modules():
            module.__dict__.pop(CARRIER, None)
        before = stack.__dict__.pop(FOLLOW).before
        del stack.__dict__["forward"]
        if before is not None:
            stack.__dict__["forward"] = before


def _forward(stack: nn.Module, *args: Any, **kwargs: Any) -> Any:
    following: Following = stack.__dict__[FOLLOW]
    config: Any = stack.config
    if config._attn_implementation != NAME:
        raise RuntimeError(
            f"the attention of this swapped model was set to {config._attn_implementation!r}, which ignores its "
            f"scheme; call set_attn_implementation({NAME!r}), or swap(model, 'native') first"
        )
    given = {**dict(zip(following.names, args, strict=False)), **kwargs}
    wanted = given.get("output_attentions")
    if wanted is None:  # models with a head pass None on; the config decides then
        wanted = getattr(config, "output_attentions", False)
    numbers = _numbered(stack, given, following)
    positions = _positions(given, numbers.attention)._replace(weights=bool(wanted))
    if following.hands_on:
        given[ARGUMENT] = positions
    embed = getattr(stack, EMBED, None)
    if embed is not None:  # the model has no place for absolute positions: add them to the token embeddings
        tokens = given.get("inputs_embeds")
        if tokens is None:
            tokens = stack.get_input_embeddings()(given["input_ids"])  # type: ignore[operator]
        given["inputs_embeds"], given["input_ids"] = (
            tokens + _embedded(embed, _places(given, numbers, positions), tokens),
            None,
        )
    if torch.compiler.is_compiling() and following.stored:
        _give_ids(given, numbers, positions, following)
    if not following.native_count and "position_ids" not in following.names:  # T5 has no such argument
        given.pop("position_ids", None)
    _grow_buffers(stack, given, positions, following)
    output = _run(stack, given, Pass(positions, _places(given, numbers, positions)), following)
    if positions.k is not None:
        values = output if isinstance(output, tuple) else (getattr(output, "past_key_values", None),)
        for cache in (given.get("past_key_values"), *values):
            remember(cache, positions.k)
    return output


def _embedded(embed: Any, places: Tensor | None, tokens: Tensor) -> Tensor:
    """What a scheme adds to token embeddings. Tokens without a position get nothing."""
    assert places is not None
    found: Tensor = embed.embed(places.clamp(min=0)) * (places >= 0).unsqueeze(-1)
    return found.to(tokens.dtype)


def _run(stack: nn.Module, given: dict[str, Any], current: Pass, following: Following) -> Any:
    """Runs the stack itself, with the positions both as an argument and carried."""
    bind_checkpointing(stack)
    carrier: Carrier = stack.__dict__[CARRIER]
    token = carrier.put(current)
    try:
        if following.before is not None:
            return following.before(**given)
        return type(stack).forward(stack, **given)
    finally:
        carrier.end(token)


def _cached(given: Mapping[str, Any]) -> Any:
    """The number of cached keys; a tensor in compiled code with a static cache."""
    cache = given.get("past_key_values")
    past = 0 if cache is None else cache.get_seq_length()
    return int(past) if isinstance(past, Tensor) and not torch.compiler.is_compiling() else past


class _Numbers(NamedTuple):
    """The positions of the tokens, [B or 1, L]; None for those that follow the cached keys."""

    attention: Tensor | None
    table: Tensor | None  # below 0: the token has no position


def _numbered(stack: nn.Module, given: dict[str, Any], following: Following) -> _Numbers:
    """Numbers the tokens of a pass.

    If the model would count padding on the left and must not, `given` gets the position_ids that say so.
    """
    past = _cached(given)
    ids: Tensor | None = given.get("position_ids")
    if ids is None:
        ids = following.count(stack, given, past)
        if ids is not None:
            by_index = following.native_count and following.attention_by_index
            return _Numbers(None if by_index else in_attention(ids, past), ids)
        if not following.native_count:
            ids = _from_first_token(given, past)
            if ids is not None:  # no table has rows below 0
                given["position_ids"] = ids.clamp(min=0) + following.shift
        return _Numbers(ids, ids)
    if ids.ndim > 2:
        raise NotImplementedError(
            f"position_ids of a swapped model must be [batch, length], got {list(ids.shape)}: "
            f"positions in several dimensions are not supported"
        )
    ids = ids.reshape(-1, ids.shape[-1]) - following.shift
    _check_first(stack, given, ids, following.shift)
    return _Numbers(ids, ids)


def _check_first(stack: nn.Module, given: Mapping[str, Any], ids: Tensor, shift: int) -> None:
    """Raises if a token that is not padding has a position below the first one. Compiled code cannot look."""
    if not shift or torch.compiler.is_compiling() or not bool((ids < 0).any()):
        return
    mask, tokens = given.get("attention_mask"), given.get("input_ids")
    shown = torch.ones_like(ids, dtype=torch.bool)
    if mask is not None and mask.ndim == 2:
        shown = mask[:, -ids.shape[-1] :].ne(0)
    elif tokens is not None:
        shown = tokens.ne(getattr(stack.config, "pad_token_id", None) or 0)
    if bool(((ids < 0) & shown).any()):
        raise ValueError(
            f"the position_ids of {type(stack).__name__} start at {shift}, and padding has {shift - 1}; got "
            f"{int(ids.min()) + shift} for a token that is not padding. Add {-int(ids.min())} to all of them"
        )


def _places(given: Mapping[str, Any], numbers: _Numbers, positions: Positions) -> Tensor | None:
    """The positions of the tokens for a table, [B or 1, L]; None if there are no tokens, but pixels."""
    tokens = given["input_ids"] if given.get("input_ids") is not None else given.get("inputs_embeds")
    if numbers.table is not None or tokens is None:
        return numbers.table
    return positions.of_queries(tokens.shape[1], tokens.device)


def _from_first_token(given: Mapping[str, Any], past: Any) -> Tensor | None:
    """The positions in a left-padded batch: 0 for the first token that the mask shows, and less before it."""
    mask: Tensor | None = given.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return None
    if not torch.compiler.is_compiling() and bool(mask[:, 0].all()):
        return None  # no padding on the left
    first = mask.ne(0).int().argmax(-1, keepdim=True)
    places: Tensor = torch.arange(_tokens(given).shape[1], device=mask.device) + past - first
    return places


def _positions(given: Mapping[str, Any], ids: Tensor | None) -> Positions:
    cache, past = given.get("past_key_values"), _cached(given)
    if ids is None:
        if getattr(cache, STORED, None) is None and not is_static(cache):
            return Positions(None, None, past)
        tokens = _tokens(given)
        ids = (torch.arange(tokens.shape[1], device=tokens.device) + past)[None]
    return with_cached(cache, ids, past, _tokens(given).shape[0])


def _tokens(given: Mapping[str, Any]) -> Tensor:
    """The input of a stack, [B, L, …]."""
    found: Tensor = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
    return found


def _give_ids(given: dict[str, Any], numbers: _Numbers, positions: Positions, following: Following) -> None:
    """Gives a traced model the ids that it would read from a buffer, whose size would limit the lengths of the graph.

    The buffers hold position_ids 0, 1, 2, … and token_type_ids 0, 0, 0, …
    """
    if given.get("input_ids") is None and given.get("inputs_embeds") is None:  # pixels
        return
    tokens = _tokens(given)
    if "token_type_ids" in following.stored and given.get("token_type_ids") is None:
        given["token_type_ids"] = torch.zeros(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    if "position_ids" in following.stored and given.get("position_ids") is None and numbers.table is None:
        given["position_ids"] = positions.of_queries(tokens.shape[1], tokens.device) + following.shift


def _grow_buffers(module: nn.Module, given: Mapping[str, Any], positions: Positions, following: Following) -> None:
    """Makes the buffers of `IDS` long enough. A traced model does not read those that `_give_ids` gives."""
    traced, shift = torch.compiler.is_compiling(), following.shift
    embeddings = getattr(module, "embeddings", None)
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if embeddings is None or tokens is None:
        return
    needed = shift + (tokens.shape[1] + positions.past if positions.k is None else positions.k.shape[1])
    if positions.q is not None and not traced:  # positions may lie further apart than tokens
        needed = max(needed, int(positions.q.max()) + shift + 1)
    names = [name for name in IDS if not (traced and name in following.stored)]
    for owner, name in itertools.product((embeddings, module), names):
        buffer = getattr(owner, name, None)
        if isinstance(buffer, Tensor) and buffer.shape[-1] < needed:
            grown = (
                torch.arange(2 * needed, device=buffer.device)
                if name == "position_ids"
                else buffer.new_zeros(2 * needed)
            )
            setattr(owner, name, grown[None].to(buffer.dtype))
