"""Whether gradients of a model can be computed; refused in words where they cannot."""

from __future__ import annotations

from itertools import chain

import torch
from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationMethod


def check_differentiable(model: PreTrainedModel) -> None:
    """Raises ValueError if the weights of a model, or torch's modes, allow no exact gradients."""
    weights = list(chain(model.parameters(), model.buffers()))
    if any(weight.is_meta for weight in weights):
        raise ValueError("the model has no weights yet (its parameters are on the meta device); load them first")
    method = getattr(model, "quantization_method", None)
    # Transformers opens GGUF files in floating point, and still calls them quantised.
    quantized = getattr(model, "is_quantized", False) and method != QuantizationMethod.GGUF
    packed = any("quantized" in type(part).__module__ for part in model.modules())
    whole = any(not parameter.is_floating_point() for parameter in model.parameters())
    if quantized or packed or whole:
        raise ValueError(
            f"the weights of the model are quantised{f' ({method})' if method else ''}, and rounding has no gradient; "
            f"load the model in floating point"
        )
    if any(weight.is_inference() for weight in weights):
        raise ValueError(
            "the model was made inside torch.inference_mode(), and its weights can never have gradients; make or load "
            "it outside"
        )
    device = next(model.parameters()).device.type
    if torch.is_autocast_enabled(device):
        raise ValueError(
            f"torch.autocast is on for {device}, and rounds what is computed to half precision; call this outside "
            f"autocast"
        )
