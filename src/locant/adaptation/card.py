"""The model card of an adapted model: README.md of its folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from locant.adaptation.result import Adapted
from locant.hf.checkpoint import CONFIG, hub_name
from locant.hf.saving import OPENING, base_model
from locant.runs.untrusted import read_json


def card(done: Adapted, settings: dict[str, Any], modules: list[str]) -> str:
    """Returns the model card in Markdown.

    settings   those of adapt.json.
    modules    the kinds of modules of a sentence-transformers model; empty for other models.
    """
    original = hub_name(settings["model"])
    name = original or name_of(settings["model"]) or type(done.model).__name__
    pooling = settings["pooling"] and settings["pooling"].replace(settings["model"] or name, name)
    trained = "every weight was" if settings["train"] == "all" else "the parameters of the scheme were"
    if "part" in settings and settings["train"] == "all":
        trained = "every weight of the encoder that the decoder does not use was"
    tags = ["locant", "position-embeddings", *(["sentence-transformers"] if modules else [])]
    steps, budget, seed, length = done.steps, settings["budget"], settings["seed"], settings["length"]
    training = (
        f"Then {trained} trained to match the original for {steps:,} steps (budget {budget}, seed {seed}, sequences up "
        f"to\n{length} tokens, {settings['lines']:,} lines of unlabelled text)."
    )
    if not steps:
        training = f"It was not trained after that (budget {budget}, seed {seed})."
    training += _on_contrast(done, settings)
    training += "".join(f"\n**Note**: {notice}." for notice in done.notices)
    where = "on lines of the text that were held out" if settings["lines"] > 1 else "on the text itself, a single line"
    return f"""---
library_name: locant
tags:{"".join(f"{chr(10)}- {tag}" for tag in tags)}{base_model(original)}
---
# {name.rstrip("/").rpartition("/")[2]} with {done.spec}

This is {name} with another position scheme, made by locant. The scheme was fitted to the attention of the original.
{training}

{done}

Agreement is with the original, {where}. *silenced* is the original without its positions. *fitted* is the model with
the fitted scheme, before training: {done.fit.summary}.{_on_pooling(pooling)}
{_on_part(done, settings)}
{_opening(modules)}"""


PLAIN = re.compile(
    r"(model|models|transformer|0_transformer|checkpoint|snapshots?|weights|out|output|final|best|last|latest)"
    r"([-_]?\d+)?|[0-9a-f]{12,64}", re.IGNORECASE,
)  # fmt: skip
"""Names of folders that do not name a model: model, checkpoint-500, the hash of a snapshot."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
LEVELS = 4
"""How many folders upwards a name is looked for: a hub cache has models--OWNER--NAME/snapshots/HASH."""


def name_of(folder: str | None) -> str:
    """Returns a name for the model of a folder, without the path; "" if there is none.

    That of the folder, unless it names no model. Then the hub name that its config has, or that of a folder above.
    """
    if not folder:
        return ""
    places = [Path(folder).resolve(), *Path(folder).resolve().parents][:LEVELS]
    if PLAIN.fullmatch(places[0].name):
        written = _written_name(places[0] / CONFIG)
        if HUB_NAME.fullmatch(written):
            return written
    named = next((place.name for place in places if place.name and not PLAIN.fullmatch(place.name)), "")
    return named.removeprefix("models--").replace("--", "/") if named.startswith("models--") else named


def _written_name(config: Path) -> str:
    """What older versions of transformers wrote into a config: the name it was loaded by."""
    try:
        return str(read_json(config).get("_name_or_path") or "")
    except (OSError, ValueError):
        return ""


def _on_contrast(done: Adapted, settings: dict[str, Any]) -> str:
    """The contrastive stage, in one or two sentences."""
    found = done.contrast
    if found is None:
        return ""
    steps, budget = found.evaluations[-1].step, settings["contrast"]
    kept = f"The state after step {found.kept.step:,} was kept." if found.kept.step else "No state of it was kept."
    return (
        f"\nThen documents of the same text, up to {settings['length']} tokens long, were trained to be found by spans "
        f"removed from\nthem, for {steps:,} steps (budget {budget}). {kept} Expect this to help on text of this kind "
        f"only."
    )


def _on_part(done: Adapted, settings: dict[str, Any]) -> str:
    """Of an encoder-decoder, what the measurements are about."""
    if "part" not in settings:
        return ""
    return f"""
In this encoder-decoder {done.fit.notices[0]}. Every number above is of the encoder alone.
"""


def _on_pooling(pooling: str | None) -> str:
    return "" if pooling is None else f" Vectors were pooled by {pooling}."


def _opening(modules: list[str]) -> str:
    if not modules:
        return OPENING
    return f"""    pip install 'locant[hf]' sentence-transformers

```python
import locant  # before transformers opens the folder
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("PATH")  # {", ".join(modules)}, as in the original
transformer = locant.load("PATH")  # the first of them alone
```
"""
