"""The config that transformers' AutoConfig makes of the folder of a swapped model."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transformers.configuration_utils import PreTrainedConfig


class LocantConfig(PreTrainedConfig):
    """Enough for the Auto classes to call `locant.load`. Reading one from a folder imports `locant.hf`."""

    model_type = "locant"

    @classmethod
    def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
        """Replaces that of transformers: the Auto classes get to know the models when the first folder is opened."""
        import_module("locant.hf")
        return super().from_dict(*args, **kwargs)
