"""Opens the folder of a swapped model: `locant.load`, and transformers' Auto classes once locant.hf is imported."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from locant import imports as own
from locant.hf import checkpoint, interface, own_schemes, relative_key
from locant.hf.attaching import attach, set_length
from locant.hf.building import in_words, open_model
from locant.hf.checkpoint import Weights
from locant.hf.family_record import restore
from locant.hf.model_class import model_class
from locant.hf.plan import Plan, plan_of
from locant.hf.plan_check import check_digest, check_fits, check_plan
from locant.hf.saving import SIZES, save_pretrained
from locant.hf.seam import configs
from locant.transformers_config import LocantConfig

OTHER_FILES = {"variant", "gguf_file", "use_safetensors", "state_dict"}
"""Arguments of from_pretrained with which the weights are not those of model.safetensors."""
SCHEME = re.compile(rf"(^|\.)({interface.NAME}|{interface.EMBED}|scheme)\.")
"""In the name of a weight: it belongs to a scheme of an attention, or of the token embeddings."""


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
        return load(path, auto, **{**_taken(path, config), **kwargs})

    return staticmethod(from_pretrained)


def _taken(path: str, config: Any) -> dict[str, Any]:
    """The arguments that AutoConfig took out of the caller's (num_labels, …): they belong to the model's own config.

    They are in `config` among the entries of config.json. Those entries are not arguments: a folder must not choose how
    it is opened.
    """
    if config is None:
        return {}
    written, plain = checkpoint.config_of(path), LocantConfig()
    ours = {"model_type", "architectures", "transformers_version", "locant_version", "locant", "dtype", *SIZES}
    return {
        name: value
        for name, value in config.to_diff_dict().items()
        if name not in ours and hasattr(plain, name) and (name not in written or value != written[name])
    }


def load(
    path: str | Path, auto: Any = None, *, layers: int | None = None,
    imports: str | Path | Sequence[str | Path] = (), **kwargs: Any,
) -> PreTrainedModel:  # fmt: skip
    """Opens a folder of a swapped model; also a checkpoint with `position_embedding_type` relative_key(_query).

    auto      an Auto class or a model class (AutoModelForMaskedLM, BertModel, …); by default the class that was saved.
    layers    how many layers to open, from the first one on; for a model that does not fit into memory.
    imports   files or modules with schemes of your own that the model has. Code of a folder runs only if you name it.
    kwargs    go to its `from_pretrained`: dtype, device_map, num_labels, ….
    """
    if kwargs.pop("trust_remote_code", False):
        raise ValueError(f"locant never runs code from a model folder; open {path} without trust_remote_code")
    own.load(imports)
    where = {name: kwargs[name] for name in ("revision", "subfolder", "cache_dir", "token") if name in kwargs}
    checkpoint.check_name(path, kwargs.get("subfolder", ""))
    data = checkpoint.config_of(path, **where)
    weights = None if OTHER_FILES & kwargs.keys() else checkpoint.weights_of(path, **where)
    checkpoint.check_counts(data, weights, path)
    if data.get("model_type") == "locant":
        return _load_swapped(path, auto, data, weights, layers, kwargs)
    if data.get("position_embedding_type") in relative_key.SPECS:
        if layers is not None:
            raise ValueError(f"{path} has positions of an older kind; it can only be opened whole")
        return relative_key.load(path, auto, data, weights, **kwargs)
    with in_words(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, **where)
    cls = model_class(auto, config, data)
    if layers is None:
        return open_model(cls, path, weights, **kwargs)[0]
    _cut(config, layers)
    with _quiet():
        return open_model(cls, path, weights, config=config, **kwargs)[0]


def _load_swapped(
    path: str | Path, auto: Any, data: dict[str, Any], weights: Weights | None, layers: int | None,
    kwargs: dict[str, Any],
) -> PreTrainedModel:  # fmt: skip
    inner = data.get("locant")
    if not isinstance(inner, dict) or not isinstance(inner.get("family"), str):
        raise ValueError(f"{path}: {checkpoint.CONFIG} must have an object 'locant' with the family of the model")
    inner = dict(inner)
    planned = inner.pop("locant", None)
    with in_words(path):
        check_plan(planned, weights)
        own_schemes.check(path, planned)
        whole_plan = copy.deepcopy(planned)
        for stack in planned["stacks"]:
            stack["layers"] = stack["layers"][:layers]
        with torch.device("meta"):  # first, so that an unknown scheme raises before anything is built
            Plan.from_config(planned)
        length = inner.pop("max_position_embeddings_before_locant", None)
        # Transformers writes infinity, which JSON does not have, as an object.
        config = AutoConfig.for_model(inner.pop("family"), **PreTrainedConfig._decode_special_floats(inner))
        if length is not None:  # afterwards: some configs have another name for it (GPT-2: n_positions)
            config.max_position_embeddings = length
    for name in [name for name in kwargs if hasattr(config, name) and name not in ("dtype", "torch_dtype")]:
        setattr(config, name, kwargs.pop(name))  # num_labels and the like belong to the config
    if layers is not None:
        _cut(config, layers)
    cls = model_class(auto, config, data)

    def attach_plan(model: PreTrainedModel) -> None:
        """Before transformers fills in the weights: the schemes then get the dtype and device of the rest."""
        plan = Plan.from_config(planned)
        restore(model, plan.family)
        check_fits(plan, model)
        attach(model, plan, save_pretrained)
        if weights is not None:
            _check_schemes(path, model, weights)
        for each in configs(model):  # until the weights are there: GPT-BigCode makes a mask of this size squared
            if "max_position_embeddings" in plan.before:
                each.max_position_embeddings = plan.before["max_position_embeddings"]

    kwargs.pop("attn_implementation", None)
    with _quiet() if layers is not None else nullcontext():
        model, info = open_model(cls, path, weights, prepare=attach_plan, config=config, **kwargs)
    plan = plan_of(model)
    assert plan is not None
    set_length(model, plan)
    _check_weights(path, model, info, whole=auto is None, cut=layers is not None)
    _check_numbers(path, plan)
    with in_words(path):  # last: the other errors say what is wrong
        check_digest(whole_plan.get("digest"), whole_plan)
    plan.native_is_lost = any(replaced.original is not None for replaced in plan.replaced)
    return model


def _check_schemes(path: str | Path, model: PreTrainedModel, weights: Weights) -> None:
    """Raises ValueError if a table in the weights has a shape or dtype that no scheme of the model has.

    Tables are compared by the end of their names, from the scheme on: transformers renames the rest of some models.
    """
    tables: dict[str, list[tuple[list[int], bool]]] = {}
    for key, value in model.state_dict().items():
        if found := SCHEME.search(key):
            form = list(value.shape), value.is_floating_point()
            tables.setdefault(key[found.start() :].lstrip("."), []).append(form)
    wrong = []
    for key, entry in weights.tensors.items():
        found = SCHEME.search(key)
        expected = tables.get(key[found.start() :].lstrip(".")) if found else None
        if expected is not None and not any(
            list(entry.shape) == shape and ("F" in entry.dtype if floating else entry.dtype == "I64")
            for shape, floating in expected
        ):
            shape, floating = expected[0]
            kind = "floating point" if floating else "I64"
            wrong.append(f"{key} {list(entry.shape)} in {entry.dtype}, expected {shape} in {kind}")
    _refuse(path, {"mismatched_keys": wrong})


def _refuse(path: str | Path, wrong: Mapping[str, Collection[str]]) -> None:
    """Raises ValueError if there is something wrong. `wrong` has the names of weights by what is wrong with them."""
    for what, keys in wrong.items():
        if keys:
            raise ValueError(
                f"{path}: the weights do not fit the schemes of its config; {what}: {', '.join(sorted(keys)[:4])}"
            )


def _check_weights(path: str | Path, model: PreTrainedModel, info: dict[str, Any], *, whole: bool, cut: bool) -> None:
    """Raises ValueError unless the folder has the weights of the model.

    A head may be missing where another class was saved, and so may a pooling layer; transformers warns about it.

    whole    the model has the class that was saved, so it has a place for every weight, and a weight for every place
    cut      layers were left out, and their weights with them
    """

    def part(key: str) -> str:
        return key.removeprefix(f"{model.base_model_prefix}.").partition(".")[0]

    def may_be_missing(key: str) -> bool:
        name = part(key)
        if SCHEME.search(key):
            return False
        return "pool" in name and name not in filled if name in below else not whole

    missing, unexpected, mismatched = (
        {str(key) for key in info.get(what, ())} for what in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    filled = {part(key) for key in model.state_dict().keys() - missing}
    below = {name for name, _ in model.base_model.named_children()}
    wrong = {
        "missing_keys": [key for key in missing if not may_be_missing(key)],
        "unexpected_keys": [key for key in unexpected if not cut and (whole or SCHEME.search(key))],
        "mismatched_keys": list(mismatched),
    }
    _refuse(path, wrong)


def _check_numbers(path: str | Path, plan: Plan) -> None:
    """Raises ValueError if a weight of a scheme is NaN or infinite."""
    for scheme in plan.schemes():
        for name, weight in scheme.named_parameters():
            if not weight.is_meta and not weight.isfinite().all():
                raise ValueError(f"{path}: {name} of {scheme} has numbers that are not finite (NaN or ∞)")


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
