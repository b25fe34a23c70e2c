"""Adaptations that are small enough for tests."""

from unittest.mock import patch

import locant
from locant.adaptation.agreement import Agreement
from tests import words

TOKENS = words.Tokenizer()
RATE = 2e-3
"""Models of a few thousand random weights are far from anything and learn at another rate."""


def adapted(model, spec="tisa:kernels=3", budget="20steps", rate=RATE, **options):
    options = {"tokenizer": TOKENS, "length": 32, **options}
    with patch.object(Agreement, "rate", rate):
        return locant.adapt(model, spec, words.text(), budget=budget, **options)
