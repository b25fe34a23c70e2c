"""The config of a swapped model does not build another one: transformers would make a model without the schemes.

It would also have a table of `ANY_LENGTH` rows, since the config names the number of positions that the swapped model
reads. transformers has no place to ask before a model is built, so `refuse_to_build` wraps the constructor of
`PreTrainedModel`, once.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedModel

NAME = "locant"
"""Entry of the config of a swapped model: its plan."""


def refuse_to_build() -> None:
    """Makes transformers raise a ValueError instead of building a model from the config of a swapped one."""
    build: Any = PreTrainedModel.__init__
    if hasattr(build, NAME):
        return

    @functools.wraps(build)
    def checked(self: PreTrainedModel, config: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(getattr(config, NAME, None), dict):
            raise ValueError(
                f"this config is that of a {config.model_type} model that locant has swapped. transformers would build "
                f"{type(self).__name__} from it without its schemes. Copy the model with copy.deepcopy(model) or save "
                f"it and call locant.load; for a new model, build one from the original config and call locant.swap"
            )
        build(self, config, *args, **kwargs)

    setattr(checked, NAME, build)
    PreTrainedModel.__init__ = checked  # type: ignore[method-assign]
