"""The one atomic write: a file is replaced whole, or not at all."""

import os
import threading

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


def test_content_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, synced = tmp_path / "a.txt", []

    def fsync(number):
        synced.append((os.pread(number, 99, 0), path.exists()))

    monkeypatch.setattr(files.os, "fsync", fsync)
    with files.replacing(path) as temporary:
        assert temporary.parent == path.parent
        assert temporary.name.startswith(".a.txt.")  # hidden
        assert {str(os.getpid()), str(threading.get_ident())} <= {*temporary.name.split(".")}  # of nobody else
        temporary.write_text("whole")
    assert synced == [(b"whole", False)]


def test_json_is_for_readers_too(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"name": "grün", "of": [1]})
    assert path.read_bytes() == '{\n  "name": "grün",\n  "of": [\n    1\n  ]\n}\n'.encode()
    assert files.read_json(path) == {"name": "grün", "of": [1]}
    path.write_text("{")
    with pytest.raises(ValueError, match=r"a\.json is damaged: .*; delete its folder to run it again"):
        files.read_json(path)
    with pytest.raises(FileNotFoundError):
        files.read_json(tmp_path / "none.json")


def test_lines_of_json(tmp_path):
    path = tmp_path / "a.jsonl"
    assert files.lines(path) == []
    files.append(path, {"name": "grün"})
    assert path.read_bytes() == '{"name": "grün"}\n'.encode()
    path.write_text('{"step": 1}\n{"step": }\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 is damaged"):
        files.lines(path)
    os.mkfifo(tmp_path / "pipe")  # reading it would never end
    with pytest.raises(ValueError, match="not a regular file"):
        files.lines(tmp_path / "pipe")
