"""The part of a model that is fitted and trained: the encoder of an encoder-decoder, or all of any other model.

An encoder is fitted and trained as a model of its own. Then `join` moves its schemes into the whole model. There the
decoder gets its own positions as schemes, so its outputs for the same encoder states stay the same; `join` checks it.
Cross-attention has no positions and is not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.hf.facts import has_decoder
from locant.hf.finding import family_of
from locant.hf.modes import evaluating
from locant.hf.readout import Native, native
from locant.hf.running import probe_length, probe_tokens, run
from locant.hf.swapping import exchange

TOLERANCE = 1e-4
"""Largest difference that rounding may make between two outputs, relative to the largest output."""

ALONE = "load the encoder alone, with AutoModelForTextEncoding"


class Part:
    """All of a model that has no decoder.

    model   the part that is fitted and trained.
    whole   the model that contains it.
    """

    def __init__(self, whole: PreTrainedModel) -> None:
        self.whole = self.model = whole

    @property
    def notice(self) -> str | None:
        """One sentence about what is not fitted; None if everything is."""
        return None

    def own(self) -> set[nn.Parameter]:
        """Returns the parameters that nothing outside of the part uses."""
        return set(self.model.parameters())

    def join(self) -> None:
        """Gives the whole model the schemes that the part has."""

    def restore(self) -> None:
        """Gives the model its own positions again, whatever was done to it."""
        exchange(self.whole, "native")


class EncoderPart(Part):
    """The encoder of an encoder-decoder. Raises if the decoder's positions cannot be read or do not hold."""

    def __init__(self, whole: PreTrainedModel) -> None:
        super().__init__(whole)
        base: Any = whole.base_model
        self.model = base.get_encoder()
        self.name = type(whole).__name__
        self.paths = family_of(whole).stacks(base)
        self.index = _index(base, self.paths, self.model, self.name)
        with torch.random.fork_rng(devices=[]):
            self.read_decoder, self.before = self._decoder()
            own = native(whole)
            self.decoder = ", ".join(_spelled(own)[: self.index] + _spelled(own)[self.index + 1 :])
            try:  # before anything takes time
                exchange(whole, own)
                self._check_decoder()
            finally:
                exchange(whole, "native")
        # Swapping the encoder alone gives it configs of its own; afterwards it shares those of the model again.
        self.configs = {each: each.config for each in self.model.modules() if "config" in each.__dict__}
        self.joined = False

    @property
    def notice(self) -> str:
        return f"only the encoder of {self.name} was changed; the decoder keeps its own positions ({self.decoder})"

    def own(self) -> set[nn.Parameter]:
        # By name and not by module: some models use one module of token embeddings in encoder and decoder.
        modules, weights = (
            list(each(remove_duplicate=False)) for each in (self.whole.named_modules, self.whole.named_parameters)
        )
        inside = tuple(f"{name}." for name, module in modules if module is self.model)
        return set(self.model.parameters()) - {weight for name, weight in weights if not name.startswith(inside)}

    def join(self) -> None:
        tokens = probe_tokens(self.model, probe_length(self.model))
        alone = run(self.model, {"input_ids": tokens})
        fitted = native(self.model).stacks[0]
        self._leave_encoder()
        self.joined = True
        stacks = [fitted if n == self.index else read for n, read in enumerate(native(self.whole).stacks)]
        exchange(self.whole, Native("swapped", tuple(stacks)))
        if not _same(alone, run(self.model, {"input_ids": tokens})):
            raise RuntimeError(
                f"the fitted encoder of {self.name} has other outputs inside the model than alone; {ALONE}"
            )
        self._check_decoder()

    def restore(self) -> None:
        super().restore()
        if not self.joined:
            self._leave_encoder()

    def _leave_encoder(self) -> None:
        """Undoes the swap of the encoder alone."""
        exchange(self.model, "native")
        for module, config in self.configs.items():
            module.config = config

    def _decoder(self) -> tuple[Callable[[], Tensor], Tensor]:
        """A function that runs the decoder on the original states of the encoder, and what it returns now."""
        try:
            read = _decoder_on(self.whole.base_model, self.model)
            return read, read()
        except Exception as problem:  # any: the code is that of a model nobody has tried
            raise NotImplementedError(
                f"{self.name} cannot be fitted: on a few tokens its encoder and then its decoder fail with "
                f"{type(problem).__name__}: {problem}; {ALONE}"
            ) from problem

    def _check_decoder(self) -> None:
        if not _same(self.before, self.read_decoder()):
            raise NotImplementedError(
                f"{self.name} cannot be fitted: with its own positions as schemes its decoder has other outputs; "
                f"{ALONE}"
            )


def part_of(model: PreTrainedModel) -> Part:
    """Returns the part of a model that is fitted and trained. Raises if there is no such part."""
    return EncoderPart(model) if has_decoder(model) else Part(model)


def _index(base: nn.Module, paths: list[str], encoder: nn.Module, name: str) -> int:
    """The number of the stack that is the encoder."""
    found = [number for number, path in enumerate(paths) if path and base.get_submodule(path) is encoder]
    if len(found) != 1:
        where = ", ".join(path or "the model itself" for path in paths)
        raise NotImplementedError(
            f"{name} cannot be fitted: locant finds positions in {where} alone, and not in its encoder "
            f"({type(encoder).__name__}); train the swapped model instead"
        )
    return found[0]


def _decoder_on(base: Any, encoder: nn.Module) -> Callable[[], Tensor]:
    """A function that runs the decoder on what the encoder returns now for a few tokens."""
    tokens = probe_tokens(base, probe_length(base))
    with evaluating(encoder), torch.no_grad():
        outputs = encoder(input_ids=tokens, return_dict=True)
    # Two tokens fewer than the encoder has: see `probe_inputs`.
    given = {"decoder_input_ids": tokens[:, : max(1, tokens.shape[1] - 2)], "encoder_outputs": outputs}
    return lambda: run(base, given)


def _same(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * one.abs().max())


def _spelled(positions: Native) -> list[str]:
    """The positions of each stack as a spec string."""
    return [str(Native("", (stack,))).removeprefix(": ") for stack in positions.stacks]
