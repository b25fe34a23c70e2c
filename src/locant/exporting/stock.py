"""A model of a stock architecture, made from the weights of another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from locant.exporting.refusal import CannotExport


def same_tokens(ids: Tensor) -> Tensor:
    """The tokens keep their ids."""
    return ids


@dataclass(frozen=True)
class Stock:
    """A plain model of transformers that stands for a swapped one."""

    model: PreTrainedModel
    tokenizer: Any | None
    length: int | None  # tokens that it reads; None: any number
    ids: Callable[[Tensor], Tensor] = same_tokens  # from the token ids of the swapped model to its own
    counts_left_padding: bool = False  # without position_ids its positions count padding on the left
    rounded_angles: bool = False  # it computes RoPE's angles in float32, whose error grows with the position
    notices: list[str] = field(default_factory=list)


def build(cls: type[PreTrainedModel], config: Any, weights: dict[str, Tensor], positions: tuple[str, ...] = ()) -> Any:
    """Builds a model and fills in all of its weights; raises CannotExport if one is missing or has no place.

    positions   ends of the names of weights that may be missing, because the caller sets them.
    """
    some = next(iter(weights.values()))
    model: Any = cls(config)
    model = model.to(dtype=some.dtype, device=some.device)
    found = model.load_state_dict(weights, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = [name for name in found.missing_keys if not name.endswith(positions or ("\0",)) and name not in tied]
    if missing or found.unexpected_keys:
        raise CannotExport(
            f"{cls.__name__} does not have the weights of this model; missing {missing[:3]}, without a place "
            f"{found.unexpected_keys[:3]}"
        )
    return model.eval()
