"""The positions of cached keys, stored on the cache object.

After a right-padded prompt the next token does not follow the padding, so positions cannot be inferred from the number
of cached keys. A dynamic cache gets a tensor [B, keys] that grows with it. A static cache gets a tensor with one column
for each of its places, written in place: compiled code knows the number of cached keys only as a tensor, and needs a
buffer that stays where it is.

Operations that rearrange the rows of a cache (beam search) rearrange its positions too, and `crop` crops them. If keys
were dropped in any other way, nothing says which, and the next pass raises RuntimeError.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from locant.hf.call import Positions
from locant.hf.methods import replace_method
from locant.schemes.base import readable

STORED = "locant_positions"
"""Attribute of a cache: the positions of its keys, [B or 1, keys]; for a static cache [B, places]."""
READ = "locant_read"
"""Attribute of a cache: what schemes read from the tokens of its keys, [B, H, keys, W], by attention (`states`)."""


def is_static(cache: Any) -> bool:
    """Whether a cache has a fixed place for every key. One whose layers all slide keeps only the last keys."""
    return isinstance(cache, Cache) and cache.is_compileable and not all(cache.is_sliding)


def with_cached(cache: Any, ids: Tensor, past: int | Tensor, batch: int) -> Positions:
    """Returns the positions of one pass: queries at `ids` [B or 1, L], after `past` cached keys."""
    if is_static(cache):
        return _in_static(cache, ids, past, batch)
    if past == 0:
        return Positions(ids, ids)
    assert isinstance(past, int)
    stored = getattr(cache, STORED, None)
    if stored is None:  # the cached keys had no position_ids: they are 0, 1, 2, …
        stored = torch.arange(past, device=ids.device)[None]
        if readable(ids) and int(ids.min()) > past:
            warnings.warn(
                f"the {past} cached keys had no position_ids, so they are taken to be at 0 … {past - 1}; the next "
                f"token is at {int(ids.min())}. If keys were dropped from the cache, start with a new one, and pass "
                f"position_ids from the first token on",
                stacklevel=2,
            )
    before = stored
    if before.shape[1] != past:
        raise RuntimeError(dropped(past, before.shape[1]))
    rows = max(before.shape[0], ids.shape[0])
    if before.shape[0] not in (1, rows) or ids.shape[0] not in (1, rows):
        raise RuntimeError(
            f"the cache holds {before.shape[0]} sequences and the batch has {ids.shape[0]}: "
            f"cannot match the positions of cached keys to sequences; start with a new cache"
        )
    k = torch.cat([before.expand(rows, -1), ids.expand(rows, -1)], dim=-1)
    return Positions(ids, k, counted=_is_counted(k))


def _is_counted(positions: Tensor) -> bool:
    """Whether the positions [B or 1, L] are 0, 1, 2, … in every row. Reading them on a GPU would take longer than it
    saves."""
    if not positions.is_cpu or not readable(positions):
        return False
    return torch.equal(positions, torch.arange(positions.shape[1]).expand_as(positions))


def dropped(keys: int, known: int) -> str:
    """Returns the words for a cache that does not have as many keys as locant knows of."""
    return (
        f"the cache has {keys} keys, and locant knows of {known}: keys were dropped or added by other means than "
        f"Cache.crop and the swapped model, so the positions of the rest are not known; start with a new cache"
    )


def remember(cache: Any, positions: Tensor) -> None:
    """Stores the positions of all keys of a dynamic cache after a pass: the next one needs them."""
    if isinstance(cache, Cache) and not is_static(cache):
        _store(cache, positions)


def _in_static(cache: Any, ids: Tensor, past: int | Tensor, batch: int) -> Positions:
    stored = getattr(cache, STORED, None)
    if stored is None:  # keys that came before had no position_ids: they are 0, 1, 2, …
        stored = torch.arange(cache.get_max_length(), device=ids.device).repeat(batch, 1)
        if not torch.compiler.is_compiling():  # as for the keys: without it, cudagraphs would copy the buffer
            torch._dynamo.mark_static_address(stored)
        _store(cache, stored)
    length = ids.shape[-1]
    stored.index_copy_(1, torch.arange(length, device=ids.device) + past, ids.expand(batch, -1).to(stored))
    if isinstance(past, Tensor):
        return Positions(ids, stored, cached=past.clone())  # the first layer will increase the cache's own tensor
    return Positions(ids, stored[:, : past + length])


def _store(cache: Any, positions: Tensor) -> None:
    setattr(cache, STORED, positions)
    keep_in_step(cache)


def keep_in_step(cache: Any) -> None:
    """Makes operations that rearrange the rows of a cache, or crop it, do the same to what locant stored on it."""
    if "reorder_cache" in vars(cache):
        return
    for name, change in (
        ("reorder_cache", _reorder),
        ("batch_select_indices", _select),
        ("batch_repeat_interleave", _repeat),
        ("crop", _crop),
    ):
        replace_method(cache, name, change)


def _rearrange(cache: Any, change: Callable[[Tensor], Tensor]) -> None:
    positions = getattr(cache, STORED, None)
    if positions is not None and positions.shape[0] > 1:  # one row serves all sequences
        setattr(cache, STORED, change(positions))
    for module, read in getattr(cache, READ, {}).items():
        getattr(cache, READ)[module] = change(read)


def _reorder(cache: Any, rows: Tensor) -> None:
    type(cache).reorder_cache(cache, rows)
    _rearrange(cache, lambda x: x.index_select(0, rows.to(x.device)))


def _select(cache: Any, rows: Tensor) -> None:
    type(cache).batch_select_indices(cache, rows)
    _rearrange(cache, lambda x: x[rows])


def _crop(cache: Any, *args: Any, **kwargs: Any) -> None:
    before = cache.get_seq_length()
    type(cache).crop(cache, *args, **kwargs)
    gone = before - cache.get_seq_length()
    if gone > 0 and not is_static(cache):
        positions = getattr(cache, STORED, None)
        if positions is not None:
            setattr(cache, STORED, positions[:, : positions.shape[1] - gone])
        for module, read in getattr(cache, READ, {}).items():
            getattr(cache, READ)[module] = read[:, :, : read.shape[2] - gone]


def _repeat(cache: Any, repeats: int) -> None:
    type(cache).batch_repeat_interleave(cache, repeats)
    _rearrange(cache, lambda x: x.repeat_interleave(repeats, dim=0))
