"""Files that somebody else may have written."""

import os

import pytest

from locant.runs import untrusted


def test_only_a_regular_file_has_a_size(tmp_path):
    (tmp_path / "file").write_bytes(b"123")
    assert untrusted.size_of(tmp_path / "file") == 3
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match=f"{path} is not a regular file"):
            untrusted.size_of(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting"),
        (b"\xff{}", "can't decode byte"),
        (b"[" * 100_000, "nested too deeply"),
        (b'[{"a": 1, "b": 2, "b": 3}]', "the name 'b' occurs twice"),
        (b"[1" + b"0" * 10_000 + b"]", "digits"),
        (b"3", "expected a JSON {kind}, got int"),
    ],
)
@pytest.mark.parametrize(("read", "kind"), [(untrusted.read_json, "object"), (untrusted.read_list, "list")])
def test_damaged_files_are_named(read, kind, content, words, tmp_path):
    path = tmp_path / "it.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} is damaged: .*{words.format(kind=kind)}"):
        read(path)


def test_lists_and_objects(tmp_path):
    path = tmp_path / "it.json"
    path.write_text('["grün", {"a": {}}]', encoding="utf-8")
    assert untrusted.read_list(path) == ["grün", {"a": {}}]
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        untrusted.read_json(path)
    path.write_text('{"a": [1]}', encoding="utf-8")
    assert untrusted.read_json(path) == {"a": [1]}
    with pytest.raises(ValueError, match="expected a JSON list, got dict"):
        untrusted.read_list(path)


def test_the_largest_json(tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted, "LARGEST_JSON", 7)
    path = tmp_path / "it.json"
    path.write_text('{"a":1}')
    assert untrusted.read_json(path) == {"a": 1}
    path.write_text('{"a":10}')
    with pytest.raises(ValueError, match="has 8 bytes; a JSON file may have 7"):
        untrusted.read_json(path)


def test_values_in_errors_are_short():
    assert untrusted.shortened("abc", 5) == "'abc'"
    assert untrusted.shortened("abcd", 5) == "'abc…"
    assert untrusted.shortened("x" * 78) == repr("x" * 78)
    assert len(untrusted.shortened("x" * 79)) == 80


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (ValueError("\n one\ntwo"), "one"),
        (ValueError(" \n"), "ValueError"),
        (NotImplementedError(), "NotImplementedError"),
    ],
)
def test_the_first_line_of_an_error(problem, line):
    assert untrusted.first_line(problem) == line
