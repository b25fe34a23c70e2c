"""Presets: everything about a comparison that is not its task, its data, its schemes and its seeds.

    quick    minutes on a laptop: enough to see large differences
    small    an hour on a laptop, minutes on a GPU
    paper    the size of the papers: for GPUs

A preset is named like a scheme, with what is changed after a colon: small:length=256,batch=8.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    length: int  # tokens of a training sequence
    batch: int  # sequences of a step, over all processes
    rate: float  # learning rate at its top; it rises over the first tenth and falls along a cosine
    steps: int  # the budget where none is given
    evaluated: int  # tokens (language modelling) or examples that a trained model is tested on; 0 for all
    layers: int = 0  # size of a model made from scratch; a pretrained one brings its own
    heads: int = 0
    width: int = 0
    vocabulary: int = 0  # of the tokenizer that is trained on the text
    scheme_rate: float = 0.0  # learning rate of the scheme's own parameters; 0 for that of the model
    decay: float = 0.01  # weight decay; never on the scheme's parameters
    longest: int = 8  # tested up to this many times the length it was trained at
    threads: int = 1  # of one run; runs go side by side on the rest of the machine


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

# A scheme that starts from nothing has further to go than weights that were trained before: it learns faster.
FINETUNE: dict[str, Preset] = {
    "quick": Preset(length=128, batch=32, rate=5e-5, steps=200, evaluated=0, scheme_rate=1e-3, longest=1),
    "small": Preset(length=128, batch=32, rate=5e-5, steps=1000, evaluated=0, scheme_rate=1e-3, longest=1),
    # Devlin et al. 2019: batch 32 and 3 epochs, which are 800 steps of CoLA and 36,800 of MNLI: see --budget.
    "paper": Preset(length=128, batch=32, rate=3e-5, steps=3000, evaluated=0, scheme_rate=1e-3, longest=1),
}

# Tested with whole paragraphs, where it was trained with parts of them.
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


def preset(text: str, presets: Mapping[str, Preset]) -> Preset:
    """Reads `small` or `small:length=256,batch=8`."""
    name, _, rest = text.partition(":")
    if name not in presets:
        raise ValueError(f"unknown preset {name!r}; there is: {', '.join(presets)}")
    kinds = {field.name: field.type for field in dataclasses.fields(Preset)}
    changes: dict[str, float] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = (piece.strip() for piece in item.partition("="))
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"a preset has no {key!r}{hint}; it has: {', '.join(kinds)}")
        try:
            changes[key] = int(value) if kinds[key] == "int" else float(value)
        except ValueError:
            kind = "a whole number" if kinds[key] == "int" else "a number"
            raise ValueError(f"preset {text!r}: {key} must be {kind}, got {value!r}") from None
        least = 0 if key in ("evaluated", "scheme_rate", "decay") else 1 if kinds[key] == "int" else 1e-12
        if not changes[key] >= least:
            raise ValueError(f"preset {text!r}: {key} must be at least {least}, got {value}")
    changed = dataclasses.replace(presets[name], **changes)  # type: ignore[arg-type]
    if changed.heads and changed.width % changed.heads:
        raise ValueError(f"preset {text!r}: width {changed.width} is not a multiple of {changed.heads} heads")
    return changed
