"""Saving a swapped model, and opening it again.

`save_pretrained` writes the folder transformers writes, safetensors and all, with one difference: config.json says
`"model_type": "locant"`, keeps the model's own config in its entry `locant`, and has nothing in the places where
transformers would look for sizes. Without locant no class of transformers can open it by mistake and quietly make a
model with the wrong positions. With locant (`import locant.hf`) `locant.load` and the Auto classes open it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

import locant
from locant.hf.plan import Plan, attach, plan_of

POISON = "this model was changed by locant; open it with locant.load"
"""Stands where sizes are expected."""
SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")


class LocantConfig(PreTrainedConfig):
    """What AutoConfig gives for a folder of ours: enough for the Auto classes to find the way to `load`."""

    model_type = "locant"


def register() -> None:
    """Teaches the Auto classes to open our folders."""
    AutoConfig.register("locant", LocantConfig, exist_ok=True)
    for name in dir(transformers):
        auto = getattr(transformers, name) if name.startswith("AutoModel") else None
        if auto is not None and hasattr(auto, "_model_mapping"):
            opener = type(f"Locant{name}", (), {"config_class": LocantConfig, "from_pretrained": _opener(auto)})
            auto.register(LocantConfig, opener, exist_ok=True)


def _opener(auto: Any) -> Any:
    def from_pretrained(path: str, *args: Any, config: Any = None, **kwargs: Any) -> PreTrainedModel:
        # AutoConfig has taken what it knows out of the arguments (num_labels, …): it belongs to the model's own config.
        ours = {"model_type", "architectures", "transformers_version", "locant_version", "locant", "dtype", *SIZES}
        taken = {} if config is None else {k: v for k, v in config.to_diff_dict().items() if k not in ours}
        return load(path, auto, **{**taken, **kwargs})

    return staticmethod(from_pretrained)


def save_pretrained(self: PreTrainedModel, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
    """In the place of `save_pretrained` of a swapped model."""
    if kwargs.get("push_to_hub"):
        raise ValueError("save a swapped model first and push it then: model.push_to_hub(name)")
    type(self).save_pretrained(self, save_directory, *args, **kwargs)
    plan, folder = plan_of(self), Path(save_directory)
    if plan is None or not kwargs.get("is_main_process", True):
        return
    path = folder / "config.json"
    if not path.exists():  # an adapter was saved, not the model
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    config["max_position_embeddings_before_locant"] = plan.before.get("max_position_embeddings")
    ours = {
        "model_type": "locant",
        "architectures": config.get("architectures"),
        "transformers_version": config.get("transformers_version"),
        "locant_version": locant.__version__,
        **dict.fromkeys(SIZES, POISON),
        # Not as "model_type": transformers would look for its own config in here.
        "locant": {"family": config.pop("model_type"), **config},
    }
    path.write_text(json.dumps(ours, indent=2) + "\n", encoding="utf-8")
    card = folder / "README.md"
    if not card.exists() or "tags: [locant" in card.read_text(encoding="utf-8"):
        card.write_text(model_card(self, plan), encoding="utf-8")


def model_card(model: PreTrainedModel, plan: Plan) -> str:
    rows = "\n".join(
        f"| `{layer.name}` | `{scheme}` |"
        for stack in plan.stacks
        for layer, scheme in zip(stack.attentions, stack.schemes, strict=True)
    )
    embeds = {str(stack.embed) for stack in plan.stacks if stack.embed is not None}
    before, after = plan.before.get("max_position_embeddings"), plan.max_length()
    parameters = sum(parameter.numel() for scheme in plan.schemes() for parameter in scheme.parameters())
    own = "kept, with the following added" if plan.keep_native else "replaced by the following"
    return f"""---
library_name: transformers
tags: [locant, position-embeddings]
---

# {type(model).__name__} with other positions

The positions of this {model.config.model_type} model were {own}
(locant {locant.__version__}).

| attention | scheme |
|---|---|
{rows}

Added to the token embeddings: {", ".join(f"`{text}`" for text in embeds) or "nothing"}.
Parameters of the schemes: {parameters:,}. Maximum length: {before} before, {after or "none"} now.

```python
import locant

model = locant.load("PATH")
```
"""


def load(path: str | Path, auto: Any = None, *, layers: int | None = None, **kwargs: Any) -> PreTrainedModel:
    """Opens a folder of a swapped model; also a checkpoint with `position_embedding_type` relative_key(_query).

    auto      an Auto class or a model class (AutoModelForMaskedLM, BertModel, …); by default the class that was saved.
    layers    open the first so many layers only, for a look at a model that does not fit into memory.
    kwargs    go to its `from_pretrained`: dtype, device_map, num_labels, ….
    """
    from locant.hf import relative_key

    where = {name: kwargs[name] for name in ("revision", "subfolder", "cache_dir", "token") if name in kwargs}
    data, _ = PreTrainedConfig.get_config_dict(path, **where)
    if data.get("model_type") != "locant":
        if data.get("position_embedding_type") in relative_key.SPECS:
            if layers is not None:
                raise ValueError(f"{path} has positions of an older kind; it can be opened as a whole only")
            return relative_key.load(path, auto, data, **kwargs)
        config = AutoConfig.from_pretrained(path)
        cls = _class(auto, config, data)
        if layers is None:
            return cls.from_pretrained(path, **kwargs)  # type: ignore[no-any-return]
        _cut(config, layers)
        with _quiet():
            return cls.from_pretrained(path, config=config, **kwargs)  # type: ignore[no-any-return]

    inner = dict(data["locant"])
    planned = inner.pop("locant")
    for stack in planned["stacks"]:
        stack["layers"] = stack["layers"][:layers]
    Plan.from_config(planned)  # before anything is built: an unknown scheme is said first
    length = inner.pop("max_position_embeddings_before_locant", None)
    if length is not None:
        inner["max_position_embeddings"] = length
    config = AutoConfig.for_model(inner.pop("family"), **inner)
    for name in [name for name in kwargs if hasattr(config, name) and name not in ("dtype", "torch_dtype")]:
        setattr(config, name, kwargs.pop(name))  # num_labels and the like belong to the config
    if layers is not None:
        _cut(config, layers)
    cls = _class(auto, config, data)

    class Loading(cls):  # type: ignore[misc, valid-type]
        """The class with its schemes in place before transformers fills in the weights."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            attach(self, Plan.from_config(planned))  # built here, they have the dtype and device of the rest

    Loading.__name__, Loading.__qualname__, Loading.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    kwargs.pop("attn_implementation", None)
    kwargs.pop("output_loading_info", None)
    with _quiet() if layers is not None else nullcontext():
        model, info = Loading.from_pretrained(path, config=config, output_loading_info=True, **kwargs)
    plan = plan_of(model)
    assert plan is not None
    ours = {f"{name}." for name, _ in _places(model, plan)}
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if what == "unexpected_keys" and layers is not None:  # those of the layers that were left out
            continue
        wrong = [str(key) for key in info.get(what, ()) if any(place in str(key) for place in ours)]
        if wrong:
            raise ValueError(
                f"{path}: the weights do not fit the schemes of its config; {what}: {', '.join(wrong[:4])}"
            )
    model.__class__ = cls
    plan.native_is_lost = any(replaced.original is not None for replaced in plan.replaced)
    return model  # type: ignore[no-any-return]


LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
"""Where configs say how many layers there are; the first has many names that lead to it."""


def _cut(config: Any, layers: int) -> None:
    """A config of the first layers."""
    whole = getattr(config, "num_hidden_layers", None)
    if not isinstance(whole, int) or not 1 <= layers <= whole:
        raise ValueError(f"layers must be from 1 to the {whole} that the model has, got {layers}")
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == whole:  # an entry for each layer
            setattr(config, name, value[:layers])
    for name in LAYERS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(layers, getattr(config, name)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the list of weights that were not used: those of the layers left out are meant to be."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _places(model: PreTrainedModel, plan: Plan) -> list[tuple[str, torch.nn.Module]]:
    schemes = plan.schemes()
    return [(name, module) for name, module in model.named_modules() if any(module is scheme for scheme in schemes)]


def _mapped(auto: Any, config: Any) -> Any:
    found = auto._model_mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def _class(auto: Any, config: Any, data: dict[str, Any]) -> Any:
    """The model class to build: what was asked for, or what was saved."""
    if auto is None:
        names = data.get("architectures") or []
        found = getattr(transformers, names[0], None) if names else None
        if found is None:
            found = _mapped(AutoModel, config)
            says = f"names {names[0]}, which transformers does not have" if names else "names no class (architectures)"
            warnings.warn(
                f"config.json {says}: the model is opened as {found.__name__}, without a head; if it has one, name its "
                f"class as the second argument of locant.load",
                stacklevel=3,
            )
        return found
    if hasattr(auto, "_model_mapping"):
        return _mapped(auto, config)
    if isinstance(auto, type) and issubclass(auto, PreTrainedModel):
        return auto
    raise TypeError(f"auto must be an Auto class or a model class of transformers, got {auto!r}")
