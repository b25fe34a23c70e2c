"""Weights that are not numbers: a model that has some is refused before it is changed."""

from __future__ import annotations

from transformers import PreTrainedModel


def check_finite(model: PreTrainedModel) -> None:
    """Raises ValueError if a weight of the model is NaN or infinite."""
    broken = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    if broken:
        more = f", and so have {len(broken) - 1} more" if len(broken) > 1 else ""
        raise ValueError(
            f"{broken[0]} has numbers that are not finite (NaN or ∞){more}; load the model again, or a checkpoint from "
            f"before its training diverged"
        )
