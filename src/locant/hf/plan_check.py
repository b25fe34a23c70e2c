"""Checks a plan that was read from config.json: that it is whole, and that it is for the model it is attached to.

A plan with a layer missing would give a model that runs and is wrong. So would another valid scheme in the place of one
without parameters, which no weight contradicts: a digest of the plan is saved with it.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from locant.attention import BACKENDS
from locant.hf.checkpoint import CONFIG, Weights
from locant.hf.finding import family_of
from locant.hf.plan import Attention, Plan, StackPlan
from locant.runs.untrusted import shortened

PLAN: dict[str, Any] = {
    "format": int, "impl": str, "keep_native": bool, "unlearned": bool, "family": dict, "stacks": list, "imports": dict,
    "digest": str,
}  # fmt: skip
STACK: dict[str, Any] = {"path": str, "width": int, "embed": str | None, "native_count": bool, "layers": list}
LAYER: dict[str, Any] = {"module": str, "n_heads": int, "head_dim": int, "scheme": str, "same_as": str}
"""The entries of a plan, of a stack and of a layer, and their types."""
LATER = {"unlearned", "native_count", "family", "imports", "digest"}
"""Entries that older folders, or those of listed families, do not have."""
HEADS = ("num_attention_heads", "swa_num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")
HEAD_DIMS = ("head_dim", "attention_head_size", "key_value_proj_dim")
"""Attributes of attention modules: the size of a head."""


def check_plan(data: Any, weights: Weights | None) -> None:
    """Raises ValueError unless `data` has the form that `Plan.to_config` writes, with sizes that the weights allow."""
    if isinstance(data, dict) and data.get("format") != 1:
        raise ValueError(
            f"this folder was written by a newer locant (format {shortened(data.get('format'))}; this reads 1)"
        )
    _check_entries(data, PLAN, "the plan")
    if data["impl"] != "auto" and data["impl"] not in BACKENDS:
        raise ValueError(
            f"{CONFIG}: impl of the plan is {shortened(data['impl'])}; expected auto, {', '.join(BACKENDS)}"
        )
    schemes: dict[str, str] = {}  # by module
    paths = []
    for number, stack in enumerate(data["stacks"]):
        _check_entries(stack, STACK, f"stack {number}")
        paths.append(stack["path"])
        for index, layer in enumerate(stack["layers"]):
            where = f"layer {index} of stack {number}"
            _check_entries(layer, LAYER, where)
            _check_sizes({**layer, "width": stack["width"]}, weights, where)
            module, owner = layer["module"], layer["same_as"]
            if module in schemes:
                raise ValueError(f"{CONFIG}: the plan has {shortened(module)} twice")
            schemes[module] = layer["scheme"]
            if schemes.get(owner) != layer["scheme"]:
                raise ValueError(
                    f"{CONFIG}: {where} shares the scheme of {shortened(owner)}, which is not an earlier layer with "
                    f"the same scheme"
                )
        if not stack["layers"]:
            raise ValueError(f"{CONFIG}: stack {number} of the plan has no layers")
    if not paths or len(set(paths)) < len(paths):
        raise ValueError(f"{CONFIG}: the plan needs stacks with different paths, got {shortened(paths)}")


def digest_of(data: dict[str, Any]) -> str:
    """Returns a digest of a plan as `Plan.to_config` writes it, without its own entry."""
    rest = {name: value for name, value in data.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16]


def check_digest(written: str | None, data: dict[str, Any]) -> None:
    """Raises ValueError if a plan has changed since it was saved. Folders of an older locant have no digest."""
    if written is not None and written != digest_of(data):
        raise ValueError(
            f"{CONFIG}: the plan is not the one that was saved: the file is damaged, or was edited. Copy the folder "
            f"again, or change the positions of its model with locant.swap; without the entry 'digest' the plan is "
            f"taken as it is"
        )


def _check_entries(data: Any, expected: dict[str, Any], where: str) -> None:
    if not isinstance(data, dict) or not expected.keys() - LATER <= data.keys() <= expected.keys():
        got = f"those of {shortened(sorted(data))}" if isinstance(data, dict) else shortened(data)
        raise ValueError(f"{CONFIG}: {where} must have the entries {', '.join(expected)}; got {got}")
    for name, value in data.items():
        kind = expected[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            wanted = getattr(kind, "__name__", str(kind))
            raise ValueError(f"{CONFIG}: {name} of {where} must be {wanted}, got {shortened(value)}")


def _check_sizes(layer: dict[str, Any], weights: Weights | None, where: str) -> None:
    """The queries of a layer come from a matrix of the weights, so its sizes cannot be larger than every matrix."""
    most = 2**20 if weights is None else weights.widest
    for name, size in (
        ("n_heads × head_dim", layer["n_heads"] * layer["head_dim"] if layer["n_heads"] > 0 else 0),
        ("width", layer["width"]),
    ):
        if not 1 <= size <= most:
            raise ValueError(f"{CONFIG}: {name} of {where} is {size:,}; the weights allow 1 to {most:,}")


def check_fits(plan: Plan, model: PreTrainedModel) -> None:
    """Raises ValueError unless a plan has a scheme for every self-attention of a model."""
    base, family = model.base_model, family_of(model)
    expected, paths = family.stacks(base), [stack.path for stack in plan.stacks]
    if sorted(paths) != sorted(expected):
        raise ValueError(
            f"{CONFIG}: the plan has the stacks {shortened(paths)}, but {type(model).__name__} has {expected}"
        )
    for stack in plan.stacks:
        _check_places(stack)
        _check_layers(stack, base)
        _check_heads(stack, base.get_submodule(stack.path))
        for attention in stack.attentions:
            _check_head_dim(attention, base.get_submodule(attention.name))
        width = family.mechanism.width(base.get_submodule(stack.path))
        if stack.width != width:
            raise ValueError(f"{CONFIG}: width of a stack is {stack.width} in the plan; the model has {width}")


def _check_places(stack: StackPlan) -> None:
    """Raises ValueError if a scheme is where it would do nothing: only `embed` is added to token embeddings."""
    if stack.embed is not None and not stack.embed.embeds:
        raise ValueError(f"{CONFIG}: embed of a stack is {stack.embed}, which adds nothing to token embeddings")
    for attention, scheme in zip(stack.attentions, stack.schemes, strict=True):
        for part in scheme.parts_of_sum():
            if part.embeds and not (part.rotates or part.has_terms or part.has_sides):
                raise ValueError(
                    f"{CONFIG}: the scheme of {attention.name} is {scheme}, but {part} is added to token embeddings; "
                    f"name it in embed of the stack"
                )


def _check_layers(stack: StackPlan, base: nn.Module) -> None:
    """Every attention of a stack of the same class, and with the same name but for the numbers in it, has a scheme.

    Hybrids have layers of another class under the same names.
    """
    planned = {attention.name for attention in stack.attentions}
    prefix = f"{stack.path}." if stack.path else ""
    modules = {name: module for name, module in base.named_modules() if name.startswith(prefix)}
    kinds = {(_without_numbers(name), type(modules[name])) for name in planned if name in modules}
    there = {name for name, module in modules.items() if (_without_numbers(name), type(module)) in kinds}
    if planned != there:
        extra, missing = sorted(planned - there), sorted(there - planned)
        what = f"names {shortened(extra[0])}, which the model does not have" if extra else f"has no {missing[0]}"
        raise ValueError(f"{CONFIG}: the plan {what}; the model has {len(there)} such layers, the plan {len(planned)}")


def _check_heads(stack: StackPlan, module: nn.Module) -> None:
    config = getattr(module, "config", None)
    heads = [getattr(config, name, None) for name in HEADS]
    known = {number for number in heads if isinstance(number, int)}
    for attention in stack.attentions:
        if known and attention.n_heads not in known:
            raise ValueError(
                f"{CONFIG}: n_heads of {attention.name} is {attention.n_heads} in the plan; the model has "
                f"{' or '.join(map(str, sorted(known)))}"
            )


def _check_head_dim(attention: Attention, module: nn.Module) -> None:
    known = {size for name in HEAD_DIMS if isinstance(size := getattr(module, name, None), int)}
    if known and attention.head_dim not in known:
        raise ValueError(
            f"{CONFIG}: head_dim of {attention.name} is {attention.head_dim} in the plan; the model has "
            f"{' or '.join(map(str, sorted(known)))}"
        )


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "*", name)
