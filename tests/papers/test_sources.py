"""The data folder: what is missing is named with the place to get it."""

import pytest

from locant.papers.sources import SOURCES, check_sources, find_source


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
