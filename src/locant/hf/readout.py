"""`native`: the positions that a model has now, as schemes. `swap(model, native(model))` keeps its outputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from locant.hf.finding import family_of
from locant.hf.mechanisms import Read
from locant.hf.mechanisms.table import learned
from locant.hf.plan import Plan, StackPlan, current_schemes, plan_of
from locant.hf.probing import find_attentions, probe_through_seam
from locant.schemes import Scheme, Sum


@dataclass(frozen=True)
class Native:
    """The positions of a model. One `Read` per stack: an encoder-decoder has two, other models one."""

    kind: str  # "absolute", "rotary", "bias", "disentangled", "relative", combinations of them, or "swapped"
    stacks: tuple[Read, ...]

    @property
    def table(self) -> Tensor | None:
        """The absolute positions [length, width], if there is a table."""
        embed = self.stacks[0].embed
        table = None if embed is None else embed.position_table
        return None if table is None else table.detach()

    @property
    def bias(self) -> list[Tensor] | None:
        """The biases [heads, buckets] of each layer, if they are T5's."""
        layers = [scheme for stack in self.stacks for scheme in stack.layers or []]
        tables = [table.detach() for scheme in layers if (table := scheme.bucket_table) is not None]
        return tables if tables and len(tables) == len(layers) else None

    @property
    def rotary(self) -> list[str] | None:
        """The rotary settings of each layer as spec strings, if positions are rotary; "nope" for layers without."""
        layers = [scheme for stack in self.stacks for scheme in stack.layers or []]
        alike = all(
            (scheme.rotates and not scheme.has_terms and not scheme.has_sides) or scheme.silent for scheme in layers
        )
        rotary = alike and any(scheme.rotates for scheme in layers)
        return [str(scheme) for scheme in layers] if rotary else None

    def __str__(self) -> str:
        def spell(read: Read) -> str:
            layers = list(dict.fromkeys(map(str, read.layers or [])))
            names = [*([str(read.embed)] if read.embed is not None else []), "/".join(layers)]
            return "+".join(name for name in names if name) or "nope"

        return f"{self.kind}: {', '.join(map(spell, self.stacks))}"


def native(model: PreTrainedModel) -> Native:
    """Returns the positions that a model has now: its own, the schemes it was swapped to, or both (keep_native)."""
    plan = plan_of(model)
    family = family_of(model)
    reads = []
    # Building a scheme draws random numbers; the caller's generator must not notice.
    with torch.random.fork_rng(devices=[]):
        if plan is not None:
            reads = [
                Read("swapped", _embedding(model, plan, each), current_schemes(model, each), each.native_count)
                for each in plan.stacks
            ]
            return Native("swapped", tuple(reads))
        for path, attentions in find_attentions(model, family).items():
            stack = model.base_model.get_submodule(path)
            modules = [model.base_model.get_submodule(attention.name) for attention in attentions]
            reads.append(family.mechanism.read(stack, modules, partial(probe_through_seam, model)))
    return Native(reads[0].kind, tuple(reads))


def _embedding(model: PreTrainedModel, plan: Plan, stack: StackPlan) -> Scheme | None:
    """What a swapped model adds to its token embeddings: its own table where the swap kept it, and its new scheme."""
    parts = [] if stack.embed is None else [stack.embed]
    if plan.keep_native:
        table = family_of(model).mechanism.own_table(model.base_model.get_submodule(stack.path))
        parts = parts if table is None else [learned(table), *parts]
    return parts[0] if len(parts) == 1 else Sum(*parts) if parts else None
