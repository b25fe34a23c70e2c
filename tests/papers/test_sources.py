"""The data folder: what is missing is named with the place to get it."""

import pytest

from locant.papers.sources import SOURCES, check_sources, check_texts, find_source


def test_everything_that_is_missing_is_named(tmp_path):
    (tmp_path / "wikitext-2-raw").mkdir()
    (tmp_path / "wikitext-2-raw" / "wiki.train.raw").touch()
    with pytest.raises(FileNotFoundError) as problem:
        check_sources(["wikitext", "glue:CoLA", "wikitext"], tmp_path)
    assert str(problem.value).count("wiki.valid.raw") == 1
    assert str(tmp_path / "glue/CoLA/dev.tsv") in str(problem.value)
    assert "gluebenchmark.com" in str(problem.value)


def test_without_a_folder_the_layout_is_printed():
    with pytest.raises(FileNotFoundError, match="DATA/squad/train"):
        check_sources(["squad"], None)
    check_sources([], None)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        check_sources(["squad"], tmp_path / "none")


def test_compressed_files_are_found(tmp_path):
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad" / "train-v1.1.json.xz").touch()
    (tmp_path / "squad" / "dev-v1.1.json.gz").touch()
    (tmp_path / "qmsum.jsonl.xz").touch()
    assert find_source("squad", tmp_path) == tmp_path / "squad"
    assert find_source("qmsum", tmp_path) == tmp_path / "qmsum.jsonl.xz"


def test_no_two_sources_have_one_place():
    places = [source.place for source in SOURCES.values()]
    assert len(set(places)) == len(places)


def test_text_that_cannot_be_read_is_named(tmp_path):
    books = tmp_path / "books"
    books.mkdir()
    (books / "good.txt").write_text("ä", encoding="utf-8")
    check_texts(["books"], tmp_path)
    (books / "old.txt").write_bytes("ä".encode("latin-1"))
    check_sources(["books"], tmp_path)
    with pytest.raises(ValueError, match=r"old\.txt is not text in UTF-8"):
        check_texts(["books"], tmp_path)
    (books / "old.txt").unlink()
    (books / "cut.txt.xz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"cut\.txt\.xz cannot be decompressed"):
        check_texts(["books"], tmp_path)
    (tmp_path / "qmsum.jsonl").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"qmsum\.jsonl is not text"):
        check_texts(["qmsum"], tmp_path)
