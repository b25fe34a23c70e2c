"""Models of the user's own in a comparison: `--model my_model:build`.

`build` is a function of one argument, `Wanted`. It returns a model of transformers, into which locant swaps the scheme,
or any `nn.Module` that calls `locant.attend` with the schemes of `wanted.schemes(…)`. A module maps input_ids [B, L]
and attention_mask [B, L] to logits [B, L, vocabulary]; `OwnModel` adds the loss and what the Trainer needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

from locant import spec as specs
from locant.experiments.presets import Preset
from locant.hf.modes import evaluating
from locant.schemes import Scheme

HEADS = ("AutoModelForCausalLM", "AutoModelForMaskedLM")
"""Tasks that need logits of tokens alone. Others need a head of transformers."""


@dataclass
class Wanted:
    """What a comparison asks of a model."""

    preset: Preset  # layers, heads, width, length, …
    vocabulary: int
    positions: int  # tokens of the longest training example
    auto: str  # the Auto class of transformers with the head of the task
    tokens: dict[str, int | None]  # pad_token_id, bos_token_id, eos_token_id
    head: dict[str, Any]  # config entries of the task's head
    spec: str  # the scheme of this run
    made: list[Scheme] = field(default_factory=list)

    def schemes(self, n_layers: int, *, n_heads: int, head_dim: int, d_model: int) -> nn.ModuleList:
        """Returns one scheme per layer, for a module that calls `locant.attend` itself.

        It leaves the random numbers as they are: all schemes get a module with the same initial weights.
        """
        with torch.random.fork_rng(devices=[]):
            built = specs.per_layer(self.spec, n_layers, n_heads=n_heads, head_dim=head_dim, d_model=d_model)
        self.made = list(built)  # type: ignore[arg-type]
        return built


class OwnConfig(PreTrainedConfig):
    """The config of a model of the user's own."""

    model_type = "locant_own"


class OwnModel(PreTrainedModel):
    """A module of the user's own, with a loss."""

    config_class = OwnConfig

    def __init__(self, module: nn.Module, *, causal: bool) -> None:
        super().__init__(OwnConfig())
        self.module, self.causal = module, causal

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **_: Any
    ) -> MaskedLMOutput:
        """Returns the logits, and the loss if there are labels; of a causal model labels are shifted by one."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits: Tensor = self.module(input_ids, mask)
        loss = None
        if labels is not None:
            said, wanted = (logits[:, :-1], labels[:, 1:]) if self.causal else (logits, labels)
            loss = F.cross_entropy(said.flatten(0, 1).float(), wanted.flatten())
        return MaskedLMOutput(loss=loss, logits=logits)  # type: ignore[arg-type]

    @property
    def longest_input(self) -> int | None:
        """How many tokens the schemes can read; None for any number."""
        every = [part.max_length for part in self.modules() if isinstance(part, Scheme)]
        return min((length for length in every if length is not None), default=None)

    @torch.no_grad()
    def reads_later_tokens(self) -> bool:
        """Whether another last token changes the logits of earlier ones."""
        some = torch.tensor([[1, 2, 3, 1]])
        other = torch.tensor([[1, 2, 3, 2]])
        with evaluating(self):
            first, second = (self(x).logits[:, :-1] for x in (some, other))
        return not torch.allclose(first, second, atol=1e-6)


def finish(made: Any, wanted: Wanted) -> PreTrainedModel | None:
    """Returns the model of a module; None for a model of transformers, which is swapped later."""
    if isinstance(made, PreTrainedModel):
        return None
    if not isinstance(made, nn.Module):
        raise ValueError(f"the function of the model must return an nn.Module, got {type(made).__name__}")
    if wanted.auto not in HEADS:
        raise ValueError(f"this task needs a model with the head of {wanted.auto}; a module of your own has none")
    if not wanted.made:
        raise ValueError("the module has no scheme: build it with wanted.schemes(…), or return a model of transformers")
    model = OwnModel(made, causal=wanted.auto == HEADS[0])
    _check_used(model, wanted)
    return model


@torch.no_grad()
def _check_used(model: OwnModel, wanted: Wanted) -> None:
    """Raises ValueError if the module ignores a scheme: it would be compared as if it had that scheme."""
    called: set[tuple[int, str]] = set()
    needs = {"embed": "embeds", "rotate": "rotates", "terms": "has_terms", "sides": "has_sides",
             "rotate_far": "has_far"}  # fmt: skip
    # A scheme that only adds to the token embeddings is used once, by the first layer.
    asked = [
        (number, scheme, name)
        for number, scheme in enumerate(wanted.made)
        for name, has in needs.items()
        if getattr(scheme, has) and (name != "embed" or number == 0)
    ]
    for number, scheme, name in asked:
        scheme.__dict__[name] = _noting(getattr(scheme, name), called, (number, name))
    try:
        with evaluating(model):
            shape = model(torch.tensor([[1, 2, 3]])).logits.shape
    finally:
        for _, scheme, name in asked:
            scheme.__dict__.pop(name, None)
    if shape != (1, 3, wanted.vocabulary):
        raise ValueError(f"the module must return logits [B, L, {wanted.vocabulary}]; got {list(shape)} for [1, 3]")
    for number, scheme, name in asked:
        if (number, name) not in called:
            what = "scheme.embed(positions) is not added to the tokens" if name == "embed" else (
                f"locant.attend is not called with the scheme of layer {number + 1}"
            )  # fmt: skip
            raise ValueError(f"the module does not use {scheme}: {what}")


def _noting(method: Callable[..., Any], called: set[tuple[int, str]], what: tuple[int, str]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        called.add(what)
        return method(*args, **kwargs)

    return noted
