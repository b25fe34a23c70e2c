"""`locant.sharpen`: the map against its formula, and an encoder that computes it."""

import json
import re
import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize

import locant
from locant.adaptation.retrieval import read_collection, read_documents
from locant.adaptation.sharpening import Sharpened, own_document, reader_of, sharpen, sharpening
from tests import sentence_models

TEXTS = [f"w{n} {'abc'[n % 3] * 5} " * (6 + n) for n in range(8)]
"""Documents of 8 … 16 pieces of 12 tokens for the tiny tokenizer, which makes a token of each letter."""


@pytest.fixture
def folder(tmp_path):
    return sentence_models.save(tmp_path / "encoder")


def planted(*, documents=40, pieces=12, size=16, seed=0):
    """Vectors that differ between documents in four small coordinates, and within them in four large ones."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(documents):
        vectors = 0.1 * torch.randn(pieces, size, generator=generator)
        vectors[:, :4] += 0.5 * torch.randn(4, generator=generator)
        vectors[:, 4:8] += 2 * torch.randn(pieces, 4, generator=generator)
        found.append(vectors)
    return found


@pytest.mark.parametrize("shrink", [0.1, 0.5, 1.0])
def test_the_matrix_is_that_of_the_formula(shrink):
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(n, 6)) + rng.normal(size=6) for n in (2, 3, 7)]
    covariance = np.zeros((6, 6))
    for part in parts:
        for vector in part:
            step = vector - np.mean(part, axis=0)
            covariance += np.outer(step, step)
    covariance /= (2 - 1) + (3 - 1) + (7 - 1)
    mixed = (1 - shrink) * covariance + shrink * np.trace(covariance) / 6 * np.eye(6)
    wanted = np.linalg.inv(sqrtm(mixed * 6 / np.trace(covariance)))
    found = sharpening([torch.tensor(part) for part in parts], shrink)
    assert np.abs(found.numpy() - wanted).max() < 1e-12
    if shrink == 1:
        assert np.abs(found.numpy() - np.eye(6)).max() < 1e-12


def test_documents_are_told_apart_by_what_differs_between_them():
    parts, others = planted(), planted(seed=1)
    same = [torch.eye(16)] * 40
    before = own_document(others, same)
    after = own_document(others, [sharpening(parts).float()] * 40)
    assert before < 0.1
    assert after > 2.5 * before


def test_the_share_of_own_documents_against_a_loop():
    parts = planted(documents=5, pieces=4)
    matrices = [sharpening(planted(seed=seed)).float() for seed in range(5)]
    hits = 0
    for number, part in enumerate(parts):
        for at in range(4):
            rest = torch.stack([vector for other, vector in enumerate(part) if other != at]).mean(0)
            rivals = [rest if each == number else parts[each].mean(0) for each in range(5)]
            scores = [torch.cosine_similarity(part[at] @ matrices[number], rival @ matrices[number], dim=0)
                      for rival in rivals]  # fmt: skip
            hits += int(torch.stack(scores).argmax() == number)
    assert own_document(parts, matrices) == hits / 20


def test_the_encoder_computes_the_map(folder, tmp_path):
    encoder = sentence_models.opened(folder)
    plain = torch.tensor(encoder.encode(sentence_models.TEXTS))
    done = sharpen(encoder, TEXTS, piece=12)
    assert done.model is encoder
    assert sentence_models.kinds(encoder) == ["Transformer", "Pooling", "Normalize", "Dense", "Normalize"]
    mapped = torch.tensor(encoder.encode(sentence_models.TEXTS))
    assert (done.map(plain) - mapped).abs().max() < 1e-5
    assert (plain - mapped).abs().max() > 0.01
    reader = reader_of(sentence_models.opened(folder))
    vectors = [reader.vectors(reader.pieces(reader.tokens(text), 12)) for text in TEXTS]
    assert (sharpening(vectors) - done.matrix).abs().max() < 1e-6
    assert (done.documents, done.pieces) == (8, sum(map(len, vectors)))


def test_vectors_are_those_of_all_modules(tmp_path):
    """A dense layer before the map belongs to the vectors."""
    encoder = sentence_models.opened(sentence_models.save(tmp_path / "dense", dense=True))
    reader = reader_of(encoder)
    rows = [reader.pieces(reader.tokens(text), 24)[0] for text in sentence_models.TEXTS]
    assert (reader.vectors(rows) - torch.tensor(encoder.encode(sentence_models.TEXTS))).abs().max() < 1e-5
    plain = torch.tensor(encoder.encode(sentence_models.TEXTS))
    done = sharpen(encoder, TEXTS, piece=12)
    assert done.matrix.shape == (8, 8)
    assert (done.map(plain) - torch.tensor(encoder.encode(sentence_models.TEXTS))).abs().max() < 1e-5


def test_the_folder_opens_without_locant(folder, tmp_path):
    done = sharpen(folder, TEXTS, piece=12, out=tmp_path / "out")
    wanted = done.model.encode(sentence_models.TEXTS)
    code = (
        "import json, sys\n"
        "from sentence_transformers import SentenceTransformer\n"
        "vectors = SentenceTransformer(sys.argv[1], device='cpu').encode(json.loads(sys.argv[2]))\n"
        "assert 'locant' not in sys.modules\n"
        "print(json.dumps(vectors.tolist()))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out"), json.dumps(sentence_models.TEXTS)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    assert np.abs(np.array(json.loads(found)) - wanted).max() < 1e-6
    facts = json.loads((tmp_path / "out" / "sharpen.json").read_text())
    assert (facts["piece"], facts["shrink"], facts["before"]) == (12, 0.5, done.before)


@pytest.mark.filterwarnings("ignore::locant.hf.WordOrderWarning")
def test_a_swapped_encoder_reads_long_documents_and_is_sharpened(folder, tmp_path):
    encoder = sentence_models.opened(folder)
    locant.swap(encoder[0].auto_model, "native@recurrent:length=24+local:window=23")
    encoder.max_seq_length = 200
    done = sharpen(encoder, TEXTS, piece=24, out=tmp_path / "out")
    again = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert np.abs(again.encode(TEXTS) - done.model.encode(TEXTS)).max() < 1e-6
    assert np.abs(again.encode([TEXTS[0]]) - again.encode([TEXTS[0][:20]])).max() > 1e-3  # it reads on


def test_documents_of_a_file_and_of_a_folder(tmp_path):
    rows = [{"kind": "doc", "id": "a", "text": "one"}, {"kind": "query", "doc": "a", "summary": "no document"},
            {"kind": "doc", "id": "b", "text": "two"}]  # fmt: skip
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_documents(tmp_path / "c.jsonl") == ["one", "two"]
    (tmp_path / "texts").mkdir()
    for name in ("b.txt", "a.txt", ".hidden"):
        (tmp_path / "texts" / name).write_text(name)
    assert read_documents(tmp_path / "texts") == ["a.txt", "b.txt"]
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_documents(tmp_path / "nowhere")


def test_of_many_documents_some_are_read(folder):
    read = []
    done = sharpen(folder, TEXTS, piece=12, most=2, on_stage=read.append)
    assert done.documents == 2
    assert read[0].startswith("reading 2 documents in ")
    assert (done.before, done.after) == (None, None)
    assert "there are too few documents" in done.notices[0]


def test_a_map_that_does_not_help_is_named():
    done = Sharpened(None, torch.eye(2), 4, 8, before=0.5, after=0.5)
    assert "not shown that the map tells these documents apart" in done.notices[0]
    assert Sharpened(None, torch.eye(2), 4, 8, before=0.5, after=0.6).notices == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"documents": ["w1"] * 5}, "0 of 5 documents have more than one piece of 12 tokens"),
        ({"documents": [TEXTS[0], "w1"]}, "1 of 2 documents have more than one piece"),
        ({"documents": [" " * 50 + "w1"] * 9, "most": 3}, "0 of 3 documents have more than one piece"),
        ({"shrink": 0}, "shrink must be from 1e-06 to 1, got 0"),
        ({"shrink": 1.5}, "got 1.5"),
        ({"most": 1}, "most must be at least 2, got 1"),
        ({"shrink": 1e-80}, "got 1e-80"),
        ({"piece": 65}, "piece must be from 3 to 24, the tokens that the encoder reads at once; got 65"),
        ({"piece": 2}, "piece must be from 3 to 24"),
        ({"length": 2}, "length must be at least 3, got 2"),
        ({"length": 12}, "or a larger length (it is 12)"),
        ({"documents": []}, "there are no documents"),
        ({"documents": ["a " * 100] * 4, "piece": 12}, "mean variance of 0; it must be above 0"),
    ],
)
def test_bad_arguments_are_refused_and_change_nothing(folder, tmp_path, arguments, words):
    encoder = sentence_models.opened(folder)
    given = {"documents": TEXTS, "piece": 12, "out": tmp_path / "out", **arguments}
    with pytest.raises(ValueError, match=re.escape(words)):
        sharpen(encoder, **given)
    assert len(encoder) == 3
    assert not (tmp_path / "out").exists()


def test_models_that_cannot_be_sharpened_are_refused(folder, tmp_path):
    with pytest.raises(TypeError, match="model must be a SentenceTransformer, a folder or a hub name, got Linear"):
        sharpen(torch.nn.Linear(2, 2), TEXTS)
    with pytest.raises(ValueError, match="truncates its vectors to 8 numbers"):
        sharpen(SentenceTransformer(folder, device="cpu", truncate_dim=8), TEXTS)
    with pytest.raises(ValueError, match=r"expected float32 weights, got torch\.bfloat16"):
        sharpen(sentence_models.opened(folder).bfloat16(), TEXTS)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("")
    encoder = sentence_models.opened(folder)
    with pytest.raises(ValueError, match="is not empty"):
        sharpen(encoder, TEXTS, piece=12, out=tmp_path / "full")
    assert len(encoder) == 3


def test_weights_that_are_not_finite_are_refused(folder):
    encoder = sentence_models.opened(folder)
    with torch.no_grad():
        next(encoder[0].auto_model.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        sharpen(encoder, TEXTS, piece=12)


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        ("one long text", "there is no file or folder 'one long text'"),
        ("word " * 2000, "there is no file or folder 'word word"),
        (None, "must be texts or a path, got NoneType"),
        ({"a": TEXTS[0], "b": TEXTS[1]}, "must be texts or a path, got dict"),
        ([TEXTS[0], None, TEXTS[1]], "document 1 must be a text (str), got NoneType"),
        ([TEXTS], "document 0 must be a text (str), got list"),
    ],
)
def test_documents_that_are_no_texts_are_refused(folder, documents, words):
    with pytest.raises((TypeError, FileNotFoundError), match=re.escape(words)):
        sharpen(folder, documents, piece=12)


def test_documents_of_any_iterable(folder):
    wanted = sharpen(folder, TEXTS, piece=12).matrix
    assert torch.equal(sharpen(folder, (text for text in TEXTS), piece=12).matrix, wanted)


def test_short_documents_take_no_place_of_long_ones(folder):
    mixed = [text for long in TEXTS for text in ("w1", long)]
    assert sharpen(folder, mixed, piece=12, most=4).documents == 4


def test_names_of_modules_that_are_taken(folder):
    modules = list(sentence_models.opened(folder))
    named = OrderedDict(zip(("0", "1", "3"), modules, strict=True))
    encoder = SentenceTransformer(modules=named, device="cpu")
    plain = torch.tensor(encoder.encode(sentence_models.TEXTS))
    done = sharpen(encoder, TEXTS, piece=12)
    assert sentence_models.kinds(encoder) == ["Transformer", "Pooling", "Normalize", "Dense", "Normalize"]
    assert (done.map(plain) - torch.tensor(encoder.encode(sentence_models.TEXTS))).abs().max() < 1e-5


@pytest.mark.parametrize("problem", [OSError("disk full"), KeyboardInterrupt()])
def test_an_encoder_that_cannot_be_saved_is_as_it_was(folder, tmp_path, monkeypatch, problem):
    encoder = sentence_models.opened(folder)
    before = encoder.encode(sentence_models.TEXTS)

    def save(path):
        raise problem

    monkeypatch.setattr(encoder, "save", save)
    with pytest.raises(type(problem)):
        sharpen(encoder, TEXTS, piece=12, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert sentence_models.kinds(encoder) == ["Transformer", "Pooling", "Normalize"]
    assert np.array_equal(encoder.encode(sentence_models.TEXTS), before)


def test_vectors_that_are_not_those_of_the_tokens_are_refused(folder):
    encoder = sentence_models.opened(folder)
    encoder.prompts, encoder.default_prompt_name = {"document": "the mat sat "}, "document"
    with pytest.raises(ValueError, match="it writes its prompt 'document' before every text"):
        sharpen(encoder, TEXTS, piece=12)
    assert len(encoder) == 3

    class Noisy(Normalize):
        def forward(self, features):
            wanted = features["input_ids"].sum(-1, keepdim=True)  # a feature that the reader does not have
            return {**features, "sentence_embedding": features["sentence_embedding"] * wanted}

    encoder = SentenceTransformer(modules=[*list(sentence_models.opened(folder))[:2], Noisy()], device="cpu")
    with pytest.raises(ValueError, match=r"with the modules Transformer, Pooling, Noisy \(KeyError: 'input_ids'\)"):
        sharpen(encoder, TEXTS, piece=12)


def test_pieces_are_no_longer_than_what_encode_reads(folder):
    encoder = sentence_models.opened(folder)
    assert encoder.max_seq_length == 24  # the transformer could read 64
    words = []
    sharpen(encoder, TEXTS, on_stage=words.append)
    tokens = [len(encoder.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in TEXTS]
    assert words[0].startswith(f"reading 8 documents in {sum(-(-count // 22) for count in tokens)} pieces")


def test_state_of_the_caller_stays(folder):
    encoder = sentence_models.opened(folder)
    encoder.requires_grad_(False).eval()
    torch.manual_seed(0)
    wanted = torch.rand(2)
    torch.manual_seed(0)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        done = sharpen(encoder, TEXTS, piece=12)
    assert torch.equal(torch.rand(2), wanted)
    assert not any(module.training for module in encoder.modules())
    assert not any(parameter.requires_grad or parameter.is_inference() for parameter in encoder.parameters())
    assert torch.equal(done.matrix, sharpen(folder, TEXTS, piece=12).matrix)


def test_halves_of_equal_pieces_are_not_checked(folder):
    done = sharpen(folder, ["a " * 100, TEXTS[1], "b " * 100, TEXTS[3]], piece=12)
    assert (done.before, done.after) == (None, None)
    assert "or all their pieces are equal" in done.notices[0]


def test_a_model_that_cannot_be_opened_is_named():
    with pytest.raises(OSError, match="nowhere/at-all is no folder here, and cannot be opened as a hub name"):
        sharpen("nowhere/at-all", TEXTS)


def test_lines_of_a_collection(tmp_path):
    path = tmp_path / "c.jsonl"
    rows = [{"kind": "doc", "id": "a", "text": "one\u2028two"}, {"kind": "doc", "id": "b", "text": "three\x85"}]
    path.write_text("\ufeff" + "\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    assert read_documents(path) == ["one\u2028two", "three\x85"]
    path.write_text("\r\n".join(map(json.dumps, rows)))
    assert len(read_documents(path)) == 2
    for text in (None, 5, ["w"]):
        path.write_text(json.dumps({"kind": "doc", "id": "a", "text": text}))
        with pytest.raises(ValueError, match=r"line 1: .*the text is not a string"):
            read_documents(path)
    path.write_bytes(json.dumps(rows[1], ensure_ascii=False).encode("latin-1"))
    with pytest.raises(ValueError, match=r"c\.jsonl is not text in UTF-8"):
        read_documents(path)
    twice = [{"kind": "doc", "id": "a", "text": "one"}, {"kind": "doc", "id": "a", "text": "two"}]
    path.write_text("\n".join(map(json.dumps, [*twice, {"kind": "query", "doc": "a", "text": "one"}])))
    with pytest.raises(ValueError, match="two documents with the id 'a'"):
        read_collection(path)


def test_hidden_folders_are_not_read(tmp_path):
    for name in ("a.txt", ".git/b.txt", "c/.checkpoints/d.txt", "c/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read_documents(tmp_path) == ["a.txt", "c/e.txt"]


def test_tokens_of_a_long_text_are_those_of_its_beginning(folder):
    reader = reader_of(sentence_models.opened(folder), length=40)
    for text in (TEXTS[5] * 300, "w1 " + "abc" * 3000, "antidisestablishment " * 500, " " * 3000 + TEXTS[3]):
        whole = reader.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert reader.tokens(text) == whole[:38]
