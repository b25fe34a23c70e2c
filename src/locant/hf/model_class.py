"""Which class of transformers opens a folder."""

from __future__ import annotations

import warnings
from typing import Any

import transformers
from transformers import AutoModel, PreTrainedModel

from locant.runs.untrusted import shortened


def model_class(auto: Any, config: Any, data: dict[str, Any]) -> Any:
    """Returns the model class to build: `auto`, or the class that was saved."""
    if auto is None:
        return _saved(config, data)
    if hasattr(auto, "_model_mapping"):
        return _mapped(auto, config)
    if isinstance(auto, type) and issubclass(auto, PreTrainedModel):
        return auto
    raise TypeError(f"auto must be an Auto class or a model class of transformers, got {auto!r}")


def _saved(config: Any, data: dict[str, Any]) -> Any:
    """The class that config.json names; if it names none, the one without a head, with a warning."""
    names = data.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"architectures in config.json must be a list of class names, got {shortened(names)}")
    found = getattr(transformers, names[0], None) if names else None
    if found is None:
        found = _mapped(AutoModel, config)
        wrong = (
            f"names {names[0][:80]}, which transformers does not have" if names else "names no class (architectures)"
        )
        warnings.warn(
            f"config.json {wrong}: opening the model as {found.__name__}, without a head. If it has a head, pass "
            f"its class as the second argument of locant.load",
            stacklevel=4,
        )
    fits = isinstance(found, type) and issubclass(found, PreTrainedModel) and found.config_class is type(config)
    if not fits:
        raise ValueError(
            f"architectures in config.json names {shortened(names[0])}, which is no class of {config.model_type} models"
        )
    return found


def _mapped(auto: Any, config: Any) -> Any:
    try:
        found = auto._model_mapping[type(config)]
    except KeyError:
        raise ValueError(f"{auto.__name__} has no class for {config.model_type} models") from None
    return found[0] if isinstance(found, tuple) else found
