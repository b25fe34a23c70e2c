"""The seam: transformers calls `attention` for every self-attention of a swapped model, in place of its own.

`attention` is registered in transformers' AttentionInterface. It attends with the scheme that is attached to the
attention module as its submodule `locant`, at the positions that `following` passes as a keyword argument. Observers
(`listening`) run before and after every call.

`observed` makes an attention implementation of transformers with observers, for models that are not swapped. It
computes what the original implementation does, to the last bit.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from locant.attention import attend
from locant.hf.call import AttentionCall, AttentionFunction, Positions
from locant.hf.carrying import carried
from locant.hf.listening import observers
from locant.hf.states import held
from locant.schemes import Scheme

NAME = "locant"
"""Name of the attention implementation, of the submodule that holds the scheme, and of the entry in the config."""
ARGUMENT = "locant_positions"
"""Keyword argument that carries the positions from a stack to its attention modules."""
EMBED = "locant_embed"
"""Submodule of a stack: absolute positions for a model that has no place for them."""
CAUSAL = "locant_causal"
"""Attribute of an attention module of a swapped model: whether it is causal. Not every module says so itself."""
HIDDEN = -1e4
"""A number that models add to a logit to hide a key; most add the least of their dtype."""
OWNER = "locant_owner"
"""Attribute of an attention module that shares the scheme of another module: that other module."""

ADDITIVE_MASKS = {"mpt", "nllb-moe"}
"""Families whose own code computes with masks of numbers, 0 = may attend: before it calls the attention, or in the
router of its experts."""


def register() -> None:
    """Registers `attention` with transformers."""
    AttentionInterface.register(NAME, attention)
    # Without a mask function of the same name transformers would silently ignore padding.
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
    """Makes the mask of a swapped model: bool, True = may attend; None where `is_causal` says enough."""
    make = eager_mask if getattr(config, "model_type", None) in ADDITIVE_MASKS else sdpa_mask
    return make(*args, config=config, **kwargs)


def is_ours(implementation: str | None) -> bool:
    """Whether an attention implementation, by its name, goes through the seam."""
    return implementation is not None and implementation.partition(":")[0] == NAME


def original(implementation: str | None) -> str | None:
    """Returns the name of the implementation that `observed` was given; other names as they are."""
    ours, _, name = (implementation or "").partition(":")
    return name if ours == NAME and name else implementation


def observed(implementation: str) -> str:
    """Returns the name of an attention implementation that computes what another one does, with observers."""
    if is_ours(implementation):
        return implementation
    name = f"{NAME}:{implementation}"
    AttentionInterface.register(name, partial(_observed_attention, implementation))
    masks = AttentionMaskInterface()
    if implementation in masks:  # without a mask function transformers makes no masks; we copy that behaviour
        AttentionMaskInterface.register(name, masks[implementation])
    return name


def _observed_attention(implementation: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    kwargs["transformers_attention"] = _own_attention(implementation, module)
    return attention(module, *args, **kwargs)


def _own_attention(implementation: str, module: nn.Module) -> AttentionFunction:
    """The function the module would call without locant. Each modeling file of transformers has its own "eager"."""
    for cls in type(module).__mro__:
        names = vars(sys.modules[cls.__module__])
        if "eager_attention_forward" in names:
            functions = names.get("ALL_ATTENTION_FUNCTIONS", AttentionInterface())
            found: AttentionFunction = functions.get(implementation, names["eager_attention_forward"])
            return found
    return AttentionInterface().get(implementation, sdpa_attention_forward)  # type: ignore[no-any-return]


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
    transformers_attention: AttentionFunction = sdpa_attention_forward,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes one attention for transformers: the output [B, Lq, H, D], and the weights if they are wanted."""
    scheme = scheme_of(module)
    positions: Positions | None = kwargs.pop(ARGUMENT, None)
    if positions is None and scheme is not None:  # some layers drop arguments that they do not know
        current = carried(module)
        positions = None if current is None else current.positions
    call = AttentionCall(
        module=module,
        query=query,
        key=key,
        value=value,
        mask=attention_mask if scheme is None else _bool_mask(attention_mask),
        scheme=scheme,
        positions=positions,
        is_causal=_is_causal(module) if is_causal is None else is_causal,
        scale=scaling,
        dropout=dropout,
        position_bias=position_bias,
        weights_wanted=bool(kwargs.get("output_attentions")) or (positions is not None and positions.weights),
        others=kwargs,
        transformers_attention=transformers_attention,
        states=held(module, scheme, query.shape[2], key.shape[2]) if scheme is not None and scheme.reads else None,
    )
    present = observers()
    for observer in present:
        call = observer.changed(call)
    out, weights = _compute(call)
    for observer in present:
        if observer.after is not None:
            observer.after(call, out)
    return out, weights


def _is_causal(module: nn.Module) -> bool:
    """Whether attention is causal where no mask says so. The default is that of transformers."""
    return bool(module.__dict__.get(CAUSAL, getattr(module, "is_causal", True)))


def _bool_mask(mask: Tensor | None) -> Tensor | None:
    """A mask as bool, True = may attend. Some models make masks of numbers for the logits: 0, and −10,000 or less."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return mask.bool()
    visible = mask == 0
    if not torch.compiler.is_compiling() and not bool((visible | (mask <= HIDDEN)).all()):
        raise TypeError(
            f"a swapped model takes attention masks that are bool, or whole numbers 0 and 1; got {mask.dtype} of shape "
            f"{list(mask.shape)} with values that are neither 0 nor {HIDDEN:,.0f} or less. Make it bool (True = may "
            f"attend)"
        )
    return visible


def _compute(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    _check_computable(call)
    if call.is_native or (call.is_plain and not call.weights_wanted):
        bias = {} if call.position_bias is None or call.scheme is not None else {"position_bias": call.position_bias}
        return call.transformers_attention(
            call.module, call.query, call.key, call.value, call.mask, dropout=call.dropout, scaling=call.scale,
            is_causal=call.is_causal, **bias, **call.others,
        )  # fmt: skip
    weights: Tensor | None = None
    if call.weights_wanted:
        out, weights = attend(**call.arguments(), dropout=call.dropout, need_weights=True)
    else:
        impl = getattr(call.module, "locant_impl", "auto")
        out = attend(**call.arguments(), dropout=call.dropout, impl=impl)
    return out.transpose(1, 2).contiguous(), weights


def _check_computable(call: AttentionCall) -> None:
    """NotImplementedError if a call would be computed without a part of it."""
    # Such models apply the indices to the mask only if the attention is named "eager" or "sdpa".
    if call.others.get("indices") is not None:
        raise NotImplementedError(
            f"{type(call.module).__name__} attends to a few keys alone (sparse attention, argument indices), which "
            f"locant does not compute; use the model without locant"
        )
    if call.is_native:
        return
    if call.position_bias is not None and call.scheme is None and not call.is_plain:
        raise NotImplementedError(
            f"{type(call.module).__name__} has a position bias beside a softcap or sinks, in an attention that gets no "
            f"scheme; locant cannot compute that. Restore the model with swap(model, 'native')"
        )


def scheme_of(module: nn.Module) -> Scheme | None:
    """Returns the scheme of an attention module; None if it has none."""
    found: Any = getattr(module.__dict__.get(OWNER, module), NAME, None)
    if found is not None and not isinstance(found, Scheme) and hasattr(found, "modules_to_save"):
        # PEFT keeps a module that it trains as a whole beside the original.
        if found.disable_adapters:
            return found.original_module  # type: ignore[no-any-return]
        return found.modules_to_save[found.active_adapter]  # type: ignore[no-any-return]
    return found  # type: ignore[no-any-return]
