"""The layers of a stack that attend, and those that do not."""

from __future__ import annotations

from torch import nn

from locant.hf.plan import Attention


def other_layers(base: nn.Module, path: str, attentions: list[Attention]) -> int:
    """Returns the number of layers of a stack that have no self-attention."""
    stack = base.get_submodule(path)
    attending = {base.get_submodule(attention.name) for attention in attentions}
    lists = [module for module in stack.modules() if isinstance(module, nn.ModuleList)]
    # The outermost list with an attention in it is that of the layers; lists of experts are inside.
    layers = next((each for each in lists if any(x in attending for x in each.modules())), None)
    if layers is None:
        return 0
    return sum(not any(x in attending for x in layer.modules()) for layer in layers)
