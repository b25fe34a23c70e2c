"""A plan: which scheme sits where in a model. `attach` carries it out, `detach` undoes it bit for bit.

Everything a plan names is relative to `model.base_model`, so that a plan of BertModel fits BertForMaskedLM too.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.hf import interface
from locant.hf.families import OUTSIDE, Family, family_of
from locant.hf.mechanisms import Replaced
from locant.schemes import Scheme
from locant.spec import scheme as from_spec

STATE = "locant_plan"
PROBE = 7
"""Tokens of a probe."""
ANY_LENGTH = 2**20
"""What config.max_position_embeddings says of a model without a last position."""


@dataclass(frozen=True)
class Attention:
    """A self-attention module of a stack, by its name."""

    name: str
    n_heads: int
    head_dim: int


@dataclass
class StackPlan:
    path: str
    attentions: list[Attention]
    schemes: list[Scheme]  # one per attention; the same object where it is shared
    embed: Scheme | None
    width: int


@dataclass
class Plan:
    stacks: list[StackPlan]
    impl: str = "auto"
    keep_native: bool = False
    replaced: list[Replaced] = field(default_factory=list)
    before: dict[str, Any] = field(default_factory=dict)
    native_is_lost: bool = False  # opened from a folder, which holds the new positions only

    def schemes(self) -> list[Scheme]:
        """Every scheme of the model, each once."""
        every = [scheme for stack in self.stacks for scheme in [*stack.schemes, stack.embed] if scheme is not None]
        return list({id(scheme): scheme for scheme in every}.values())

    def max_length(self) -> int | None:
        return min((scheme.max_length for scheme in self.schemes() if scheme.max_length is not None), default=None)

    def to_config(self) -> dict[str, Any]:
        owners: dict[int, str] = {}  # of a scheme that is shared, the first module that has it

        def layers(stack: StackPlan) -> list[dict[str, Any]]:
            return [
                {
                    "module": attention.name,
                    "n_heads": attention.n_heads,
                    "head_dim": attention.head_dim,
                    "scheme": str(scheme),
                    "same_as": owners.setdefault(id(scheme), attention.name),
                }
                for attention, scheme in zip(stack.attentions, stack.schemes, strict=True)
            ]

        return {
            "format": 1,
            "impl": self.impl,
            "keep_native": self.keep_native,
            "stacks": [
                {
                    "path": stack.path,
                    "width": stack.width,
                    "embed": None if stack.embed is None else str(stack.embed),
                    "layers": layers(stack),
                }
                for stack in self.stacks
            ],
        }

    @staticmethod
    def from_config(data: dict[str, Any]) -> Plan:
        if data.get("format") != 1:
            raise ValueError(f"this folder was written by a newer locant (format {data.get('format')!r}; this reads 1)")
        stacks, built = [], {}
        for stack in data["stacks"]:
            schemes: list[Scheme] = []
            for layer in stack["layers"]:
                dims = {"n_heads": layer["n_heads"], "head_dim": layer["head_dim"], "d_model": stack["width"]}
                owner = layer["same_as"]
                if owner not in built:
                    built[owner] = from_spec(layer["scheme"], **dims)
                schemes.append(built[owner])
            embed = None
            if stack["embed"] is not None:
                dims = {"n_heads": layer["n_heads"], "head_dim": layer["head_dim"], "d_model": stack["width"]}
                embed = from_spec(stack["embed"], **dims)
            attentions = [Attention(x["module"], x["n_heads"], x["head_dim"]) for x in stack["layers"]]
            stacks.append(StackPlan(stack["path"], attentions, schemes, embed, stack["width"]))
        return Plan(stacks, data["impl"], data["keep_native"], native_is_lost=True)


def plan_of(model: nn.Module) -> Plan | None:
    """The plan a model was swapped by; None for a model as transformers made it."""
    found: Plan | None = getattr(model, "base_model", model).__dict__.get(STATE)
    return found


def current_schemes(model: PreTrainedModel, stack: StackPlan) -> list[Scheme]:
    """The schemes as they are in the model: PEFT may have put others in the place of those of the plan."""
    found = [interface.scheme_of(model.base_model.get_submodule(attention.name)) for attention in stack.attentions]
    return [scheme or planned for scheme, planned in zip(found, stack.schemes, strict=True)]


def _configs(model: PreTrainedModel) -> list[Any]:
    """The config of a model and of its base: mostly one and the same."""
    return list({id(config): config for config in (model.config, model.base_model.config)}.values())


def _use(model: PreTrainedModel, family: Family, implementation: str) -> None:
    """Switches the attention to ours, or back."""
    if family.seam is None:
        model.set_attn_implementation(implementation)
        return
    (family.seam.open if implementation == interface.NAME else family.seam.close)(model.base_model)
    for config in _configs(model):  # transformers would refuse: it does not know of the seam
        config._attn_implementation_internal = implementation


def attach(model: PreTrainedModel, plan: Plan) -> None:
    """Silences the native positions, puts the schemes in, and switches the attention."""
    from locant.hf.checkpoint import save_pretrained

    family, base = family_of(model), model.base_model
    config: Any = base.config
    plan.replaced = []
    plan.before = {"implementation": config._attn_implementation}
    base.__dict__[STATE] = plan
    owners: dict[int, nn.Module] = {}
    _use(model, family, interface.NAME)
    for stack_plan in plan.stacks:
        stack = base.get_submodule(stack_plan.path)
        plan.replaced += family.mechanism.silence(stack, stack_plan.embed, plan.keep_native)
        for attention, scheme in zip(stack_plan.attentions, stack_plan.schemes, strict=True):
            module = base.get_submodule(attention.name)
            if id(scheme) in owners:  # shared: it belongs to the first module that has it
                module.__dict__[interface.OWNER] = owners[id(scheme)]
                module.__dict__[interface.NAME] = scheme  # for people who look; not a submodule
            else:
                module.add_module(interface.NAME, scheme)
                owners[id(scheme)] = module
            module.__dict__["locant_impl"] = plan.impl
        interface.follow(stack, count=family.count, shift=family.shift(stack))
    if hasattr(config, "max_position_embeddings"):
        plan.before["max_position_embeddings"] = config.max_position_embeddings
    for config in _configs(model):
        if hasattr(config, "max_position_embeddings") and (not plan.keep_native or plan.replaced):
            config.max_position_embeddings = plan.max_length() or ANY_LENGTH
        config.locant = plan.to_config()
    for module in {model, base}:
        module.__dict__["save_pretrained"] = types.MethodType(save_pretrained, module)
    base.register_state_dict_pre_hook(_not_as_a_part)


def detach(model: PreTrainedModel) -> Plan:
    """Puts everything back as it was, also after an `attach` that failed half-way; returns the plan."""
    plan = plan_of(model)
    assert plan is not None
    base = model.base_model
    here = next(base.parameters())
    for stack_plan in plan.stacks:
        interface.unfollow(base.get_submodule(stack_plan.path))
        stack_plan.schemes = current_schemes(model, stack_plan)
        for attention in stack_plan.attentions:
            module = base.get_submodule(attention.name)
            module.__dict__.pop(interface.OWNER, None)
            module.__dict__.pop(interface.NAME, None)
            module._modules.pop(interface.NAME, None)
            module.__dict__.pop("locant_impl", None)
    for replaced in reversed(plan.replaced):
        if replaced.original is not None and not plan.native_is_lost:
            _move(replaced.original, here)  # the model may have been moved since
        replaced.put_back()
    _use(model, family_of(model), plan.before["implementation"])
    for config in _configs(model):
        if "max_position_embeddings" in plan.before:
            config.max_position_embeddings = plan.before["max_position_embeddings"]
        config.__dict__.pop("locant", None)
    base.__dict__.pop(STATE, None)
    for key in [key for key, hook in base._state_dict_pre_hooks.items() if hook is _not_as_a_part]:
        del base._state_dict_pre_hooks[key]
    for module in {model, base}:
        module.__dict__.pop("save_pretrained", None)
    return plan


def _not_as_a_part(base: nn.Module, prefix: str, keep_vars: bool) -> None:
    """A whole that does not know that its part was swapped would save a plain folder: refuse.

    A module does not know what it is a part of; who is saving stands in the calls above.
    """
    frame = sys._getframe() if prefix else None
    while frame is not None:
        saving = frame.f_locals.get("self") if frame.f_code.co_name == "save_pretrained" else None
        if isinstance(saving, PreTrainedModel):
            if "save_pretrained" in saving.__dict__:
                return
            raise ValueError(
                f"a part of this {type(saving).__name__} was swapped by itself ({prefix.rstrip('.')}): it would "
                f"be saved as a plain model with the wrong positions; swap the whole: locant.swap(model, …)"
            )
        frame = frame.f_back


def _move(original: nn.Module | nn.Parameter, here: Tensor) -> None:
    if isinstance(original, nn.Parameter):
        original.data = original.data.to(here.device, here.dtype)
    elif list(original.parameters()):
        original.to(here.device, here.dtype)
    else:  # frequencies of a rotary embedding: better left as exact as they are
        original.to(here.device)


@contextmanager
def cache_kept(model: PreTrainedModel) -> Iterator[None]:
    """`use_cache` in the config is as it was after this; Trainer turns it off for good, or puts it there."""
    config: Any = model.config
    before = vars(config).get("use_cache")
    try:
        yield
    finally:
        vars(config).pop("use_cache", None)
        if before is not None:
            config.use_cache = before


def own_config(model: PreTrainedModel) -> None:
    """Gives a model configs of its own: switching the attention must not reach a model that shares them."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if config is not None:
            module.config = copy.deepcopy(config, memo)


def find_attentions(model: PreTrainedModel, family: Family) -> dict[str, list[Attention]]:
    """The self-attention modules of each stack in the order they run, found by running them once."""
    base = model.base_model
    names = {module: name for name, module in base.named_modules()}
    paths = family.stacks(base)
    calls: dict[str, list[Attention]] = {path: [] for path in paths}

    def record(module: nn.Module, query: Tensor, key: Tensor, positions: Any) -> None:
        name = names.get(module)
        lengths = query.shape[2], key.shape[2]
        for path in paths:
            # In an encoder-decoder the probe has unequal lengths: attention from one to the other is not ours.
            if name is not None and (not path or name.startswith(f"{path}.")) and lengths[0] == lengths[1]:
                calls[path].append(Attention(name, query.shape[1], query.shape[3]))
                if not hasattr(module, "is_causal"):
                    kind = model.config.model_type
                    raise NotImplementedError(
                        f"{kind} models cannot be swapped: their attention does not say if it is causal"
                    )

    implementation = model.config._attn_implementation
    _use(model, family, interface.NAME)
    try:
        with interface.watched(record):
            run_probe(base)
    finally:
        _use(model, family, implementation)
    for path, found in calls.items():
        expected = _layers(base.get_submodule(path))
        if len(found) == 0 or (expected is not None and len(found) != expected):
            kind = model.config.model_type
            raise NotImplementedError(
                f"{kind} models cannot be swapped: {len(found)} of {expected} layers called the attention; {OUTSIDE}"
            )
    return {path: list(dict.fromkeys(found)) for path, found in calls.items()}  # ALBERT runs one module many times


def _layers(stack: nn.Module) -> int | None:
    if isinstance(getattr(stack, "layers", None), nn.ModuleList):  # BART's config has one number for two stacks
        return len(stack.layers)  # type: ignore[arg-type]
    for name in ("num_hidden_layers", "num_layers"):
        number = getattr(stack.config, name, None)
        if isinstance(number, int):
            return number
    return None


@torch.no_grad()
def run_probe(base: nn.Module) -> Tensor:
    """The last hidden states for a few tokens (or one small image), in eval mode, which is put back after."""
    with evaluating(base):
        device = next(base.parameters()).device
        if getattr(base, "main_input_name", "input_ids") == "pixel_values":
            config: Any = base.config
            size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
            pixels = torch.linspace(-1, 1, config.num_channels * size * size, device=device).sin()
            inputs = {"pixel_values": pixels.view(1, config.num_channels, size, size).to(next(base.parameters()).dtype)}
        else:
            vocabulary = base.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
            length = _probe_length(base)
            tokens = (torch.arange(3, 3 + length, device=device) % vocabulary)[None]
            inputs = {"input_ids": tokens}
            if getattr(base.config, "is_encoder_decoder", False) and hasattr(base, "decoder"):
                inputs["decoder_input_ids"] = tokens[:, : max(1, length - 2)]
        output = base(**inputs)
    hidden: Tensor = output.last_hidden_state if "last_hidden_state" in output else output.logits
    return hidden.float()


def _probe_length(base: nn.Module) -> int:
    """Seven tokens, or as many as a model has positions for."""
    longest = getattr(base.config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        return PROBE
    with suppress(NotImplementedError):  # RoBERTa's positions begin at 2
        family = family_of(base)  # type: ignore[arg-type]
        longest -= family.shift(base.get_submodule(family.stacks(base)[0]))
    return max(1, min(PROBE, longest))


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode; after it every part is in the mode it was in."""
    training = {part: part.training for part in module.modules()}
    try:
        module.eval()
        yield
    finally:
        for part, flag in training.items():
            part.training = flag
