"""Saving a swapped model.

`save_pretrained` writes the folder that transformers writes, safetensors and all, with one difference: config.json has
`"model_type": "locant"`, the model's own config inside its entry `locant`, and a sentence where transformers expects
sizes. Without locant no class of transformers can open the folder by mistake and silently build a model with the wrong
positions: the error states in words that locant is needed. `loading` opens it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel

from locant.hf import own_schemes
from locant.hf.checkpoint import hub_name
from locant.hf.facts import maximum_length
from locant.hf.layers import other_layers
from locant.hf.plan import ANY_LENGTH, Plan, plan_of
from locant.hf.plan_check import digest_of
from locant.hf.word_order import CARD
from locant.runs import files
from locant.version import __version__

NEEDS = (
    "This model was changed by locant and needs that package: run `pip install 'locant[hf]'`, then open it with "
    "locant.load, or import locant before transformers opens it."
)
"""What transformers prints where it would name a repository with code. It does not know our models without locant."""
POISON = (
    "this model was changed by locant; open it with locant.load, or with AutoModel after `import locant`, not with the "
    "class of the original. Without locant: pip install 'locant[hf]'"
)
"""Stands where sizes are expected."""
SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")


@contextmanager
def in_words(folder: str | Path) -> Iterator[None]:
    """Turns the errors of a full disk into an OSError that names the folder. Safetensors has a class of its own."""
    try:
        yield
    except SafetensorError as problem:
        raise OSError(f"{folder} could not be written: {problem}") from problem
    except OSError as problem:
        if str(folder) in str(problem):
            raise
        raise OSError(f"{folder} could not be written: {problem}") from problem


def save_pretrained(self: PreTrainedModel, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
    """Replaces `save_pretrained` of a swapped model."""
    if kwargs.get("push_to_hub"):
        raise ValueError("save a swapped model first, then push it: model.push_to_hub(name)")
    with in_words(save_directory):
        type(self).save_pretrained(self, save_directory, *args, **kwargs)
    plan, folder = plan_of(self), Path(save_directory)
    if plan is None or not kwargs.get("is_main_process", True):
        return
    path = folder / "config.json"
    if not path.exists():  # an adapter was saved, not the model
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    config["max_position_embeddings_before_locant"] = plan.before.get("max_position_embeddings")
    config["locant"]["digest"] = digest_of(config["locant"])
    ours = {
        "model_type": "locant",
        "architectures": config.get("architectures"),
        "transformers_version": config.get("transformers_version"),
        "locant_version": __version__,
        # "REPOSITORY--file.Class": there is no such repository, and no code. The error names what stands for it.
        "auto_map": {"AutoConfig": f"{NEEDS}--locant.LocantConfig"},
        **dict.fromkeys(SIZES, POISON),
        # Not as "model_type": transformers would look for its own config in here.
        "locant": {"family": config.pop("model_type"), **config},
    }
    files.write(path, json.dumps(ours, indent=2) + "\n")
    own_schemes.save_code(map(str, plan.schemes()), folder)
    card = folder / "README.md"
    if not card.exists() or "tags: [locant" in card.read_text(encoding="utf-8"):
        files.write(card, model_card(self, plan))


OPENING = """    pip install 'locant[hf]'

```python
import locant  # before transformers opens the folder

model = locant.load("PATH")  # or AutoModel.from_pretrained("PATH"), pipeline(…, "PATH")
```
"""
"""The end of a model card."""


def base_model(name: str | None) -> str:
    """Returns the line of a model card that names the original; nothing for a local folder, which the hub has not."""
    return "" if name is None else f"\nbase_model: {name}"


def save_tokenizer(tokenizer: Any, model: PreTrainedModel, folder: Path) -> None:
    """Saves a tokenizer beside a swapped model: a copy that truncates at the length of that model."""
    longer = copy.deepcopy(tokenizer)
    longer.model_max_length = maximum_length(model, getattr(tokenizer, "model_max_length", ANY_LENGTH))
    longer.save_pretrained(folder)


def model_card(model: PreTrainedModel, plan: Plan) -> str:
    """Returns the README.md of the folder."""
    rows = "\n".join(
        f"| `{layer.name}` | `{scheme}` |"
        for stack in plan.stacks
        for layer, scheme in zip(stack.attentions, stack.schemes, strict=True)
    )
    embeds = {str(stack.embed) for stack in plan.stacks if stack.embed is not None}
    before, after = plan.before.get("max_position_embeddings"), plan.max_length()
    parameters = sum(parameter.numel() for scheme in plan.schemes() for parameter in scheme.parameters())
    specs = {str(scheme) for stack in plan.stacks for scheme in stack.schemes}
    spec = "+".join([*specs, *embeds]) if len(specs) == 1 else "SPEC"
    original = hub_name(model.name_or_path)
    warning = CARD.format(model=original or "MODEL", spec=spec) if plan.unlearned else ""
    others = sum(other_layers(model.base_model, stack.path, stack.attentions) for stack in plan.stacks)
    own = "kept, with the following added" if plan.keep_native else "replaced by the following"
    return f"""---
library_name: locant
tags: [locant, position-embeddings]{base_model(original)}
---

# {type(model).__name__} with other positions

The positions of this {model.config.model_type} model were {own}
(locant {__version__}).

| attention | scheme |
|---|---|
{rows}

Added to the token embeddings: {", ".join(f"`{text}`" for text in embeds) or "nothing"}.
Layers without attention, which are unchanged: {others}.
Parameters of the schemes: {parameters:,}. Maximum length: {before} before, {after or "none"} now.
{warning}
{OPENING}"""
