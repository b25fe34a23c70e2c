"""How one vector is made of the states of a text, as in the module Pooling of sentence-transformers.

    mean                   the mean of all tokens
    cls                    the first token
    lasttoken              the last token
    max                    the maximum of every coordinate
    mean_sqrt_len_tokens   the sum, divided by the root of the number of tokens
    weightedmean           the mean, with weights 1, 2, 3, … by position

Several of them are concatenated. Prompts, which some models leave out of the pooling, are not part of our texts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.hf.sentence_folder import SentenceFolder

OLD_NAMES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Entry of an old config -> mode, in the order in which vectors are concatenated."""
MODES = tuple(OLD_NAMES.values())


@dataclass(frozen=True)
class Pooling:
    """Makes vectors of length 1. States are [B, L, d], masks [B, L] with 1 for tokens and 0 for padding.

    A long text is read in windows (windows.py). `of_tokens` is computed in each window and `of_text` on the joined
    result. So a text that is read in windows gets the mean of their vectors for `cls` and `lasttoken`, and the same
    vector as without windows for the other modes.
    """

    modes: tuple[str, ...] = ("mean",)
    origin: str = "assumed: the model has no modules.json"

    def __str__(self) -> str:
        return "+".join(self.modes)

    @property
    def of_one_token(self) -> bool:
        """Whether the vector depends on which token is the first or last."""
        return any(mode in PICKED for mode in self.modes)

    def of_tokens(self, states: Tensor, mask: Tensor) -> Tensor:
        """Returns what each token contributes, [B, L, modes · d]: its state, or that of the token that is picked."""
        parts = [PICKED[mode](states, mask)[:, None].expand_as(states) if mode in PICKED else states
                 for mode in self.modes]  # fmt: skip
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def of_text(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Returns the vectors [B, modes · d] of texts from the result of `of_tokens`."""
        parts = zip(self.modes, tokens.chunk(len(self.modes), dim=-1), strict=True)
        return F.normalize(torch.cat([REDUCED.get(mode, _mean)(part, mask) for mode, part in parts], dim=-1), dim=-1)

    def __call__(self, states: Tensor, mask: Tensor) -> Tensor:
        """Returns the vectors [B, modes · d] of texts that were read at once."""
        return self.of_text(self.of_tokens(states, mask), mask)


def pooling_of(source: SentenceFolder | None, wanted: str | None = None) -> Pooling:
    """Returns the pooling of a model: that of its folder, else the wanted one, else the mean.

    Raises ValueError if the folder makes its vectors in a way that is not known here, or not as wanted.
    """
    chosen = None if wanted is None else Pooling((wanted,), "chosen by the caller")
    if wanted is not None and wanted not in MODES:
        raise ValueError(f"pooling must be one of {', '.join(MODES)}, got {wanted!r}")
    if source is None:
        return chosen or Pooling()
    if source.kinds[1:2] == ["Pooling"]:
        own = Pooling(_modes(source), f"as in modules.json of {source.name}")
        if chosen is not None and chosen.modes != own.modes:
            raise ValueError(f"{source.name} pools by {own}, got pooling={wanted!r}; leave pooling out")
        return own
    if chosen is None:
        raise ValueError(
            f"{source.name} makes its vectors with {', '.join(source.kinds)}, which locant does not know how to pool; "
            f"pass pooling, one of {', '.join(MODES)}"
        )
    return chosen


def _modes(source: SentenceFolder) -> tuple[str, ...]:
    """The modes in the config of the module Pooling, in the present or the old form."""
    settings = source.settings("Pooling")
    named = settings.get("pooling_mode")
    if named is None:
        wrong = [key for key, on in settings.items() if key.startswith("pooling_mode_") and on and key not in OLD_NAMES]
        named = [*(mode for key, mode in OLD_NAMES.items() if settings.get(key)), *wrong] or ["mean"]
    found = (named,) if isinstance(named, str) else tuple(named)
    unknown = [mode for mode in found if mode not in MODES]
    if unknown:
        raise ValueError(
            f"{source.name} pools by {', '.join(map(str, unknown))}; locant knows {', '.join(MODES)}. Its vectors "
            f"cannot be compared"
        )
    return found


def _first(states: Tensor, mask: Tensor) -> Tensor:
    return states[torch.arange(len(states), device=states.device), mask.int().argmax(1)]


def _last(states: Tensor, mask: Tensor) -> Tensor:
    last = mask.shape[1] - 1 - mask.int().flip(1).argmax(1)
    return states[torch.arange(len(states), device=states.device), last]


def _mean(tokens: Tensor, mask: Tensor) -> Tensor:
    weights = mask[..., None].to(tokens.dtype)
    return (tokens * weights).sum(1) / weights.sum(1)


def _weighted_mean(tokens: Tensor, mask: Tensor) -> Tensor:
    weights = (mask.cumsum(1) * mask)[..., None].to(tokens.dtype)
    return (tokens * weights).sum(1) / weights.sum(1)


def _maximum(tokens: Tensor, mask: Tensor) -> Tensor:
    return tokens.masked_fill(mask[..., None] == 0, -torch.inf).amax(1)


def _mean_by_root(tokens: Tensor, mask: Tensor) -> Tensor:
    return _mean(tokens, mask) * mask.sum(1, keepdim=True).to(tokens.dtype).sqrt()


Reduction = Callable[[Tensor, Tensor], Any]
PICKED: dict[str, Reduction] = {"cls": _first, "lasttoken": _last}
"""Modes that take the state of one token."""
REDUCED: dict[str, Reduction] = {"max": _maximum, "weightedmean": _weighted_mean, "mean_sqrt_len_tokens": _mean_by_root}
"""How the contributions of tokens are combined, where it is not their mean."""
