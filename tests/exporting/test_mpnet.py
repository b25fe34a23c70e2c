"""BERT with one T5 bias for all layers, written as MPNet."""

import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForNextSentencePrediction,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    MPNetModel,
)

import locant
from locant.exporting import mpnet
from locant.exporting.refusal import CannotExport
from locant.hf.swapping import exchange
from tests import bert
from tests.exporting.models import differ, padded, swapped
from tests.hf_models import output

SHARED = "t5:shared=layers+first"


def test_both_sides_of_padding(tmp_path):
    model = swapped("bert", SHARED)
    done = locant.export(model, tmp_path / "out")
    assert (done.to, done.exact, done.length) == ("mpnet", True, mpnet.LENGTH)
    assert done.difference < 1e-5
    opened = MPNetModel.from_pretrained(tmp_path / "out").eval()
    for batch in (padded("right", 150), padded("left", 150)):
        found = output(opened, **{**batch, "input_ids": mpnet.Exchange(0, 1)(batch["input_ids"])})
        assert differ(output(model, **batch), found, batch["attention_mask"]) < 1e-5


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "electra", "xlm-roberta", "camembert"])
def test_the_relatives_of_bert(tmp_path, kind):
    options = {"embedding_size": 32} if kind == "electra" else {}
    done = locant.export(swapped(kind, SHARED, **options), tmp_path / "out", "mpnet", length=320)
    assert done.difference < 1e-5
    assert MPNetModel.from_pretrained(tmp_path / "out").config.max_position_embeddings == 322


@pytest.mark.parametrize(
    ("kind", "auto"),
    [
        ("bert", AutoModelForMaskedLM),
        ("roberta", AutoModelForMaskedLM),
        ("distilbert", AutoModelForMaskedLM),
        ("bert", AutoModelForSequenceClassification),
        ("roberta", AutoModelForSequenceClassification),
        ("distilbert", AutoModelForTokenClassification),
    ],
)
def test_heads(tmp_path, kind, auto):
    done = locant.export(swapped(kind, SHARED, auto=auto), tmp_path / "out", "mpnet", length=320)
    assert done.difference < 1e-5
    assert auto.from_pretrained(tmp_path / "out").config.model_type == "mpnet"


def test_a_head_that_mpnet_does_not_have(tmp_path):
    for kind, auto, message in (
        ("distilbert", AutoModelForSequenceClassification, "ReLU"),
        ("bert", AutoModelForNextSentencePrediction, "no class for the head"),
    ):
        with pytest.raises(CannotExport, match=message):
            locant.export(swapped(kind, SHARED, auto=auto), tmp_path / "out", "mpnet")


def test_the_tokenizer_pads_with_the_id_that_mpnet_expects(tmp_path):
    folder = bert.save(tmp_path / "model")
    model = locant.load(folder).eval()
    exchange(model, SHARED)
    locant.export(model, tmp_path / "out")
    before, after = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (before.pad_token_id, after.pad_token_id) == (0, 1)
    assert after.model_max_length == mpnet.LENGTH
    texts = ["a cat sat on the mat", "ünk?", ""]
    first, second = (each(texts, padding=True, return_tensors="pt") for each in (before, after))
    assert "token_type_ids" not in second
    assert 1 in first["input_ids"]  # the token whose place padding takes occurs
    assert torch.equal(second["input_ids"], mpnet.Exchange(0, 1)(first["input_ids"]))
    opened = MPNetModel.from_pretrained(tmp_path / "out").eval()
    expected, found = output(model, **first), output(opened, **second)
    assert differ(expected, found, first["attention_mask"]) < 1e-5


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        ("bert", "t5", "different ones"),
        ("bert", "t5:buckets=16,shared=layers", "another value within a bucket"),
        ("bert", "t5:max_distance=64,shared=layers", "another value within a bucket"),
        ("bert", "tisa:shared=layers", "another value within a bucket"),
        ("bert", "rope", "nothing else"),
        ("bert", "shaw:shared=layers", "nothing else"),
        ("llama", "t5:shared=layers", "layers of BERT"),
        ("electra", "t5:shared=layers", "narrower"),
    ],
)
def test_what_mpnet_cannot_hold(tmp_path, kind, spec, message):
    with pytest.raises(CannotExport, match=message):
        locant.export(swapped(kind, spec), tmp_path / "out", "mpnet")
    assert not (tmp_path / "out").exists()


def test_a_wrong_sign_is_noticed(tmp_path, monkeypatch):
    """The proof must be able to fail: with the offsets the wrong way round it does."""
    real = mpnet._bias
    monkeypatch.setattr(mpnet, "_bias", lambda scheme, r, heads: real(scheme, -r, heads))
    with pytest.raises(CannotExport, match="does not compute the same"):
        locant.export(swapped("bert", SHARED), tmp_path / "out", "mpnet")
    assert not (tmp_path / "out").exists()
