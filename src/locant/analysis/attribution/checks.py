"""Models and texts that cannot be explained, refused in words before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationMethod

from locant.hf.facts import limits
from locant.hf.running import vocabulary


def check_model(model: PreTrainedModel) -> None:
    """Raises TypeError or ValueError for a model that cannot be explained."""
    if any("_orig_mod" in part._modules for part in _modules(model)) or _compiled(model):
        raise TypeError("the model is compiled, and its parts cannot be observed; explain the model before compile")
    if not isinstance(model, PreTrainedModel):
        hint = "; pass its transformer: model[0].auto_model" if type(model).__name__ == "SentenceTransformer" else ""
        raise TypeError(f"attribution takes a model of transformers, got {type(model).__name__}{hint}")
    if getattr(model.base_model, "main_input_name", "input_ids") != "input_ids":
        raise ValueError(f"{type(model).__name__} does not read tokens; attribution is for models of text")
    method = getattr(model, "quantization_method", None)
    quantized = getattr(model, "is_quantized", False) and method != QuantizationMethod.GGUF
    packed = any("quantized" in type(part).__module__ for part in model.modules())
    whole = any(not parameter.is_floating_point() for parameter in model.parameters())
    if quantized or packed or whole:
        raise ValueError(
            f"the weights of the model are quantised{f' ({method})' if method else ''}, and rounding has no gradient; "
            f"load the model in floating point"
        )
    narrow = next((x.dtype for x in model.parameters() if x.dtype not in (torch.float32, torch.float64)), None)
    if narrow is not None:
        raise ValueError(
            f"the model is in {narrow}, in which relevance cannot add up to the output; use model.float() first"
        )


def _modules(model: Any) -> Iterator[nn.Module]:
    return model.modules() if isinstance(model, nn.Module) else iter(())


def _compiled(model: Any) -> bool:
    return any(getattr(part, "_compiled_call_impl", None) is not None for part in _modules(model))


def check_ids(model: PreTrainedModel, ids: Tensor) -> None:
    """Raises ValueError unless ids are one text that the model can read."""
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[0] != 1 or ids.is_floating_point():
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"attribution explains one text: integers [1, tokens]; got {got}")
    if ids.shape[1] < 1:
        raise ValueError("the text has no tokens; pass a longer one")
    size = vocabulary(model.base_model)
    if int(ids.min()) < 0 or int(ids.max()) >= size:
        raise ValueError(f"token ids must be in 0 … {size - 1}; got {int(ids.min())} … {int(ids.max())}")
    longest = limits(model).positions
    if longest is not None and ids.shape[1] > longest:
        raise ValueError(
            f"the text has {ids.shape[1]} tokens, and the model reads at most {longest}; pass a shorter text"
        )


@contextmanager
def unchanged_by_hooks(model: nn.Module) -> Iterator[None]:
    """Raises ValueError if a hook of the model changes an input or an output while the block lasts."""
    wrapped: list[tuple[dict[int, Any], int, Any]] = []

    def guarded(owner: nn.Module, hook: Callable[..., Any], what: int) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            found = hook(*args, **kwargs)
            if found is not None and found is not args[what] and not _same(found, args[what]):
                name = getattr(hook, "__qualname__", type(hook).__name__)
                raise ValueError(
                    f"a hook of {type(owner).__name__} ({name}) changes what the module computes, and relevance "
                    f"cannot be followed through it; remove the hook first"
                )
            return found

        return run

    try:
        for module in model.modules():
            for hooks, what in ((module._forward_pre_hooks, 1), (module._forward_hooks, -1)):
                for key, hook in list(hooks.items()):
                    wrapped.append((hooks, key, hook))
                    hooks[key] = guarded(module, hook, what)
        yield
    finally:
        for hooks, key, hook in wrapped:
            if key in hooks:
                hooks[key] = hook


def _same(a: Any, b: Any) -> bool:
    """Whether a hook returned what it was given: the same objects, perhaps in a new tuple."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return a is b
