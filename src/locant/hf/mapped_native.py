"""`native@MAP`: a model's own positions within maps, so that it can process longer texts without training.

native@interpolated:factor=4               BERT's table, stretched to four times its length
native@selfextend:window=1024,size=8       SelfExtend of a rotary model, in the layers that rotate
native@recurrent:length=256+local          BERT's table again and again, and attention to neighbours
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from locant import notation
from locant.hf.plan import plan_of
from locant.hf.readout import Native, native
from locant.schemes import Scheme, Sum
from locant.spec import mapped

WORD = "native"


def is_mapped_native(spec: Any) -> bool:
    """Whether a spec is the model's own positions within maps."""
    return isinstance(spec, str) and "@" in spec and spec.partition("@")[0].strip() == WORD


def mapped_native(model: PreTrainedModel, spec: str) -> tuple[Native, str]:
    """Returns the positions of a model that is not swapped, within the maps of a spec, and what is added to them.

    The second is the rest of the spec after the first +, or empty.
    """
    own_part, _, added = spec.partition("+")
    parts = notation.parse(f"nope@{own_part.strip().partition('@')[2]}")
    notation.check_names(parts)
    if plan_of(model) is not None:
        raise ValueError(f"{spec!r} is for a model with its own positions; call locant.swap(model, 'native') first")
    own = native(model)
    done: dict[int, Scheme] = {}  # a scheme that layers share stays one object

    def within(scheme: Scheme) -> Scheme:
        if id(scheme) not in done:
            inner = [each if each.silent else mapped(each, parts[0]) for each in scheme.parts_of_sum()]
            done[id(scheme)] = inner[0] if len(inner) == 1 else Sum(*inner)
        return done[id(scheme)]

    stacks = tuple(
        replace(
            read,
            embed=None if read.embed is None else within(read.embed),
            layers=None if read.layers is None else [within(scheme) for scheme in read.layers],
            # Padding on the left makes no difference to a rotary model. A map must not change that.
            native_count=read.native_count and not read.shift_invariant,
        )
        for read in own.stacks
    )
    if all(scheme.silent for scheme in done.values()):
        raise ValueError(f"{type(model).__name__} has no positions of its own that {spec!r} could map; use SCHEME@MAP")
    return replace(own, stacks=stacks), added.strip()
