"""A plan: which scheme is attached to which layer. `attaching.attach` applies it, `attaching.detach` undoes it.

Everything a plan names is relative to `model.base_model`, so a plan of BertModel fits BertForMaskedLM too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from locant import spec
from locant.hf import interface, own_schemes
from locant.hf.mechanisms import Replaced
from locant.schemes import Scheme

STATE = "locant_plan"
"""Attribute of a base model that holds its plan."""
ANY_LENGTH = 2**20
"""config.max_position_embeddings of a swapped model that reads any length."""


@dataclass(frozen=True)
class Attention:
    """A self-attention module: its name below the base model, and its dimensions."""

    name: str
    n_heads: int
    head_dim: int


@dataclass
class StackPlan:
    """The schemes of one stack of layers. An encoder-decoder has two stacks, other models one."""

    path: str
    attentions: list[Attention]
    schemes: list[Scheme]  # one per attention; the same object where it is shared
    embed: Scheme | None
    width: int
    native_count: bool = False
    """Without position_ids tokens are numbered as the model does, for its own absolute positions. Otherwise the first
    token is at 0, after any padding on the left."""

    def max_length(self) -> int | None:
        """Returns how many positions the schemes of the stack have; None: any number."""
        every = [scheme.max_length for scheme in [*self.schemes, self.embed] if scheme is not None]
        return min((length for length in every if length is not None), default=None)


@dataclass
class Plan:
    """The schemes of a model, and what they replaced."""

    stacks: list[StackPlan]
    impl: str = "auto"
    keep_native: bool = False
    replaced: list[Replaced] = field(default_factory=list)
    before: dict[str, Any] = field(default_factory=dict)
    native_is_lost: bool = False  # opened from a folder, which holds only the new positions
    unlearned: bool = False  # a trained model was swapped to it without a fit (word_order.py)
    family: dict[str, Any] | None = None  # the record of a family that was found by running (family_record.py)

    def schemes(self) -> list[Scheme]:
        """Returns every scheme of the model, each once."""
        every = [scheme for stack in self.stacks for scheme in [*stack.schemes, stack.embed] if scheme is not None]
        return list({id(scheme): scheme for scheme in every}.values())

    def max_length(self) -> int | None:
        """Returns how many positions the schemes have; None: any number."""
        return min((length for stack in self.stacks if (length := stack.max_length()) is not None), default=None)

    def to_config(self) -> dict[str, Any]:
        """Returns the plan as JSON for config.json."""
        owners: dict[int, str] = {}  # of a shared scheme, the name of the first module that has it

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
            "unlearned": self.unlearned,
            **({} if self.family is None else {"family": self.family}),
            **({"imports": own} if (own := own_schemes.described(map(str, self.schemes()))) else {}),
            "stacks": [
                {
                    "path": stack.path,
                    "width": stack.width,
                    "embed": None if stack.embed is None else str(stack.embed),
                    "native_count": stack.native_count,
                    "layers": layers(stack),
                }
                for stack in self.stacks
            ],
        }

    @staticmethod
    def from_config(data: dict[str, Any]) -> Plan:
        """Builds the schemes that `to_config` wrote down, with their initial parameters."""
        if data.get("format") != 1:
            raise ValueError(f"this folder was written by a newer locant (format {data.get('format')!r}; this reads 1)")
        stacks, built = [], {}
        for stack in data["stacks"]:
            schemes: list[Scheme] = []
            for layer in stack["layers"]:
                dims = {"n_heads": layer["n_heads"], "head_dim": layer["head_dim"], "d_model": stack["width"]}
                owner = layer["same_as"]
                if owner not in built:
                    built[owner] = spec.scheme(layer["scheme"], **dims)
                schemes.append(built[owner])
            embed = None
            if stack["embed"] is not None:
                dims = {"n_heads": layer["n_heads"], "head_dim": layer["head_dim"], "d_model": stack["width"]}
                embed = spec.scheme(stack["embed"], **dims)
            attentions = [Attention(x["module"], x["n_heads"], x["head_dim"]) for x in stack["layers"]]
            native_count = bool(stack.get("native_count", False))  # older folders have no such entry
            stacks.append(StackPlan(stack["path"], attentions, schemes, embed, stack["width"], native_count))
        unlearned = bool(data.get("unlearned", False))
        return Plan(
            stacks, data["impl"], data["keep_native"], native_is_lost=True, unlearned=unlearned,
            family=data.get("family"),
        )  # fmt: skip


def plan_of(model: nn.Module) -> Plan | None:
    """Returns the plan of a swapped model; None for a model as transformers made it."""
    found: Plan | None = getattr(model, "base_model", model).__dict__.get(STATE)
    return found


def current_schemes(model: PreTrainedModel, stack: StackPlan) -> list[Scheme]:
    """Returns the schemes that are in the model now: PEFT may have replaced those of the plan."""
    found = [interface.scheme_of(model.base_model.get_submodule(attention.name)) for attention in stack.attentions]
    return [scheme or planned for scheme, planned in zip(found, stack.schemes, strict=True)]
