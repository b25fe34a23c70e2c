"""ALiBi that a model adds to its logits itself: Bloom, MPT, Falcon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from locant.hf.interface import original
from locant.hf.mechanisms.base import Read, Replaced, Run, add_embedding
from locant.hf.methods import replace_method
from locant.schemes import Alibi, Scheme


@dataclass(frozen=True)
class LinearBias:
    """ALiBi. The attention of a swapped model ignores the biases of the model, so there is nothing to silence."""

    options: dict[str, Any] = field(default_factory=dict)
    """Of the scheme `alibi`."""
    forward: Callable[..., Any] | None = None
    """A forward for the stack of a swapped model, which checks its arguments."""
    kind: str = "bias"

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        replaced = add_embedding(stack, embed)
        if self.forward is not None:
            replace_method(stack, "forward", self.forward)
            replaced.append(Replaced(stack, "forward", None))
        return replaced

    def read(self, stack: nn.Module, attentions: list[nn.Module], run: Run) -> Read:
        n_heads: Any = stack.num_heads
        return Read(self.kind, None, [Alibi(**self.options, n_heads=n_heads) for _ in attentions])

    def own_table(self, stack: nn.Module) -> Tensor | None:
        return None

    def width(self, stack: nn.Module) -> int:
        return int(stack.get_input_embeddings().weight.shape[1])  # type: ignore[operator]


class Setting(Replaced):
    """A plain attribute of a module that was changed."""

    def __init__(self, parent: nn.Module, name: str, value: Any) -> None:
        super().__init__(parent, name, None)
        self.before = getattr(parent, name)
        setattr(parent, name, value)

    def put_back(self) -> None:
        setattr(self.parent, self.name, self.before)


@dataclass(frozen=True)
class FalconBias(LinearBias):
    """Falcon's ALiBi: inside 1/√d, and a product of bfloat16 numbers whatever the dtype of the model.

    The rounded products are not a function of the offset, so the scheme needs the positions of the keys.
    """

    options: dict[str, Any] = field(default_factory=lambda: {"scaled": True, "rounding": "bfloat16"})

    def read(self, stack: nn.Module, attentions: list[nn.Module], run: Run) -> Read:
        config: Any = stack.config
        if original(config._attn_implementation) == "eager":
            raise NotImplementedError(
                "transformers adds Falcon's ALiBi twice with attn_implementation='eager', once in the mask and once in "
                "the logits; open the model with attn_implementation='sdpa', which adds it once"
            )
        return super().read(stack, attentions, run)

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        # With use_alibi the model writes its biases into the mask.
        return [*super().silence(stack, embed, keep), Setting(stack, "use_alibi", False)]
