"""The layers below the one that is being fitted: nothing changes them any more, so that they are run once.

What a finished layer gave is kept, for each batch, and from then on it says that in place of running: the layer above
is reached at the price of the embeddings. A fit is then linear in the number of layers, not quadratic.

Whether a layer's output is all that the layers above know of it is not taken for granted: a first run compares what
reaches every attention with what reaches it when all layers run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from locant.analysis.layout import layer_names
from locant.hf.call import AttentionCall
from locant.hf.listening import observing
from locant.hf.swapping import native_as_schemes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from locant.attention.request import Request

Record = Callable[[nn.Module, "Request"], None]


class Enough(Exception):
    """What was asked for has been reached: the rest of a forward pass is not needed."""


class Below:
    """Runs a swapped model on batches of tokens [B, L]; layers that are finished, the lowest first, are not run again.

    attentions, layers   in the order they run, one attention in each layer; without layers, all of them always run
    """

    def __init__(
        self, model: PreTrainedModel, attentions: list[nn.Module], layers: list[nn.Module], batches: list[Tensor]
    ) -> None:
        self.model, self.attentions, self.layers, self.batches = model, attentions, layers, batches
        self.finished = 0
        self.given: list[Any] = [None] * len(batches)  # by the last layer that is finished

    @contextmanager
    def _as_kept(self, number: int) -> Iterator[None]:
        """Finished layers say what they gave for a batch."""
        finished, given = self.layers[: self.finished], self.given[number]
        before = [layer.__dict__.get("forward") for layer in finished]
        try:
            for layer in finished:
                layer.forward = lambda *args, **kwargs: _copy(given)  # a later layer may work in place
            yield
        finally:
            for layer, forward in zip(finished, before, strict=True):
                if forward is None:
                    layer.__dict__.pop("forward", None)  # not there yet, if it was stopped on the way
                else:
                    layer.forward = forward

    def run(self, number: int, record: Record) -> None:
        """A batch through the model, until `record`, which hears every attention that runs, has had enough."""

        def before(call: AttentionCall) -> None:
            if call.scheme is not None:
                record(call.module, call.request())

        with native_as_schemes(self.model), observing(before=before), self._as_kept(number), suppress(Enough):
            self.model.base_model(input_ids=self.batches[number])

    def reach(self, number: int, attention: nn.Module, calls: int = 1) -> list[Request]:
        """What an attention is about to compute of a batch, in its first calls."""
        found: list[Request] = []

        def record(module: nn.Module, request: Request) -> None:
            if module is attention:
                found.append(request)
                if len(found) == calls:
                    raise Enough

        self.run(number, record)
        return found

    def finish(self) -> None:
        """One more layer is as it stays."""
        if self.finished >= len(self.layers) - 1:  # above the last there is nothing
            return
        given: list[Any] = []

        def heard(layer: nn.Module, args: Any, output: Any) -> None:
            given.append(_copy(output))
            raise Enough

        with self.layers[self.finished].register_forward_hook(heard):
            for number in range(len(self.batches)):
                self.run(number, lambda *_: None)
        self.given, self.finished = given, self.finished + 1


def below(model: PreTrainedModel, attentions: list[str], batches: list[Tensor]) -> Below:
    """For the attentions of a model, by name; where layers cannot be told apart or left out, all of them always run."""
    base = model.base_model
    modules = [base.get_submodule(name) for name in attentions]
    layers = [base.get_submodule(name) for name in layer_names(base, attentions)]
    trial = Below(model, modules, layers, [batches[0][:1]])
    return Below(model, modules, layers if _output_is_all(trial) else [], batches)


def _output_is_all(trial: Below) -> bool:
    """Whether each attention is reached by the same numbers when the layers below it are not run."""
    if len(set(trial.layers)) != len(trial.attentions):
        return False
    if any(layer._forward_hooks or layer._forward_pre_hooks for layer in trial.layers):  # they would work twice
        return False
    whole: list[tuple[nn.Module, Request]] = []
    trial.run(0, lambda module, request: whole.append((module, request)))
    if [module for module, _ in whole] != trial.attentions:  # ALBERT runs one many times
        return False
    for attention, request in whole:
        short = trial.reach(0, attention)
        if not short or not all(torch.equal(*both) for both in zip(_taken(short[0]), _taken(request), strict=True)):
            return False
        trial.finish()
    return True


def _taken(request: Request) -> tuple[Tensor, Tensor, Tensor]:
    return request.q, request.k, request.v


def _copy(output: Any) -> Any:
    """Of what a layer gives: a tensor, a tuple of them, …"""
    return tree_map_only(Tensor, torch.clone, output)
