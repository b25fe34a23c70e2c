"""Checks of the arguments of `fit` and `adapt`, before anything changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from locant.adaptation.agreement import Agreement, StateAgreement
from locant.adaptation.scores import Loss
from locant.hf import swapping
from locant.hf.facts import has_decoder
from locant.hf.finite import check_finite
from locant.hf.plan import plan_of
from locant.hf.running import vocabulary
from locant.hf.sentence_folder import SentenceFolder

TRAIN = ("scheme", "all")
MIN_LENGTH = 8
"""Smallest `length`, in tokens."""


def check_model(model: Any, spec: Any) -> None:
    """Raises unless a model can be fitted and adapted to a scheme of this name."""
    swapping.check_model(model)
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise ValueError(f"{type(model).__name__} does not read tokens, so it cannot be fitted on text")
    if not isinstance(spec, str) or spec.strip() == "native":
        raise ValueError(f"spec must be a string that names a scheme, such as tisa:kernels=5; got {spec!r}")
    if plan_of(model) is not None:
        raise ValueError("this model is swapped already; pass a model that has its own positions")
    if torch.is_inference_mode_enabled():
        raise ValueError("fitting needs gradients, which torch.inference_mode() forbids; call it outside")
    check_finite(model)
    half = {weight.dtype for weight in model.parameters()} & {torch.bfloat16, torch.float16}
    if half:
        raise ValueError(f"the model is in {half.pop()}, which rounds small steps to zero; call model.float() first")


def check_scores(model: PreTrainedModel, scores: Mapping[str, Any], source: SentenceFolder | None) -> None:
    """Raises if an encoder-decoder is to be scored by its predictions, or is in a folder of sentence-transformers.

    Only its encoder is adapted and measured, which predicts no tokens. sentence-transformers opens the encoder alone.
    """
    if not has_decoder(model):
        return
    name = type(model).__name__
    losses = [each for each, score in scores.items() if isinstance(score, Loss)]
    if losses:
        raise ValueError(
            f"{name} is adapted in its encoder alone, which predicts no tokens, so it cannot be scored by "
            f"{', '.join(losses)}; use stsb, sentences or longembed, or no score: agreement is measured anyway"
        )
    if source is not None:
        raise ValueError(
            f"{model.name_or_path} is a folder of sentence-transformers, which opens an encoder alone, but {name} has "
            f"a decoder; load the encoder alone, with AutoModelForTextEncoding"
        )


def check_contrast(model: PreTrainedModel, kind: Agreement, *, causal: bool) -> None:
    """Raises unless a model makes one vector per text from all of its tokens."""
    name = type(model).__name__
    if type(kind) is not StateAgreement:
        raise ValueError(
            f"the contrastive stage trains encoders that make one vector per text, but {name} has a head, and is "
            f"compared by {kind.name}; leave contrast out, or pass model.base_model"
        )
    if causal:
        raise ValueError(
            f"the contrastive stage trains encoders that make one vector per text, but {name} is causal: its tokens do "
            f"not see the tokens after them; leave contrast out"
        )


def check_train(train: str) -> None:
    """Raises unless `train` names the weights to train."""
    if train not in TRAIN:
        raise ValueError(f"train must be one of {', '.join(TRAIN)}, got {train!r}")


def check_numbers(length: int, seed: int) -> None:
    """Raises unless `length` and `seed` are possible."""
    if not isinstance(length, int) or length < MIN_LENGTH:
        raise ValueError(f"length must be a number of tokens, at least {MIN_LENGTH}, got {length!r}")
    if not isinstance(seed, int) or not 0 <= seed < 2**32 - 1:
        raise ValueError(f"seed must be a whole number from 0 to 2³² − 2, got {seed!r}")


def check_vocabulary(model: PreTrainedModel, tokenizer: Any, lines: list[str]) -> None:
    """Raises if the tokenizer makes tokens that the model does not have; checks the first lines of a text."""
    known = vocabulary(model.base_model)
    most = max((token for ids in tokenizer(lines[:200], verbose=False)["input_ids"] for token in ids), default=0)
    if most >= known:
        raise ValueError(
            f"the tokenizer returned token {most}, but {type(model).__name__} has {known} tokens; pass the "
            f"tokenizer that the model was trained with"
        )
