"""Which class of transformers opens a folder."""

from __future__ import annotations

import warnings
from typing import Any

import transformers
from transformers import AutoModel, PreTrainedModel


def model_class(auto: Any, config: Any, data: dict[str, Any]) -> Any:
    """Returns the model class to build: `auto`, or the class that was saved."""
    if auto is None:
        names = data.get("architectures") or []
        found = getattr(transformers, names[0], None) if names else None
        if found is None:
            found = _mapped(AutoModel, config)
            wrong = f"names {names[0]}, which transformers does not have" if names else "names no class (architectures)"
            warnings.warn(
                f"config.json {wrong}: opening the model as {found.__name__}, without a head. If it has a head, pass "
                f"its class as the second argument of locant.load",
                stacklevel=3,
            )
        return found
    if hasattr(auto, "_model_mapping"):
        return _mapped(auto, config)
    if isinstance(auto, type) and issubclass(auto, PreTrainedModel):
        return auto
    raise TypeError(f"auto must be an Auto class or a model class of transformers, got {auto!r}")


def _mapped(auto: Any, config: Any) -> Any:
    found = auto._model_mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found
