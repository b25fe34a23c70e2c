"""Retrieval of long documents by sentences that were removed from them."""

import pytest
import torch

import locant
from locant.adaptation import scores
from locant.adaptation.documents import Sentences, articles
from tests import hf_models
from tests.adaptations import TOKENS


class Bag(torch.nn.Module):
    """A model whose states are one-hot vectors of the tokens."""

    device = torch.device("cpu")

    @property
    def base_model(self):
        return self

    def forward(self, input_ids):
        states = torch.nn.functional.one_hot(input_ids, 60).float()
        states[..., :5] = 0  # zero for special tokens
        return type("Output", (), {"last_hidden_state": states})


def document(word: int, sentences: int = 40) -> str:
    """A document whose own word occurs only after the beginning."""
    common = "w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 w16 w17 w18 w19 w20 w21. "
    own = f"w{word} w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 w16 w17 w18 w19 w20 w{word}. "
    return common * 4 + own * sentences


def test_reading_to_the_end_finds_sentences_from_the_end():
    task = Sentences(TOKENS, [document(word) for word in range(30, 40)], length=512, limit=64, each=3)
    assert len(task.documents) == 10
    assert len(task.queries) == 30
    assert all(len(query) == 17 for query, _ in task.queries)
    assert all(len(ids) == 510 for ids in task.documents)
    assert task.accuracy(Bag(), "whole") == 1.0
    assert task.accuracy(Bag(), "chunked") == 1.0
    assert task.accuracy(Bag(), "truncated") == pytest.approx(0.1)  # all documents begin alike


def test_removed_sentences_are_not_in_the_document():
    task = Sentences(TOKENS, [document(word, 20) for word in (30, 31)], length=2048, limit=64, each=3)
    assert [sum(token == word for token in ids) for ids, word in zip(task.documents, (30, 31), strict=True)] == [34, 34]


def test_documents_must_be_long():
    with pytest.raises(ValueError, match="at least 2 documents"):
        Sentences(TOKENS, ["w5 w6. " * 20] * 5)


def test_articles_of_wikitext():
    text = "\n = One = \n\n Some words . \n = = Part = = \n More . \n = Two = \n\n Others . \n"
    assert [article.split() for article in articles(text)] == [
        ["Some", "words", ".", "=", "=", "Part", "=", "=", "More", "."],
        ["Others", "."],
    ]


def test_a_swapped_model_reads_long_documents_at_once(tmp_path, monkeypatch):
    ways = []
    monkeypatch.setattr(Sentences, "accuracy", lambda self, model, way: ways.append((way, self.limit)) or 0.5)
    (tmp_path / "wiki.txt").write_text("".join(f"\n = {n} = \n\n{document(n, 200)}" for n in range(30, 34)))
    task = scores.score(f"sentences:{tmp_path / 'wiki.txt'}", [], 32)
    model = hf_models.make("bert")  # of 40 positions
    task(model, TOKENS)
    task(locant.swap(model, "alibi"), TOKENS)
    assert ways == [("chunked", 40), ("whole", 40)]
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        scores.score("sentences:nowhere.txt", [], 32)
