"""The one atomic write: a file is replaced whole, or not at all."""

import pytest

from locant.runs import files


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "new" / "a.txt"
    files.write(path, "one\r\n")
    files.write(path, "grün\n")
    assert path.read_bytes() == "grün\n".encode()
    assert [each.name for each in path.parent.iterdir()] == ["a.txt"]


def test_a_write_that_fails_keeps_the_old_content(tmp_path):
    path = tmp_path / "a.txt"
    files.write(path, "old")

    def fail():
        with files.replacing(path) as temporary:
            temporary.write_text("half of the n")
            assert path.read_text() == "old"
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fail()
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]


def test_an_incomplete_last_line_is_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    files.append(path, {"step": 1})
    files.append(path, {"step": 2})
    with path.open("a") as file:
        file.write('{"step": 3')
    assert files.lines(path) == [{"step": 1}, {"step": 2}]
