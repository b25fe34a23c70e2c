"""`fit` and `adapt` raise on impossible arguments before anything changes."""

import pytest
import torch

import locant
from tests import hf_models, words
from tests.adaptations import TOKENS, adapted, fitted


def test_impossible_arguments_of_adapt_raise():
    with pytest.raises(ValueError, match="train must be one of scheme, all"):
        adapted(hf_models.make("bert"), train="some")
    with pytest.raises(ValueError, match="a budget must look like"):
        adapted(hf_models.make("bert"), budget="soon")


def test_a_swapped_model_is_no_original():
    with pytest.raises(ValueError, match="swapped already"):
        adapted(locant.swap(hf_models.make("bert"), "alibi"))


def test_half_precision_raises():
    with pytest.raises(ValueError, match=r"call model\.float\(\)"):
        adapted(hf_models.make("bert").bfloat16())


def test_a_tokenizer_with_more_tokens_than_the_model_raises():
    model = hf_models.make("bert", vocab_size=10)
    for run in (adapted, lambda model: locant.fit(model, "tisa", words.text(), tokenizer=TOKENS)):
        with pytest.raises(ValueError, match="but BertModel has 10 tokens; pass the tokenizer"):
            run(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"seed": -1}, "seed must be"), ({"length": "32"}, "length must be"), ({"budget": 4}, "budget must look like")],
)
def test_impossible_numbers_raise(options, message):
    with pytest.raises(ValueError, match=message):
        adapted(hf_models.make("bert"), **options)


def test_weights_that_are_not_finite_and_inference_mode_raise():
    model = hf_models.make("bert")
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        fitted(model, "tisa")
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"layer\.0\.output\.dense\.weight has numbers that are not finite"):
        fitted(model, "tisa")


def test_impossible_arguments_of_fit_raise():
    swapped = locant.swap(hf_models.make("bert"), "tisa")
    with pytest.raises(ValueError, match="swapped already"):
        fitted(swapped, "alibi")
    with pytest.raises(ValueError, match="no line of 40 bytes"):
        locant.fit(hf_models.make("bert"), "tisa", "short", tokenizer=TOKENS)
    with pytest.raises(ValueError, match="tokenizer="):
        locant.fit(hf_models.make("bert"), "tisa", words.text())


def test_lengths_must_be_possible():
    for options, message in (({"length": 0}, "at least 8"), ({"tokens": 0}, "tokens must be at least 1")):
        with pytest.raises(ValueError, match=message):
            locant.fit(hf_models.make("bert"), "tisa", words.text(), tokenizer=TOKENS, **options)


def test_images_are_not_text():
    with pytest.raises(ValueError, match="does not read tokens"):
        locant.fit(hf_models.make("vit"), "alibi", words.text(), tokenizer=TOKENS)
