"""Fits and adaptations that are small enough for tests."""

from unittest.mock import patch

import torch
from transformers import AutoModelForTextEncoding

import locant
from locant.adaptation import adapting
from locant.adaptation.agreement import Agreement
from tests import hf_models, words

TOKENS = words.Tokenizer()
TEXT = words.text()
RATE = 2e-3
"""Models of a few thousand random weights are far from anything trained, and need a larger learning rate."""
FIT_TOKENS = 512
"""Tokens of each length to fit on. `adapt` itself uses 3,072: half of its time on models as small as these."""


def fitted(model, spec, *, length=32, tokens=1024, **options):
    return locant.fit(model, spec, TEXT, tokenizer=TOKENS, length=length, tokens=tokens, **options)


def adapted(model, spec="tisa:kernels=3", budget="20steps", rate=RATE, text=TEXT, **options):
    def small_fit(*arguments, **named):
        return locant.fit(*arguments, tokens=FIT_TOKENS, **named)

    options = {"tokenizer": TOKENS, "length": 32, **options}
    with patch.object(Agreement, "learning_rate", rate), patch.object(adapting, "fit", small_fit):
        return locant.adapt(model, spec, text, budget=budget, **options)


def t5() -> torch.nn.Module:
    """The encoder of T5, with biases as large as those of trained models."""
    model = hf_models.make("t5", AutoModelForTextEncoding)
    with torch.no_grad():
        model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.normal_(std=2.0)
    return model
