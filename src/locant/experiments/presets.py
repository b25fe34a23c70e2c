"""Presets: the sizes and training settings of a comparison.

    quick    minutes on a laptop: enough to see large differences
    small    an hour on a laptop, minutes on a GPU
    paper    the size of the papers: for GPUs

A preset is written like a scheme, with changes after a colon: small:length=256,batch=8.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """All settings of a comparison except its task, data, schemes and seeds."""

    length: int  # tokens of a training sequence
    batch: int  # sequences per step, over all processes
    rate: float  # peak learning rate; linear warm-up over the first tenth, then cosine decay
    steps: int  # default budget
    evaluated: int  # test tokens (language modelling) or test examples; 0 for all
    layers: int = 0  # size of a model made from scratch; a pretrained model has its own
    heads: int = 0
    width: int = 0
    vocabulary: int = 0  # size of the tokenizer trained on the text
    scheme_rate: float = 0.0  # learning rate of the scheme's own parameters; 0 for that of the model
    decay: float = 0.01  # weight decay; never on the scheme's parameters
    longest: int = 8  # longest test inputs, as a multiple of `length`
    also: int = 0  # a further test length of squad, in tokens, between the doubled ones; 0 for none
    threads: int = 1  # per run; parallel runs share the machine's cores
    kept: int = 0  # models kept on the way: at 1/2, 1/4, 1/8 … of the steps


SCRATCH: dict[str, Preset] = {
    "quick": Preset(
        length=64, batch=16, rate=2e-3, steps=500, evaluated=65_536, layers=3, heads=4, width=96, vocabulary=2048
    ),
    "small": Preset(
        length=256, batch=16, rate=1e-3, steps=4000, evaluated=200_000, layers=6, heads=6, width=384, vocabulary=8192
    ),
    # Chi et al. 2023: 12 layers of 768, length 512, batch 32, 50,000 steps at 6e-4.
    "paper": Preset(
        length=512, batch=32, rate=6e-4, steps=50_000, evaluated=0, layers=12, heads=12, width=768, vocabulary=50_257
    ),
}  # fmt: skip

# A new scheme starts untrained in a trained model, so it gets a higher learning rate.
FINETUNE: dict[str, Preset] = {
    "quick": Preset(length=128, batch=32, rate=5e-5, steps=200, evaluated=0, scheme_rate=1e-3, longest=1),
    "small": Preset(length=128, batch=32, rate=5e-5, steps=1000, evaluated=0, scheme_rate=1e-3, longest=1),
    # Devlin et al. 2019: batch 32 and 3 epochs, which are 800 steps of CoLA and 36,800 of MNLI: set the budget.
    "paper": Preset(length=128, batch=32, rate=3e-5, steps=3000, evaluated=0, scheme_rate=1e-3, longest=1),
}

# Trained on parts of paragraphs, tested on whole ones.
ANSWERS: dict[str, Preset] = {
    "quick": Preset(length=128, batch=16, rate=1e-4, steps=300, evaluated=200, scheme_rate=1e-3, longest=4),
    "small": Preset(length=192, batch=32, rate=5e-5, steps=3000, evaluated=2000, scheme_rate=1e-3, longest=2),
    # Huang et al. 2020: 3e-5, batch 48, 2 epochs of SQuAD.
    "paper": Preset(length=384, batch=48, rate=3e-5, steps=3700, evaluated=0, scheme_rate=1e-3, longest=4),
}

PUZZLE: dict[str, Preset] = {
    "quick": Preset(length=16, batch=64, rate=2e-3, steps=800, evaluated=256, layers=3, heads=4, width=128),
    "small": Preset(length=32, batch=64, rate=1e-3, steps=10_000, evaluated=1000, layers=6, heads=8, width=256),
    "paper": Preset(length=40, batch=128, rate=1e-3, steps=50_000, evaluated=1000, layers=12, heads=12, width=768),
}


def find_preset(text: str, presets: Mapping[str, Preset]) -> Preset:
    """Returns the preset that `small` or `small:length=256,batch=8` names."""
    name, _, rest = text.partition(":")
    if name not in presets:
        raise ValueError(f"unknown preset {name!r}; choose one of: {', '.join(presets)}")
    changes = dict(_change(item, text) for item in rest.split(",") if item)
    changed = dataclasses.replace(presets[name], **changes)  # type: ignore[arg-type]
    if changed.heads and changed.width % changed.heads:
        raise ValueError(f"preset {text!r}: width {changed.width} is not a multiple of {changed.heads} heads")
    return changed


def _change(item: str, text: str) -> tuple[str, float]:
    """Returns the field and the value of `length=256`, one of the changes in the preset `text`."""
    kinds = {field.name: field.type for field in dataclasses.fields(Preset)}
    key, _, value = (piece.strip() for piece in item.partition("="))
    if key not in kinds:
        near = difflib.get_close_matches(key, kinds, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"a preset has no {key!r}{hint}; it has: {', '.join(kinds)}")
    whole = kinds[key] == "int"
    try:
        number = int(value) if whole else float(value)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"preset {text!r}: {key} must be {kind}, got {value!r}") from None
    least = 0 if key in ("evaluated", "scheme_rate", "decay", "kept") else 1 if whole else 1e-12
    if not number >= least:
        raise ValueError(f"preset {text!r}: {key} must be at least {least}, got {value}")
    return key, number
