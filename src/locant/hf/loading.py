"""Opens the folder of a swapped model: `locant.load`, and transformers' Auto classes once locant.hf is imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from locant.hf import relative_key
from locant.hf.attaching import attach
from locant.hf.model_class import model_class
from locant.hf.plan import Plan, plan_of
from locant.hf.saving import SIZES, save_pretrained


class LocantConfig(PreTrainedConfig):
    """The config that AutoConfig makes of our folder: enough for the Auto classes to call `load`."""

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
        # AutoConfig took the arguments it knows (num_labels, …) out of kwargs: they belong to the model's own config.
        ours = {"model_type", "architectures", "transformers_version", "locant_version", "locant", "dtype", *SIZES}
        taken = {} if config is None else {k: v for k, v in config.to_diff_dict().items() if k not in ours}
        return load(path, auto, **{**taken, **kwargs})

    return staticmethod(from_pretrained)


def load(path: str | Path, auto: Any = None, *, layers: int | None = None, **kwargs: Any) -> PreTrainedModel:
    """Opens a folder of a swapped model; also a checkpoint with `position_embedding_type` relative_key(_query).

    auto      an Auto class or a model class (AutoModelForMaskedLM, BertModel, …); by default the class that was saved.
    layers    how many layers to open, from the first one on; for a model that does not fit into memory.
    kwargs    go to its `from_pretrained`: dtype, device_map, num_labels, ….
    """
    where = {name: kwargs[name] for name in ("revision", "subfolder", "cache_dir", "token") if name in kwargs}
    data, _ = PreTrainedConfig.get_config_dict(path, **where)
    if data.get("model_type") == "locant":
        return _load_swapped(path, auto, data, layers, kwargs)
    if data.get("position_embedding_type") in relative_key.SPECS:
        if layers is not None:
            raise ValueError(f"{path} has positions of an older kind; it can only be opened whole")
        return relative_key.load(path, auto, data, **kwargs)
    config = AutoConfig.from_pretrained(path)
    cls = model_class(auto, config, data)
    if layers is None:
        return cls.from_pretrained(path, **kwargs)  # type: ignore[no-any-return]
    _cut(config, layers)
    with _quiet():
        return cls.from_pretrained(path, config=config, **kwargs)  # type: ignore[no-any-return]


def _load_swapped(
    path: str | Path, auto: Any, data: dict[str, Any], layers: int | None, kwargs: dict[str, Any]
) -> PreTrainedModel:
    inner = dict(data["locant"])
    planned = inner.pop("locant")
    for stack in planned["stacks"]:
        stack["layers"] = stack["layers"][:layers]
    Plan.from_config(planned)  # first, so that an unknown scheme raises before anything is built
    length = inner.pop("max_position_embeddings_before_locant", None)
    if length is not None:
        inner["max_position_embeddings"] = length
    config = AutoConfig.for_model(inner.pop("family"), **inner)
    for name in [name for name in kwargs if hasattr(config, name) and name not in ("dtype", "torch_dtype")]:
        setattr(config, name, kwargs.pop(name))  # num_labels and the like belong to the config
    if layers is not None:
        _cut(config, layers)
    cls = model_class(auto, config, data)

    class Loading(cls):  # type: ignore[misc, valid-type]
        """The class with its schemes in place before transformers fills in the weights."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # Built here, the schemes get the dtype and device of the rest.
            attach(self, Plan.from_config(planned), save_pretrained)

    Loading.__name__, Loading.__qualname__, Loading.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    kwargs.pop("attn_implementation", None)
    kwargs.pop("output_loading_info", None)
    with _quiet() if layers is not None else nullcontext():
        model, info = Loading.from_pretrained(path, config=config, output_loading_info=True, **kwargs)
    model.__class__ = cls
    plan = plan_of(model)
    assert plan is not None
    _check_weights(path, model, plan, info, cut=layers is not None)
    plan.native_is_lost = any(replaced.original is not None for replaced in plan.replaced)
    return model  # type: ignore[no-any-return]


def _check_weights(path: str | Path, model: PreTrainedModel, plan: Plan, info: dict[str, Any], *, cut: bool) -> None:
    """Raises ValueError unless the folder has exactly the weights of the schemes."""
    ours = {f"{name}." for name, _ in _places(model, plan)}
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if what == "unexpected_keys" and cut:  # those of the layers that were left out
            continue
        wrong = [str(key) for key in info.get(what, ()) if any(place in str(key) for place in ours)]
        if wrong:
            raise ValueError(
                f"{path}: the weights do not fit the schemes of its config; {what}: {', '.join(wrong[:4])}"
            )


LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
"""Config entries with a number of layers. Many configs have other names that map to the first."""


def _cut(config: Any, layers: int) -> None:
    """Cuts a config down to its first layers."""
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
    """Hides the warning that lists unused weights: those of the layers left out are unused on purpose."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _places(model: PreTrainedModel, plan: Plan) -> list[tuple[str, torch.nn.Module]]:
    """The schemes of a model with their names in it."""
    schemes = plan.schemes()
    return [(name, module) for name, module in model.named_modules() if any(module is scheme for scheme in schemes)]
