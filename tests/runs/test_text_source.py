"""Where texts are read from, and what is held out of them."""

import gzip
import lzma

import pytest

from locant.runs import text_source


def test_files_are_read_packed_or_plain(tmp_path):
    for name, opener in (("a.txt", open), ("a.txt.gz", gzip.open), ("a.txt.xz", lzma.open)):
        with opener(tmp_path / name, "wt", encoding="utf-8") as file:
            file.write("grün\n" * 100)
        assert text_source.text(str(tmp_path / name)).train.startswith("grün\n")


def test_the_end_of_a_text_is_held_out_and_nothing_is_in_both(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{n:05}\n" for n in range(1000)))
    found = text_source.text(str(tmp_path / "a.txt"))
    assert found.train + found.test == (tmp_path / "a.txt").read_text()
    assert len(found.test) == 6000 // 20


def test_a_folder_with_parts_keeps_them(tmp_path):
    for part in ("train", "valid", "test"):
        (tmp_path / f"wiki.{part}.raw").write_text(f"this is {part}")
    found = text_source.text(str(tmp_path))
    assert (found.train, found.test) == ("this is train", "this is valid")


def test_of_many_files_every_twentieth_is_held_out(tmp_path):
    for n in range(40):
        (tmp_path / f"{n:02}.txt").write_text(f"file {n:02}")
    found = text_source.text(str(tmp_path))
    assert found.test == "file 19\nfile 39"
    assert "file 19" not in found.train
    assert found.train.count("file") == 38


def test_the_default_needs_nothing_but_python():
    found = text_source.text(None)
    assert len(found.train) > 5_000_000
    assert "import" in found.test


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_text("  \n"), "is empty"),
        (lambda path: path.mkdir(), "has no files"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "not text in UTF-8"),
        (lambda path: None, "no file or folder"),
    ],
)
def test_what_is_no_text_is_said(tmp_path, make, message):
    make(tmp_path / "it.x")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        text_source.text(str(tmp_path / "it.x"))


def test_a_damaged_archive_is_said(tmp_path):
    (tmp_path / "a.txt.xz").write_bytes(b"not packed at all")
    with pytest.raises(ValueError, match="cannot be decompressed"):
        text_source.text(str(tmp_path / "a.txt.xz"))
