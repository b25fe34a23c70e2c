"""Retrieval of long documents: collections, ways to read, scores and intervals."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

import locant
from locant.adaptation import scores
from locant.adaptation.hidden_facts import needles, passkeys
from locant.adaptation.retrieval import (
    Averaged,
    BestPiece,
    Collection,
    LatePieces,
    Reader,
    Whole,
    evaluate,
    evaluate_all,
    interval,
    ndcg,
    read_collection,
)
from locant.hf.pooling import Pooling
from tests import hf_models, words
from tests.adaptations import adapted


class OneHot(torch.nn.Module):
    """A model whose state of a token is its one-hot vector; a token beyond `limit` would be an error."""

    device, config = torch.device("cpu"), SimpleNamespace(get_text_config=lambda: None)

    def __init__(self, limit=10**6):
        super().__init__()
        self.limit = limit

    @property
    def base_model(self):
        return self

    def forward(self, input_ids, attention_mask):
        assert input_ids.shape[1] <= self.limit
        return SimpleNamespace(last_hidden_state=torch.eye(60)[input_ids])


@pytest.fixture
def reader(monkeypatch):
    monkeypatch.setattr("locant.adaptation.retrieval.longest", lambda model, length: min(length, model.limit))
    return lambda limit=10**6, length=24: Reader(OneHot(limit), words.Tokenizer(), Pooling(), length)


def unit(*tokens):
    vector = torch.zeros(60)
    for token in tokens:
        vector[token] += 1
    return vector / vector.norm()


def text(*tokens):
    return " ".join(f"w{token}" for token in tokens)


def test_ranks_count_up_to_ten_and_ties_against_the_document():
    similarities = torch.tensor([[0.9, 0.1, 0.3], [0.9, 0.5, 0.5], [0.2, 0.1, 0.3]])
    assert ndcg(similarities, [0, 2, 1]) == pytest.approx([1, 1 / math.log2(4), 1 / math.log2(4)])
    many = torch.arange(11.0)[None]
    assert ndcg(many, [1]) == pytest.approx([1 / math.log2(11)])  # rank 10
    assert ndcg(many, [0]) == [0.0]  # rank 11
    with pytest.raises(ValueError, match="NaN"):
        ndcg(torch.tensor([[math.nan, 0.0]]), [1])


@pytest.mark.parametrize(("most", "chunks"), [(0, [[5, 6], [7, 8], [9]]), (2, [[5, 6], [7, 8]]), (1, [[5, 6]])])
def test_averaged_pieces_count_equally(reader, most, chunks):
    found = Averaged(4, most).vectors(reader(), [5, 6, 7, 8, 9])
    mean = torch.stack([unit(0, *chunk, 2) for chunk in chunks]).mean(0)
    torch.testing.assert_close(found, (mean / mean.norm())[None])


def test_other_ways_to_read(reader):
    ids = [5, 6, 7, 8, 9]
    torch.testing.assert_close(Whole().vectors(reader(), ids), unit(0, *ids, 2)[None])
    torch.testing.assert_close(Whole().vectors(reader(limit=5), ids), unit(0, 5, 6, 7, 2)[None])
    torch.testing.assert_close(Whole(4).vectors(reader(), ids), unit(0, 5, 6, 2)[None])
    wanted = torch.stack([unit(0, 5, 6, 2), unit(0, 7, 8, 2), unit(0, 9, 2)])
    torch.testing.assert_close(BestPiece(4).vectors(reader(), ids), wanted)
    wanted = torch.stack([unit(0, 5, 6), unit(7, 8, 9), unit(2)])  # special tokens of the whole, at its ends
    torch.testing.assert_close(LatePieces(3).vectors(reader(), ids), wanted)
    with pytest.raises(ValueError, match="late pooling reads 24 tokens at once, and the model reads 5"):
        LatePieces(3).vectors(reader(limit=5), ids)
    with pytest.raises(ValueError, match="a piece of 2 tokens has no room"):
        Averaged(2).vectors(reader(), ids)


def test_documents_are_cut_at_the_length_and_queries_at_what_the_model_reads(reader):
    assert reader(length=6).tokens(text(5, 6, 7, 8, 9)) == [5, 6, 7, 8]
    far = Collection((text(*[5] * 12, 20), text(*[5] * 12, 30)), ((text(20, 20), 0), (text(*[30] * 9), 1)))
    found = evaluate(reader(length=24), far, Whole())
    assert (found.ndcg, found.accuracy) == (1.0, 1.0)
    assert evaluate(reader(length=24, limit=6), far, Averaged(6)).accuracy == 1.0
    assert evaluate(reader(length=24), far, Whole(6)).accuracy == 0.0  # the words are beyond: both documents are equal
    assert evaluate(reader(length=10), far, Averaged(6)).accuracy == 0.0


def test_several_ways_read_what_they_share_once(reader, monkeypatch):
    collection = Collection((text(*range(5, 25)), text(*range(25, 45))), ((text(7, 8), 0), (text(30), 1)))
    ways = [Whole(8), Whole(), Averaged(6), Averaged(6, 2), BestPiece(6), BestPiece(8), LatePieces(5)]
    alone = [evaluate(reader(), collection, way) for way in ways]
    read = Reader.vectors
    seen = []
    monkeypatch.setattr(Reader, "vectors", lambda self, rows: seen.append(len(rows)) or read(self, rows))
    assert evaluate_all(reader(), collection, ways) == alone
    pieces = [1, 1, 5, 2, 4]  # of a document of 20 tokens: Averaged(6) and BestPiece(6) share theirs
    assert seen == [len(collection.queries), *pieces, *pieces]


def test_vectors_do_not_depend_on_the_batch():
    model = hf_models.make("bert")
    reader = Reader(model.train(), words.Tokenizer(), Pooling(), 40)
    rows = [[0, *range(5, 5 + count), 2] for count in (30, 3, 17, 1)]
    torch.testing.assert_close(
        reader.vectors(rows), torch.cat([reader.vectors([row]) for row in rows]), atol=1e-5, rtol=0
    )
    assert model.training


def test_an_interval_draws_documents():
    each = torch.tensor([1.0] * 50 + [0.0] * 50)
    low, high = interval(each, torch.tensor([0] * 50 + [1] * 50))
    assert (low, high) == (0.0, 1.0)  # two documents, and nothing in between
    low, high = interval(each, torch.arange(100))
    assert low == pytest.approx(0.4, abs=0.02)
    assert high == pytest.approx(0.6, abs=0.02)
    assert interval(torch.ones(4), torch.tensor([7, 7, 9, 9])) == (1.0, 1.0)  # documents without queries do not count


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


DOCUMENTS = [{"kind": "doc", "id": f"m{number}", "text": text(*[10 + number] * 30)} for number in range(6)]
QUERIES = [{"kind": "query", "summary": text(10 + number, 11 + number), "doc": f"m{number}"} for number in range(6)]


def test_documents_are_spread_over_the_file_and_keep_their_queries(tmp_path):
    path = write(tmp_path / "a.jsonl", *DOCUMENTS, "", *QUERIES)
    found = read_collection(path, 3)
    assert found.documents == tuple(DOCUMENTS[number]["text"] for number in (0, 2, 4))
    assert found.queries == tuple((QUERIES[2 * number]["summary"], number) for number in range(3))
    assert len(read_collection(path).documents) == 6


def test_a_query_is_its_summary_or_else_its_text_or_question(tmp_path):
    query = {"kind": "query", "doc": "m1"}
    rows = [{**query, "question": "a", "summary": "b"}, {**query, "text": "c"}, {**query, "question": "d"}]
    found = read_collection(write(tmp_path / "a.jsonl", *DOCUMENTS, *rows))
    assert found.queries == (("b", 1), ("c", 1), ("d", 1))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([*DOCUMENTS, "{"], "line 7: each line must be an object"),
        ([*DOCUMENTS, "[1]"], "line 7: each line"),
        ([{"kind": "document", "id": 1}], "line 1: .*kind 'document'"),
        ([*DOCUMENTS, {"kind": "query", "doc": "m1"}], "summary"),
        ([*DOCUMENTS, {"kind": "query", "doc": "m9", "text": "x"}], "does not have: m9"),
        (DOCUMENTS, "6 documents and 0 queries"),
        ([DOCUMENTS[0], QUERIES[0]], "1 documents and 1 queries"),
    ],
)
def test_damaged_collections(tmp_path, rows, words):
    with pytest.raises(ValueError, match=words):
        read_collection(write(tmp_path / "a.jsonl", *rows))


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        scores.score(f"longembed:{tmp_path / 'none'}", [], 32)
    with pytest.raises(ValueError, match="longembed needs data; write longembed:PATH"):
        scores.score("longembed", [], 32)


def test_adapt_measures_documents_beside_the_ways_of_the_original(tmp_path, monkeypatch):
    monkeypatch.setattr(scores, "PIECES", (16, 10**4))
    path = write(tmp_path / "a.jsonl", *DOCUMENTS, *QUERIES)
    score = scores.score(f"longembed:{path}", [], 32)
    done = adapted(hf_models.make("bert"), budget="1steps", scores={"longembed": score}, out=tmp_path / "out")
    assert [each.way for each in done.readings] == [
        "first 40 tokens", "pieces of 16, averaged", "pieces of 16, the best one (many vectors)"]  # fmt: skip
    assert done.rows[0].scores["longembed"] == done.readings[0].ndcg
    assert all(0 <= each.low <= each.ndcg <= each.high <= 1 for each in done.readings)
    assert "pieces of 16, averaged" in str(done)
    assert "pieces of 16, averaged" in (tmp_path / "out" / "README.md").read_text()
    kept = json.loads((tmp_path / "out" / "adapt.json").read_text())["readings"]
    assert kept[1] == {**{name: getattr(done.readings[1], name) for name in ("way", "ndcg", "low", "high", "accuracy")}}
    model = locant.load(str(tmp_path / "out"))
    assert Reader(model, words.Tokenizer(), Pooling()).limit == 4096


# ------------------------------------------------------------------------------------------------- hidden facts


@pytest.mark.parametrize("length", [64, 256])
@pytest.mark.parametrize(
    "make", [passkeys, lambda *a, **k: needles(a[0], "Some prose, of a few words. " * 9, *a[1:], **k)]
)
def test_hidden_facts_fill_the_length_and_hide_one_fact_in_each_document(make, length):
    letters = words.Letters()
    found = make(letters, length, documents=10, queries=4, seed=3)
    assert found == make(letters, length, documents=10, queries=4, seed=3)
    assert found != make(letters, length, documents=10, queries=4, seed=4)
    sizes = [len(letters(document)["input_ids"]) for document in found.documents]
    assert len(sizes) == 10
    assert max(sizes) <= length
    assert min(sizes) > length - 12  # one more word has no room
    places = set()
    for query, number in found.queries:
        name = next(part for part in query.split("?")[0].split() if part in found.documents[number])
        name = " ".join(word.strip("?.") for word in query.split() if word[0].isupper())
        full = next(f"{a} {b}" for a, b in zip(name.split(), name.split()[1:], strict=False)
                    if f"{a} {b}" in found.documents[number])  # fmt: skip
        assert [full in document for document in found.documents].count(True) == 1
        places.add(found.documents[number].index(full))
    assert len(places) > 1


def test_hidden_facts_refuse_what_cannot_be():
    with pytest.raises(ValueError, match="no room for the sentence"):
        passkeys(words.Letters(), 20)
    with pytest.raises(ValueError, match="documents must be from 2 to 500, got 501"):
        passkeys(words.Letters(), 256, documents=501)
    with pytest.raises(ValueError, match="queries must be from 1 to the 5 documents, got 6"):
        passkeys(words.Letters(), 256, documents=5, queries=6)
    with pytest.raises(ValueError, match="empty"):
        needles(words.Letters(), " ", 256)
