"""Facts about a model."""

import pytest
import torch

from locant.hf.facts import is_causal
from tests.hf_models import make


@pytest.mark.parametrize(("kind", "causal"), [("bert", False), ("t5", False), ("llama", True), ("gpt2", True)])
@pytest.mark.parametrize(
    "ids", [[[5, 6, 7, 8]], [[5, 6, 7, 5]], [[5, 5, 5, 5]], [[0, 3, 0]], [[7, 7, 9, 9], [3, 4, 5, 3]]], ids=str
)
def test_causal_or_not_whatever_the_tokens_are(kind, causal, ids):
    """The last token is replaced by another one. The first one is no other where both are the same."""
    assert is_causal(make(kind), torch.tensor(ids)) == causal


def test_a_model_is_as_it_was_after_the_question():
    model = make("bert").train()
    ids = torch.tensor([[5, 6, 7, 5]])
    is_causal(model, ids)
    assert model.training
    assert ids.tolist() == [[5, 6, 7, 5]]


def test_damaged_weights_are_named():
    model = make("bert")
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN or infinity; check its weights"):
        is_causal(model, torch.tensor([[5, 6, 7]]))
