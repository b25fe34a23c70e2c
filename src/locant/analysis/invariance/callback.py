"""Records R² during training: a callback for transformers' Trainer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, TrainerCallback

from locant.analysis.invariance.schemes import scheme_logits
from locant.analysis.invariance.scores import head_logits, rows_of
from locant.analysis.invariance.stack import Stack, stacks
from locant.analysis.invariance.toeplitz import r2_of, without_diagonal


@torch.no_grad()
def _now(stacks: list[Stack], first: int, last: int | None) -> dict[str, float]:
    """Every R² that training can change, by its name in the logs, without intervals and controls."""
    values = {}
    for stack in stacks:
        prefix = f"invariance/{stack.name}/" if stack.name else "invariance/"
        if stack.table is not None:
            rows, _, _ = rows_of(stack.table(), first, last)
            values[f"{prefix}gram"] = float(r2_of(rows @ rows.mT))
            values[f"{prefix}off_diagonal"] = float(r2_of(without_diagonal(rows @ rows.mT)))
            unit = F.normalize(rows, dim=-1)
            values[f"{prefix}cosine"] = float(r2_of(unit @ unit.mT))
            weights = stack.head_weights()
            if weights is not None:
                heads = r2_of(head_logits(rows, *weights, stack.attentions[0].n_heads, None))
                values |= {f"{prefix}head_{head}": float(r2) for head, r2 in enumerate(heads, start=1)}
        changing = {
            id(scheme): (layer, module, attention, scheme)
            for layer, (module, attention, scheme) in enumerate(
                zip(stack.modules, stack.attentions, stack.schemes, strict=False), start=1
            )
            if list(scheme.parameters()) and not (scheme.shift_invariant and scheme.pairwise)
        }
        for layer, module, attention, scheme in changing.values():
            logits = scheme_logits(
                scheme, n_heads=attention.n_heads, head_dim=attention.head_dim,
                causal=bool(getattr(module, "is_causal", False)), draws=2,
            )  # fmt: skip
            for head, r2 in enumerate(r2_of(logits).mean(0), start=1):
                values[f"{prefix}layer_{layer}/head_{head}"] = float(r2)
    return values


class InvarianceCallback(TrainerCallback):
    """Records R² of the table and of the first layer's heads at the start and at every logging step of a Trainer.

    `records` is a list of {"step": …, "invariance/gram": …, "invariance/cosine": …, "invariance/head_1": …}. The
    callback adds the same numbers to the logs and to the Trainer's log_history. A Trainer calls its reporters
    (TensorBoard, …) before the callbacks it was given. If they are to receive the numbers, move this callback to the
    front of trainer.callback_handler.callbacks.
    """

    def __init__(self, *, first: int = 1, last: int | None = None) -> None:
        self.first, self.last = first, last
        self.records: list[dict[str, float]] = []
        self._stacks: list[Stack] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finds the model inside its wrappers and records step 0."""
        model = kwargs["model"]
        while not isinstance(model, PreTrainedModel):  # PEFT, DDP, compiled
            inner = next(
                (x for x in map(model._modules.get, ("module", "base_model", "model", "_orig_mod")) if x), None
            )
            if inner is None:
                raise TypeError(f"found no model of transformers inside {type(kwargs['model']).__name__}")
            model = inner
        self._stacks = stacks(model)
        self._record(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Records R² once for each step that is logged."""
        if not self._stacks or state.global_step == self.records[-1]["step"]:  # evaluation, or the last summary
            return
        values = self._record(state.global_step)
        if logs is not None:
            logs.update(values)
        if state.log_history:  # the Trainer has copied the logs there already
            state.log_history[-1].update(values)

    def _record(self, step: int) -> dict[str, float]:
        values = _now(self._stacks, self.first, self.last)
        if not values:
            raise ValueError(
                "there is nothing to record: this model has no table of positions, and it has no scheme, or one that "
                "is translation-invariant for all values of its parameters"
            )
        self.records.append({"step": step, **values})
        return values
