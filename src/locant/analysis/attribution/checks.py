"""Models and texts that cannot be explained, refused in words before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedModel

from locant.hf.differentiable import check_differentiable
from locant.hf.facts import limits
from locant.hf.finding import family_of
from locant.hf.plan import plan_of
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
    if getattr(model.config, "return_dict", True) is False:
        raise ValueError("the model's config has return_dict=False; set model.config.return_dict = True")
    if type(model).__name__.endswith("ForMultipleChoice"):
        raise ValueError(
            f"{type(model).__name__} compares several texts at once; attribution explains models of one text"
        )
    check_differentiable(model)
    narrow = next((x.dtype for x in model.parameters() if x.dtype not in (torch.float32, torch.float64)), None)
    if narrow is not None:
        raise ValueError(
            f"the model is in {narrow}, in which relevance cannot add up to the output; use model.float() first"
        )


def _modules(model: Any) -> Iterator[nn.Module]:
    return model.modules() if isinstance(model, nn.Module) else iter(())


def _compiled(model: Any) -> bool:
    return any(getattr(part, "_compiled_call_impl", None) is not None for part in _modules(model))


NOT_TEXT = (
    "past_key_values", "inputs_embeds", "decoder_inputs_embeds", "encoder_outputs", "labels", "start_positions",
    "end_positions",
)  # fmt: skip
"""Arguments of models that relevance by token cannot include, or that change the outputs beside the logits."""


def check_arguments(given: dict[str, Any]) -> None:
    """Raises TypeError or ValueError for arguments of a model that are not part of a text."""
    for name in NOT_TEXT:
        if given.get(name) is not None:
            raise ValueError(f"attribution explains a text from its tokens alone, and got {name}; leave {name} out")
    if given.get("return_dict") is False:
        raise ValueError("attribution reads outputs by their names, and got return_dict=False; leave return_dict out")
    wrong = next((name for name, x in given.items() if isinstance(x, (list, tuple, np.ndarray))), None)
    if wrong is not None:
        raise TypeError(
            f"{wrong} must be a tensor, got {type(given[wrong]).__name__}; call the tokenizer with return_tensors='pt'"
        )
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = given.get(name)
        if mask is not None and not bool(mask.bool().all()):
            raise ValueError(f"the text has padding ({name} has a 0); leave the padding out")


def check_ids(model: PreTrainedModel, ids: Any, name: str = "input_ids") -> None:
    """Raises ValueError unless ids are one text that the model, or its decoder, can read."""
    whole = isinstance(ids, Tensor) and not ids.is_floating_point() and ids.dtype != torch.bool
    if not whole or ids.ndim != 2 or ids.shape[0] != 1:
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"attribution explains one text: {name} must be integers [1, tokens]; got {got}")
    if ids.shape[1] < 1:
        raise ValueError(f"the text has no tokens ({name}); pass a longer one")
    decoder = name != "input_ids"
    where = f" in {name}" if decoder else ""
    size = _decoder_tokens(model) if decoder else vocabulary(model.base_model)
    if int(ids.min()) < 0 or int(ids.max()) >= size:
        raise ValueError(f"token ids must be in 0 … {size - 1}; got {int(ids.min())} … {int(ids.max())}{where}")
    longest = _decoder_positions(model) if decoder else limits(model).positions
    if longest is not None and ids.shape[1] > longest:
        raise ValueError(
            f"the text has {ids.shape[1]} tokens{where}, and the model reads at most {longest}; pass a shorter text"
        )


def _decoder_tokens(model: PreTrainedModel) -> int:
    """How many tokens a decoder knows; FSMT's knows others than its encoder."""
    base: Any = model.base_model
    decoder = base.get_decoder()
    own = getattr(decoder, "embed_tokens", None)
    if isinstance(own, nn.Embedding):
        return own.num_embeddings
    return vocabulary(decoder if isinstance(decoder, PreTrainedModel) else base)


def _decoder_positions(model: PreTrainedModel) -> int | None:
    """How many positions a decoder has; None: any number."""
    plan, family, base = plan_of(model), family_of(model), model.base_model
    found = [] if plan is None else [plan.stacks[-1].max_length()]
    if plan is None or plan.keep_native:
        table = family.mechanism.own_table(base.get_submodule(family.stacks(base)[-1]))
        found.append(None if table is None else table.shape[0])
    return min((limit for limit in found if limit is not None), default=None)


@contextmanager
def unchanged_by_hooks(model: nn.Module) -> Iterator[None]:
    """Raises ValueError if a hook changes an input or an output of a part of the model while the block lasts."""
    wrapped: list[tuple[dict[int, Any], int, Any]] = []
    parts = set(model.modules())

    def guarded(hook: Callable[..., Any], *, before: bool) -> Callable[..., Any]:
        def run(module: nn.Module, *args: Any) -> Any:
            if module not in parts:  # a hook of all modules, and a module of another model
                return hook(module, *args)
            tensors = [(x, x._version) for x in tree_flatten(args)[0] if isinstance(x, Tensor)]
            found = hook(module, *args)
            # Before a module: its arguments, perhaps with those by name. After it: also what it returned.
            given = (args if len(args) == 2 else args[0]) if before else args[-1]
            returned = (found,) if before and found is not None and not isinstance(found, tuple) else found
            in_place = any(x._version != version for x, version in tensors)
            if in_place or (returned is not None and not _same(returned, given)):
                name = getattr(hook, "__qualname__", type(hook).__name__)
                raise ValueError(
                    f"a hook of {type(module).__name__} ({name}) changes what the module computes, and relevance "
                    f"cannot be followed through it; remove the hook first"
                )
            return found

        return run

    everywhere = torch.nn.modules.module
    try:
        for hooks, before in (
            (everywhere._global_forward_pre_hooks, True),
            (everywhere._global_forward_hooks, False),
            *((module._forward_pre_hooks, True) for module in parts),
            *((module._forward_hooks, False) for module in parts),
        ):
            for key, hook in list(hooks.items()):
                wrapped.append((hooks, key, hook))
                hooks[key] = guarded(hook, before=before)
        yield
    finally:
        for hooks, key, hook in wrapped:
            if key in hooks:
                hooks[key] = hook


def _same(a: Any, b: Any) -> bool:
    """Whether a hook returned what it was given: the same objects, perhaps in a new tuple or dict."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if type(a) is dict and type(b) is dict:
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return a is b
