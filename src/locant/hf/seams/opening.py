"""`Opening`: the methods of one attention class that a seam replaces, and `seam`, which makes a seam of openings.

Classes are named, not imported: a model of one family must not import the modeling files of all the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from locant.hf import interface
from locant.hf.call import OWN_LOGITS, AttentionFunction
from locant.hf.family import Seam
from locant.hf.methods import replace_method

MODELS = "transformers.models."


def always(module: nn.Module) -> bool:
    """Attention is causal."""
    return True


def never(module: nn.Module) -> bool:
    """Attention goes both ways."""
    return False


def if_decoder(module: nn.Module) -> bool:
    """Attention is causal if the model was built as a decoder."""
    return bool(module.is_decoder)


@dataclass(frozen=True)
class Opening:
    """The methods that replace those of an attention class. They are at the top of a module, for pickle."""

    attention: str
    """The class below `transformers.models`: "gptj.modeling_gptj.GPTJAttention". Its subclasses count too."""
    methods: Mapping[str, Callable[..., Any]]
    causal: Callable[[nn.Module], bool] | None = None
    """None: the class sets `is_causal` itself."""

    def fits(self, module: nn.Module) -> bool:
        """Whether a module is of this class."""
        return any(f"{cls.__module__}.{cls.__name__}" == MODELS + self.attention for cls in type(module).__mro__)


def seam(*openings: Opening) -> Seam:
    """Returns the seam that replaces these methods."""
    return Seam(partial(_open, openings), partial(_close, openings))


def _open(openings: tuple[Opening, ...], base: nn.Module) -> None:
    for module in base.modules():
        for opening in openings:
            if opening.fits(module):
                for name, function in opening.methods.items():
                    replace_method(module, name, function)
                if opening.causal is not None:
                    module.__dict__["is_causal"] = opening.causal(module)


def _close(openings: tuple[Opening, ...], base: nn.Module) -> None:
    for module in base.modules():
        for opening in openings:
            if opening.fits(module):
                for name in opening.methods:
                    module.__dict__.pop(name, None)
                if opening.causal is not None:
                    module.__dict__.pop("is_causal", None)


def is_swapped(module: nn.Module) -> bool:
    """Whether an attention module has a scheme. If not, its seam must compute what the original does."""
    return interface.scheme_of(module) is not None


def call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float,
    dropout: nn.Dropout | float, own: AttentionFunction, output_attentions: bool = False,
    position_bias: Tensor | None = None, own_logits: bool = False, is_causal: bool | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Calls `interface.attention`: the output [B, Lq, H, D], and the weights if they are wanted.

    query, key, value   [B, H, L, D]
    mask                bool where the module is swapped; as the model made it otherwise.
    own                 what the original computes, for a module that is not swapped.
    position_bias       what the original adds to the logits; a scheme takes its place.
    own_logits          the logits of the original are not scaling·q·k under this mask; observers find it in `others`.
    is_causal           for a class whose attention is causal in some calls; None: the module says so.
    """
    rate = dropout if isinstance(dropout, float) else dropout.p
    given: dict[str, Any] = {"output_attentions": output_attentions}
    if is_swapped(module):
        query, key = query.to(value.dtype), key.to(value.dtype)  # some models compute the product in float32
    else:
        given |= {"transformers_attention": own, OWN_LOGITS: own_logits}
    return interface.attention(
        module, query, key, value, mask, scaling=scaling, dropout=rate if module.training else 0.0,
        position_bias=position_bias, is_causal=is_causal, **given,
    )  # fmt: skip


def additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Returns a bool mask as the numbers that transformers adds to logits; other masks as they are.

    The masks of a swapped model are bool. Its cross-attention, which has no scheme, still adds them.
    """
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, torch.finfo(like.dtype).min)
