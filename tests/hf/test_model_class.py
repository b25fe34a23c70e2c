"""Which class of transformers opens a folder."""

import pytest
from transformers import AutoModel, AutoModelForMaskedLM, BertConfig, BertForMaskedLM, BertModel, GPT2Config, GPT2Model

from locant.hf.model_class import model_class


@pytest.mark.parametrize(
    ("auto", "found"),
    [(None, BertForMaskedLM), (AutoModel, BertModel), (AutoModelForMaskedLM, BertForMaskedLM), (BertModel, BertModel)],
)
def test_the_class_that_is_asked_for_or_was_saved(auto, found):
    assert model_class(auto, BertConfig(), {"architectures": ["BertForMaskedLM", "GPT2Model"]}) is found


@pytest.mark.parametrize("auto", ["bert", 3, dict])
def test_other_things_are_no_class(auto):
    with pytest.raises(TypeError, match="auto must be an Auto class or a model class of transformers"):
        model_class(auto, BertConfig(), {})


def test_an_auto_class_without_this_model():
    with pytest.raises(ValueError, match="AutoModelForMaskedLM has no class for gpt2 models"):
        model_class(AutoModelForMaskedLM, GPT2Config(), {})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, r"names no class \(architectures\): opening the model as BertModel, without a head"),
        ({"architectures": []}, "names no class"),
        ({"architectures": ["OwnBert"]}, "names OwnBert, which transformers does not have: opening the model as BertM"),
    ],
)
def test_without_a_known_class_the_model_has_no_head(data, words):
    with pytest.warns(UserWarning, match=words):
        assert model_class(None, BertConfig(), data) is BertModel


@pytest.mark.parametrize("names", ["BertModel", ["BertModel", 3], {"a": "b"}])
def test_architectures_are_a_list_of_names(names):
    with pytest.raises(ValueError, match="must be a list of class names, got"):
        model_class(None, BertConfig(), {"architectures": names})


@pytest.mark.parametrize("name", ["GPT2Model", "BertConfig", "AutoModel", "is_torch_available"])
def test_a_class_of_other_models_is_refused(name):
    with pytest.raises(ValueError, match=f"names '{name}', which is no class of bert models"):
        model_class(None, BertConfig(), {"architectures": [name]})
    assert model_class(None, GPT2Config(), {"architectures": ["GPT2Model"]}) is GPT2Model
