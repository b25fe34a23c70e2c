"""The seam: transformers calls us for every self-attention, and we know where its tokens are.

Two things meet here. `attention` is registered in transformers' AttentionInterface; it attends with the scheme that
sits on the attention module as its submodule `locant`. `follow` is for the module that runs the layers (the
"stack"): it works out the positions of queries and keys once per forward and sends them to `attention` as a keyword
argument. As an argument, and not as state of the model, they are still right when gradient checkpointing runs a
layer again, or when two batches are in flight.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from locant.attention import attend
from locant.attention.request import Request, prepare
from locant.schemes import Nope, Scheme

NAME = "locant"
"""Of the attention implementation, of the submodule that holds the scheme, and of the entry in the config."""
ARGUMENT = "locant_positions"
EMBED = "locant_embed"
"""Submodule of a stack: absolute positions for a model that has no place for them."""
FOLLOW = "locant_follow"
OWNER = "locant_owner"
"""On an attention module that shares the scheme of another: that other module."""
UNKNOWN = -1  # how many keys a cache holds, in compiled code


def register() -> None:
    AttentionInterface.register(NAME, attention)
    # Without a mask function of the same name padding would be ignored, without a word.
    AttentionMaskInterface.register(NAME, sdpa_mask)


class Positions(NamedTuple):
    """Where the tokens of one forward are. Without q and k: 0, 1, 2, … in their order, after `past` tokens."""

    q: Tensor | None  # [B or 1, Lq]
    k: Tensor | None  # [B or 1, Lk]: those in the cache, then q
    past: int = 0
    weights: bool = False  # the caller wants the attention weights; not every model passes that on

    def of_queries(self, length: int, device: torch.device) -> Tensor:
        return (torch.arange(length, device=device) + self.past)[None] if self.q is None else self.q


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls in place of its own attention."""
    scheme = scheme_of(module)
    positions: Positions | None = kwargs.pop(ARGUMENT, None)
    if _WATCH:
        _WATCH[-1](module, query, key, positions)
    weights_wanted = bool(kwargs.get("output_attentions")) or (positions is not None and positions.weights)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", False))
    if scheme is not None and attention_mask is not None and attention_mask.dtype != torch.bool:
        if attention_mask.is_floating_point():
            raise TypeError(
                f"a swapped model takes attention masks that are bool or whole numbers 0 and 1, got one of "
                f"{attention_mask.dtype} and shape {list(attention_mask.shape)}; make it bool (True = may attend)"
            )
        attention_mask = attention_mask.bool()
    # Cross-attention is left alone; NoPE is plain attention, but for packed sequences, which positions tell apart.
    numbered = scheme is not None and positions is not None and positions.q is not None
    plain = scheme is None or (type(scheme) is Nope and not (numbered and is_causal and attention_mask is None))
    if plain and not weights_wanted and not (_LISTEN and scheme is not None):
        bias = position_bias if scheme is None else None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
            position_bias=bias, **kwargs,
        )  # fmt: skip
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} uses {name}, which no scheme of locant can be combined with yet"
            )
    lq, lk = query.shape[2], key.shape[2]
    causal = is_causal and attention_mask is None and lq > 1
    if causal and lk > lq:  # a static cache before its first use: the keys that follow do not exist yet
        key, value, lk = key[:, :, :lq], value[:, :, :lq], lq
    q_pos, k_pos = _places(module, positions, lq, lk, query.device) if scheme is not None else (None, None)
    if scheme is None and lq > lk:  # cross-attention: no scheme will look at them, but there must be positions
        q_pos, k_pos = torch.arange(lq, device=query.device), torch.arange(lk, device=query.device)
    if causal and q_pos is not None:  # by index, whatever the positions are: that is what no mask means
        attention_mask = torch.ones(lq, lk, dtype=torch.bool, device=query.device).tril()[None, None]
        # Positions that go back to the first one begin another sequence of a pack. Transformers sees that too, but not
        # when there is a cache.
        again = (q_pos.diff(dim=-1) < 0) & (q_pos[:, 1:] == q_pos[:, :1])
        begins = torch.nn.functional.pad(again, (1, 0)).cumsum(-1)
        attention_mask = attention_mask & (begins[:, None, :, None] == begins[:, None, None, :])
        causal = False
    if attention_mask is not None:
        attention_mask = attention_mask[..., :lk]
    where: dict[str, Any] = {"q_pos": q_pos, "k_pos": k_pos, "mask": attention_mask, "causal": causal}
    weights: Tensor | None = None
    if _LISTEN and scheme is not None:
        _LISTEN[-1](module, prepare(query, key, value, scheme, scale=scaling, **where))
    if weights_wanted:
        out, weights = attend(query, key, value, scheme, scale=scaling, dropout=dropout, need_weights=True, **where)
    else:
        impl = getattr(module, "locant_impl", "auto")
        out = attend(query, key, value, scheme, scale=scaling, dropout=dropout, impl=impl, **where)
    return out.transpose(1, 2).contiguous(), weights


def scheme_of(module: nn.Module) -> Scheme | None:
    found: Any = getattr(module.__dict__.get(OWNER, module), NAME, None)
    if found is not None and not isinstance(found, Scheme) and hasattr(found, "modules_to_save"):
        # PEFT keeps a module that it trains as a whole beside the original.
        if found.disable_adapters:
            return found.original_module  # type: ignore[no-any-return]
        return found.modules_to_save[found.active_adapter]  # type: ignore[no-any-return]
    return found  # type: ignore[no-any-return]


def _places(
    module: nn.Module, positions: Positions | None, lq: int, lk: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """q_pos and k_pos for `attend`; None where its own default is right."""
    if positions is None:
        raise RuntimeError(
            f"{type(module).__name__} was called outside the model it belongs to: where its tokens are is not known"
        )
    q, k, past, _ = positions
    if past == UNKNOWN and k is not None:
        k = k + torch.arange(lk, device=device)
    if q is None or k is None:
        if lk == past + lq and not _STRETCH:
            return None, None
        first = max(past + lq - lk, 0)  # a sliding cache has dropped the keys before
        last = min(past + lq, first + lk)
        q, k = torch.arange(past, past + lq, device=device)[None], torch.arange(first, last, device=device)[None]
    known = k.shape[-1]
    # A sliding cache has the last keys only; a static one has empty places at the end, which are masked.
    k = k[:, known - lk :] if lk <= known else torch.cat([k, k[:, -1:].expand(-1, lk - known)], dim=-1)
    return (q * _STRETCH[-1], k * _STRETCH[-1]) if _STRETCH else (q, k)


Count = Callable[[nn.Module, Mapping[str, Any], Any], "Tensor | None"]
"""How a model numbers tokens that nobody numbered: (stack, arguments, cached tokens) -> ids, or None for 0, 1, 2, …"""


def follow(stack: nn.Module, *, count: Count, shift: int) -> None:
    """Makes a stack, a module that runs layers, send the positions of its tokens to every attention below it.

    `shift` is what the caller's position_ids begin at (2 for RoBERTa). The stack gets a `forward` of its own, and not a
    hook: some callers (sentence-transformers) call `forward` directly, where hooks do not run.
    """
    names = tuple(inspect.signature(stack.forward).parameters)
    stack.__dict__[FOLLOW] = (names, count, shift, stack.__dict__.get("forward"))

    # It gets the module it runs on and keeps none of its own, so that a deep copy of a model is whole.
    @wraps(type(stack).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run(self, args, kwargs)

    stack.__dict__["forward"] = MethodType(forward, stack)


def unfollow(stack: nn.Module) -> None:
    if FOLLOW in stack.__dict__:
        before = stack.__dict__.pop(FOLLOW)[3]
        del stack.__dict__["forward"]
        if before is not None:
            stack.__dict__["forward"] = before


def _run(stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names, count, shift, before = stack.__dict__[FOLLOW]
    config: Any = stack.config
    if config._attn_implementation != NAME:
        raise RuntimeError(
            f"the attention of this swapped model was set to {config._attn_implementation!r}, which would not use its "
            f"scheme; call set_attn_implementation({NAME!r}), or swap(model, 'native') first"
        )
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    wanted = given.get("output_attentions", getattr(stack.config, "output_attentions", False))
    positions = _positions(stack, given, count, shift)._replace(weights=bool(wanted))
    given[ARGUMENT] = positions
    embed = getattr(stack, EMBED, None)
    if embed is not None:  # a model without a place for absolute positions: added to the token embeddings here
        tokens = given.get("inputs_embeds")
        if tokens is None:
            tokens = stack.get_input_embeddings()(given["input_ids"])  # type: ignore[operator]
        added = embed.embed(positions.of_queries(tokens.shape[1], tokens.device))
        given["inputs_embeds"], given["input_ids"] = tokens + added.to(tokens.dtype), None
    _grow_buffers(stack, given, positions, shift)
    output = before(**given) if before is not None else type(stack).forward(stack, **given)
    if positions.k is not None and positions.past != UNKNOWN:
        values = output if isinstance(output, tuple) else (getattr(output, "past_key_values", None),)
        for cache in (given.get("past_key_values"), *values):
            if isinstance(cache, Cache):
                _remember(cache, positions.k)  # the next step must know where these keys are
    return output


def _remember(cache: Any, positions: Tensor) -> None:
    cache.locant_positions = positions
    if positions.shape[0] > 1:  # what happens to the rows of the cache must happen to them
        for name, change in (("reorder_cache", _reorder), ("batch_select_indices", _select)):
            cache.__dict__[name] = MethodType(change, cache)


def _reorder(cache: Any, rows: Tensor) -> None:
    type(cache).reorder_cache(cache, rows)
    cache.locant_positions = cache.locant_positions.index_select(0, rows.to(cache.locant_positions.device))


def _select(cache: Any, rows: Tensor) -> None:
    type(cache).batch_select_indices(cache, rows)
    cache.locant_positions = cache.locant_positions[rows]


def _positions(stack: nn.Module, given: Mapping[str, Any], count: Count, shift: int) -> Positions:
    cache = given.get("past_key_values")
    past = 0 if cache is None else cache.get_seq_length()
    if isinstance(past, Tensor) and not torch.compiler.is_compiling():
        past = int(past)
    stored = getattr(cache, "locant_positions", None)
    ids = given.get("position_ids")
    if ids is not None:
        if ids.ndim > 2:
            raise NotImplementedError(
                f"position_ids of a swapped model must be [batch, length], got {list(ids.shape)}: "
                f"positions in several dimensions are not supported"
            )
        ids = ids.reshape(-1, ids.shape[-1]) - shift
    else:
        ids = count(stack, given, past)
        if ids is None:
            if stored is None and not isinstance(past, Tensor):
                return Positions(None, None, past)
            tokens = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
            ids = (torch.arange(tokens.shape[1], device=tokens.device) + past)[None]
    if isinstance(past, Tensor):  # a static cache in a compiled model: key j is taken to be j places from the first
        return Positions(ids, ids[:, :1] - past, UNKNOWN)
    if past == 0:
        return Positions(ids, ids)
    if stored is None:  # nobody numbered the cached keys: they are 0, 1, 2, …
        stored = torch.arange(past, device=ids.device)[None]
    return Positions(ids, _joined(stored, ids, past))


def _joined(stored: Tensor, ids: Tensor, past: int) -> Tensor:
    """Positions of the cached keys, then of the new tokens."""
    before = stored[:, :past]  # assisted decoding may have cropped the cache
    rows = max(before.shape[0], ids.shape[0])
    if rows % before.shape[0]:
        raise RuntimeError(
            f"the cache holds {before.shape[0]} sequences and the batch has {ids.shape[0]}: "
            f"the positions of the cached keys are not known; start with a new cache"
        )
    before = before.repeat_interleave(rows // before.shape[0], dim=0)  # beams of one prompt share its positions
    return torch.cat([before, ids.expand(rows, -1)], dim=-1)


def _grow_buffers(module: nn.Module, given: Mapping[str, Any], positions: Positions, shift: int) -> None:
    """BERT-like embeddings keep position_ids and token_type_ids up to the old maximum; longer inputs need more."""
    embeddings = getattr(module, "embeddings", None)
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if embeddings is None or tokens is None:
        return
    needed = positions.past + tokens.shape[1] + shift
    if positions.q is not None and not torch.compiler.is_compiling():  # positions may lie further apart than tokens
        needed = max(needed, int(positions.q.max()) + shift + 1)
    for name in ("position_ids", "token_type_ids"):
        buffer = getattr(embeddings, name, None)
        if isinstance(buffer, Tensor) and buffer.shape[-1] < needed:
            grown = (
                torch.arange(2 * needed, device=buffer.device)
                if name == "position_ids"
                else buffer.new_zeros(2 * needed)
            )
            setattr(embeddings, name, grown[None].to(buffer.dtype))


# ---- for the probe of `swap`: what was called, with what, and positions made up ---------------------

Record = Callable[[nn.Module, Tensor, Tensor, "Positions | None"], None]
Listen = Callable[[nn.Module, Request], None]
_WATCH: list[Record] = []
_LISTEN: list[Listen] = []
_STRETCH: list[int] = []


@contextmanager
def watched(record: Record) -> Iterator[None]:
    """Calls `record` at every attention."""
    _WATCH.append(record)
    try:
        yield
    finally:
        _WATCH.pop()


@contextmanager
def listening(listen: Listen) -> Iterator[None]:
    """Calls `listen` with everything attention is about to compute, at every self-attention of a swapped model."""
    _LISTEN.append(listen)
    try:
        yield
    finally:
        _LISTEN.pop()


@contextmanager
def stretched(factor: int) -> Iterator[None]:
    """Attention sees every position multiplied by `factor`."""
    _STRETCH.append(factor)
    try:
        yield
    finally:
        _STRETCH.pop()
