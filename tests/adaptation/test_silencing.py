"""Two vectors of a table of absolute positions stay when it is removed."""

import pytest
import torch

import locant
from locant.adaptation.silencing import with_first
from tests import hf_models, words
from tests.adaptations import TEXT, TOKENS, fitted


def test_the_first_row_and_the_mean_of_the_others_stay():
    model = hf_models.make("bert")
    table = model.embeddings.position_embeddings.weight.detach().clone()
    fitted(model, "tisa")
    left = locant.native(model).stacks[0].embed
    torch.testing.assert_close(left.first, table[0])
    torch.testing.assert_close(left.rest, table[1:32].mean(0))


def test_every_layer_of_a_spec_gets_first_once():
    assert with_first("tisa") == "tisa+first"
    assert with_first("tisa+first") == "tisa+first"
    assert with_first("tisa:kernels=2/alibi") == "tisa:kernels=2+first/alibi+first"
    model = hf_models.make("bert")
    table = model.embeddings.position_embeddings.weight.detach().clone()
    fitted(model, "tisa:kernels=2/alibi")
    torch.testing.assert_close(locant.native(model).stacks[0].embed.first, table[0])


@pytest.mark.parametrize("spec", ["tisa:kernels=3 + first", "tisa:kernels=3+First", "tisa:kernels=3+first"])
def test_a_spec_that_has_first_keeps_it(spec):
    models = [hf_models.make("bert"), hf_models.make("bert")]
    for model, each in zip(models, (spec, "tisa:kernels=3"), strict=True):
        locant.fit(model, each, words.text(), tokenizer=TOKENS, length=16, tokens=64)
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(*(model(input_ids=ids).last_hidden_state for model in models))


@pytest.mark.parametrize("spec", ["native@recurrent:length=16+local:window=15", "native@recurrent:length=16"])
def test_the_models_own_table_gets_no_second_first_row(spec):
    """Short texts keep their outputs: a fit of the model's own mapped positions changes nothing."""
    assert with_first(spec) == spec
    model, ids = hf_models.make("bert").eval(), torch.randint(5, 60, (2, 14))
    before = model(ids).last_hidden_state
    locant.fit(model, spec, TEXT, tokenizer=TOKENS, length=16, tokens=256)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).last_hidden_state, before, atol=1e-5, rtol=1e-5)
