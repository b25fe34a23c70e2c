"""Rotary positions: cos and sin are computed once per forward and used in every layer, or in every layer anew."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from locant.hf.mechanisms.base import Read, Replaced, Run, add_embedding, embedding_width, find
from locant.hf.mechanisms.unturned import Form, Unturned, form_of_calls, form_of_module
from locant.hf.rotary_calls import RotaryCall
from locant.hf.rotary_layers import read_layer
from locant.hf.two_runs import first_run, second_run
from locant.schemes import Scheme


@dataclass(frozen=True)
class Rotary:
    """Modules that make cos and sin, which the attention modules apply to queries and keys (Llama and most since).

    Nothing is known about a family but where these modules are. Which coordinates turn, in which pairs and how fast is
    measured in two runs (`two_runs`, `turning`).
    """

    paths: tuple[str, ...] = ("rotary_emb",)
    """Where the modules are, below the stack."""
    forms: tuple[Form, ...] = ()
    """What they return, one each. Without it the modules must be called as transformers' own are (`form_of_module`)."""
    kind: str = "rotary"

    def silence(self, stack: nn.Module, embed: Scheme | None, keep: bool) -> list[Replaced]:
        replaced = []
        originals = self.modules(stack)
        forms = self.forms or [form_of_module(each) for each in originals.values()]
        for (path, original), form in zip(originals.items(), forms, strict=True):
            parent, name = find(stack, path)
            setattr(parent, name, Unturned(form, original))
            replaced.append(Replaced(parent, name, original))
        return [*replaced, *add_embedding(stack, embed)]

    def read(self, stack: nn.Module, attentions: list[nn.Module], run: Run) -> Read:
        runs = first_run(run, attentions, self.modules(stack), stack)
        replaced = self.described(runs.rotary).silence(stack, None, keep=False)
        try:
            second_run(run, runs)
        finally:
            for each in reversed(replaced):
                each.put_back()
        return Read(self.kind, None, [read_layer(stack, attention, runs) for attention in attentions])

    def own_table(self, stack: nn.Module) -> Tensor | None:
        return None

    def width(self, stack: nn.Module) -> int:
        return embedding_width(stack)

    def modules(self, stack: nn.Module) -> dict[str, nn.Module]:
        """Returns the rotary modules by their paths."""
        return {path: stack.get_submodule(path) for path in self.paths}

    def described(self, calls: list[RotaryCall]) -> Rotary:
        """Returns the same mechanism with the forms that calls of its modules had."""
        missing = [path for path in self.paths if not any(call.path == path for call in calls)]
        if missing:
            raise NotImplementedError(f"the model did not call its rotary modules {', '.join(missing)}")
        forms = [form_of_calls(call for call in calls if call.path == path) for path in self.paths]
        return replace(self, forms=tuple(forms))
