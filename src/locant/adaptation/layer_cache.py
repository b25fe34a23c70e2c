"""Caches the outputs of fitted layers, so that a fit runs each layer once per batch.

Once a layer is fitted, its cached output is replayed instead of running it. Reaching the next layer then costs the
embeddings alone, and a fit is linear in the number of layers, not quadratic.

This is valid only if later layers depend on a layer through its output alone. A trial on one sequence verifies it: the
inputs of every attention must be the same bits with and without replay. If not, all layers run every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from locant.analysis.layout import layer_names
from locant.attention.request import Request
from locant.hf.call import AttentionCall
from locant.hf.listening import observing
from locant.hf.swapping import native_as_schemes

CAPTURING = "transformers.utils.output_capturing"
"""The module with the hooks by which transformers collects hidden states."""
OnRequest = Callable[[nn.Module, Request], None]
"""Called with an attention module and the request that it is about to compute."""


class StopForward(Exception):
    """Ends a forward pass whose remainder is not needed."""


class LayerCache:
    """Runs a swapped model on batches of tokens [B, L], without running the layers that are fitted.

    attentions, layers   in the order in which they run, one attention per layer. If `layers` is empty, nothing is
                         cached and all layers run every time.
    """

    def __init__(
        self, model: PreTrainedModel, attentions: list[nn.Module], layers: list[nn.Module], batches: list[Tensor]
    ) -> None:
        self.model, self.attentions, self.layers, self.batches = model, attentions, layers, batches
        self.fitted = 0  # number of fitted layers, from the first
        self.outputs: list[Any] = [None] * len(batches)  # of the last fitted layer, for each batch

    @contextmanager
    def _replaying(self, number: int) -> Iterator[None]:
        """Fitted layers return the cached output of a batch instead of running."""
        fitted, output = self.layers[: self.fitted], self.outputs[number]
        before = [layer.__dict__.get("forward") for layer in fitted]
        try:
            for layer in fitted:
                layer.forward = lambda *args, **kwargs: _copy(output)  # a later layer may change it in place
            yield
        finally:
            for layer, forward in zip(fitted, before, strict=True):
                if forward is None:
                    layer.__dict__.pop("forward", None)  # missing if an exception came before it was set
                else:
                    layer.forward = forward

    def run(self, number: int, on_request: OnRequest) -> None:
        """Runs a batch and calls `on_request` before every attention that runs, until it raises StopForward."""

        def before(call: AttentionCall) -> None:
            if call.scheme is not None:
                on_request(call.module, call.request())

        with native_as_schemes(self.model), observing(before=before), self._replaying(number), suppress(StopForward):
            self.model.base_model(input_ids=self.batches[number])

    def requests(self, number: int, attention: nn.Module, calls: int = 1) -> list[Request]:
        """Returns the first requests of an attention in a batch, and runs the model no further than needed."""
        return self.requests_of(number, [attention], calls)[attention]

    def requests_of(self, number: int, attentions: list[nn.Module], calls: int = 1) -> dict[nn.Module, list[Request]]:
        """Returns the first requests of several attentions in a batch, from one run."""
        found: dict[nn.Module, list[Request]] = {attention: [] for attention in attentions}

        def on_request(module: nn.Module, request: Request) -> None:
            if module in found:
                found[module].append(request)
                if all(len(each) >= calls for each in found.values()):
                    raise StopForward

        self.run(number, on_request)
        return {attention: requests[:calls] for attention, requests in found.items()}

    def cache_next_layer(self) -> None:
        """Marks the next layer as fitted and caches its outputs; the last layer is never needed."""
        if self.fitted >= len(self.layers) - 1:
            return
        outputs: list[Any] = []

        def store(layer: nn.Module, args: Any, output: Any) -> None:
            outputs.append(_copy(output))
            raise StopForward

        with self.layers[self.fitted].register_forward_hook(store):
            for number in range(len(self.batches)):
                self.run(number, lambda *_: None)
        if len(outputs) == len(self.batches):  # SqueezeBERT calls `forward` of its layers, and runs no hooks
            self.outputs, self.fitted = outputs, self.fitted + 1


def layer_cache(model: PreTrainedModel, attentions: list[str], batches: list[Tensor]) -> LayerCache:
    """Returns the cache for a model's attentions, given by name; one that caches nothing if replay is not exact."""
    base = model.base_model
    modules = [base.get_submodule(name) for name in attentions]
    layers = [base.get_submodule(name) for name in layer_names(base, attentions)]
    trial = LayerCache(model, modules, layers, [batches[0][:1]])
    return LayerCache(model, modules, layers if _replay_is_exact(trial) else [], batches)


def _replay_is_exact(trial: LayerCache) -> bool:
    """Whether every attention gets the same numbers if the layers below it are replayed."""
    if len(set(trial.layers)) != len(trial.attentions):
        return False
    if any(_has_hooks(layer) for layer in trial.layers):  # they would run twice
        return False
    complete: list[tuple[nn.Module, Request]] = []
    trial.run(0, lambda module, request: complete.append((module, request)))
    if [module for module, _ in complete] != trial.attentions:  # ALBERT runs one attention in all layers
        return False
    for attention, request in complete:
        try:
            replayed = trial.requests(0, attention)
        except LookupError:  # Gemma 3n: the last layers read keys that earlier ones leave for them
            return False
        if not replayed or not all(torch.equal(*both) for both in zip(_qkv(replayed[0]), _qkv(request), strict=True)):
            return False
        trial.cache_next_layer()
    return trial.fitted == len(trial.layers) - 1


def _has_hooks(layer: nn.Module) -> bool:
    """Whether a layer has hooks that may change its inputs or outputs.

    Once hidden states were asked of a model, transformers keeps hooks on its layers; they only look.
    """
    own = [*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()]
    return any(getattr(hook, "__module__", None) != CAPTURING for hook in own)


def _qkv(request: Request) -> tuple[Tensor, Tensor, Tensor]:
    return request.q, request.k, request.v


def _copy(output: Any) -> Any:
    """Copies the output of a layer: a tensor, or tensors in tuples and the like."""
    return tree_map_only(Tensor, torch.clone, output)
