"""A text with coloured tokens, and the section of inspect that shows it."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import locant
from locant.analysis import inspection
from locant.report.figures import Words
from locant.report.markup import figure_markup
from locant.report.page import figures_of, page_html
from locant.report.tables import csv_text, records
from tests import bert, hf_models


def test_tokens_are_escaped_and_coloured_by_size_and_sign():
    found = figure_markup(0, Words("A text", "a note", ["[CLS]", " <b>", "ad", " =1"], [0.0, -2.0, 1.0, 0.5]), "a.csv")
    assert '<mark class="less" style="--a:1.000" title="−2.000">&lt;b&gt;</mark>' in found
    assert '<wbr><mark class="more" style="--a:0.500" title="+1.000">ad</mark>' in found
    assert "<b>" not in found


def test_the_numbers_of_a_text():
    figure = Words("A text", "", ["a", " =1"], [1.0, -0.5])
    assert records(figure) == [{"place": 0, "token": "a", "value": 1.0}, {"place": 1, "token": " =1", "value": -0.5}]
    assert csv_text(figure).splitlines() == ["place,token,value", "0,a,1.0", "1, =1,-0.5"]
    with pytest.raises(ValueError, match=r"has 1 tokens but 2 values"):
        Words("A text", "", ["a"], [1.0, 2.0])


@pytest.fixture
def only_explained(monkeypatch):
    monkeypatch.setattr(inspection, "STAGES", {})


def test_inspect_explains_the_class_of_a_text(only_explained):
    tokenizer = bert.tokenizer()
    model = hf_models.make("bert", AutoModelForSequenceClassification, vocab_size=len(tokenizer))
    locant.swap(model, "tisa")
    stages = []
    found = locant.inspect(
        model,
        tokenizer=tokenizer,
        explain="so <i> good",
        on_stage=lambda name, stage, at, total: stages.append((stage, at, total)),
    )
    assert stages == [("explanation", 0, 1), ("done", 1, 1)]
    assert [figure.title for figure in figures_of(found.report)] == [
        "The text, by relevance", "Where the relevance is", "Relevance by offset",
        "Relevance through position by offset", "Share of position by layer and head",
    ]  # fmt: skip
    assert "% of the relevance passes through position (bias 100 %)" in str(found)
    sums = {row["part"]: row["relevance"] for row in found.rows("Where the relevance is")}
    (value,) = [value for part, value in sums.items() if part.startswith("sum")]
    assert sum(each for part, each in sums.items() if not part.startswith("sum")) == pytest.approx(value, abs=1e-2)
    assert value == pytest.approx(found.inspections[0].explained.value, rel=1e-3)
    assert "&lt;" in page_html(found.report)
    rows = found.rows("Relevance by offset")
    assert sum(row["value"] for row in rows if row["row"] == "1") == pytest.approx(100, abs=0.1)


def test_inspect_explains_the_similarity_of_two_texts(only_explained):
    tokenizer = bert.tokenizer()
    model = hf_models.make("bert", vocab_size=len(tokenizer))
    found = locant.inspect(model, tokenizer=tokenizer, explain=["a cat", "the cat"])
    pairs = found.rows("Which pairs of tokens make the texts similar")
    assert sum(row["value"] for row in pairs) == pytest.approx(found.inspections[0].explained.value, abs=1e-2)
    assert {"First text, by relevance", "Second text, by relevance"} <= set(found.figures)
    pytest.importorskip("matplotlib")
    found.figure("First text, by relevance")


def test_texts_that_cannot_be_explained(only_explained):
    tokenizer = bert.tokenizer()
    model = hf_models.make("bert", vocab_size=len(tokenizer))
    with pytest.raises(ValueError, match=r"explain takes one text, or two"):
        locant.inspect(model, tokenizer=tokenizer, explain=["a", "b", "c"])
    with pytest.raises(ValueError, match="the text to explain is empty"):
        locant.inspect(model, tokenizer=tokenizer, explain=["a", " "])
    with pytest.raises(ValueError, match=r"needs a tokenizer to read the text to explain"):
        locant.inspect(model, explain="a")
    one = locant.inspect(model, tokenizer=tokenizer, explain="a cat")
    assert one.report.notices == (
        "explanation: BertModel has no logits to explain. Give two texts to explain their similarity",
    )
    long = locant.inspect(model, tokenizer=tokenizer, explain=["a" * 60, "a"])
    assert "the text has 62 tokens, and the model reads at most 40" in long.report.notices[0]
    assert torch.is_grad_enabled()
