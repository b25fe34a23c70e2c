"""Where texts are read from, and what is held out of them."""

import gzip
import io
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


@pytest.mark.parametrize("name", ["a.txt.xz", "a.txt.gz"])
@pytest.mark.parametrize("damage", [lambda packed: b"not packed at all", lambda packed: packed[:-5]])
def test_a_damaged_archive_is_said(damage, name, tmp_path):
    packed = {"xz": lzma, "gz": gzip}[name[-2:]].compress(b"some text" * 9)
    (tmp_path / name).write_bytes(damage(packed))
    with pytest.raises(ValueError, match=f"{name} cannot be decompressed"):
        text_source.text(str(tmp_path / name))


@pytest.mark.parametrize("where", ["none.txt", "./none", "/none/of/it", "~/none"])
def test_what_looks_like_a_path_is_not_looked_for_on_the_hub(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"there is no file or folder {where}"):
        text_source.text(where)


def test_line_ends_are_those_of_python(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n")
    assert text_source.read(tmp_path / "a.txt") == "one\ntwo\nthree\n"


def test_a_file_must_fit_into_memory(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"12345")
    monkeypatch.setattr(text_source, "available", lambda: 5)
    assert text_source.read_bytes(tmp_path / "a.txt") == b"12345"
    monkeypatch.setattr(text_source, "available", lambda: 4)
    with pytest.raises(ValueError, match=r"has 0\.0 MiB, but only 0\.0 MiB of memory is free"):
        text_source.read_bytes(tmp_path / "a.txt")
    monkeypatch.setattr(text_source, "available", lambda: None)
    assert text_source.read_bytes(tmp_path / "a.txt") == b"12345"


def test_the_content_of_an_archive_has_a_limit(tmp_path, monkeypatch):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(bytes(1000)))
    size = path.stat().st_size
    for small, densest in ((1000, 0), (0, -(-1000 // size))):
        monkeypatch.setattr(text_source, "SMALL", small)
        monkeypatch.setattr(text_source, "DENSEST", densest)
        assert text_source.read_bytes(path) == bytes(1000)
    monkeypatch.setattr(text_source, "DENSEST", 999 // size)
    for small in (0, 999):
        monkeypatch.setattr(text_source, "SMALL", small)
        with pytest.raises(ValueError, match="decompresses to more than"):
            text_source.read_bytes(path)


def test_a_megabyte_is_read_and_a_small_archive_never_fills_the_memory(tmp_path, monkeypatch):
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(2**20)))  # of 1 kB
    assert len(text_source.read_bytes(tmp_path / "a.gz")) == 2**20
    asked = []

    class Endless(io.BytesIO):
        def read(self, most):
            asked.append(most)
            return b""

    monkeypatch.setitem(text_source.OPENERS, ".gz", lambda path, mode: Endless())
    text_source.read_bytes(tmp_path / "a.gz")
    assert asked[0] <= 2**27 + 1


@pytest.mark.parametrize(
    ("names", "train", "test"),
    [
        (("train.txt", "DEV.txt", "test.txt"), ["train.txt"], ["DEV.txt"]),
        (("train.txt", "test.txt"), ["train.txt"], ["test.txt"]),
        (("a/train-1.txt", "b/train-2.txt", "b/valid.txt"), ["a/train-1.txt", "b/train-2.txt"], ["b/valid.txt"]),
    ],
)
def test_names_of_files_decide_what_is_held_out(names, train, test, tmp_path):
    for name in (*names, ".train.swp", "readme"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = text_source.text(str(tmp_path))
    assert (found.train.split("\n"), found.test.split("\n"), found.name) == (train, test, tmp_path.name)


@pytest.mark.parametrize("names", [("train.txt", "more.txt"), ("valid.txt", "more.txt")])
def test_one_name_alone_decides_nothing(names, tmp_path):
    for name in names:
        (tmp_path / name).write_text("x" * 50)
    found = text_source.text(str(tmp_path))
    assert (len(found.train), len(found.test)) == (96, 5)  # 50 + a new line + 50


@pytest.mark.parametrize("count", [19, 20, 41])
def test_pieces_are_in_one_part(count, tmp_path):
    for n in range(count):
        (tmp_path / f"{n:02}.txt").write_text(f"{n:02}")
    found = text_source.text(str(tmp_path))
    held_out = [n for n in range(count) if n % 20 == 19]
    if held_out:
        assert found.test.split("\n") == [f"{n:02}" for n in held_out]
        assert found.train.split("\n") == [f"{n:02}" for n in range(count) if n not in held_out]
    else:
        assert found.train + found.test == "\n".join(f"{n:02}" for n in range(count))
        assert len(found.test) == (3 * 19 - 1) // 20


def test_the_source_of_python_without_packages_and_tests(tmp_path, monkeypatch):
    monkeypatch.setattr(text_source.sysconfig, "get_path", lambda name: {"stdlib": str(tmp_path)}[name])
    for name in (
        "b.py",
        "a/c.py",
        "site-packages/x.py",
        "a/dist-packages/x.py",
        "a/test/x.py",
        "a/tests/x.py",
        "x.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" if "x" in name.rpartition("/")[2] else b"\xff" + name.encode() * 100_000)
    found = text_source.text(None)  # 600,000 + 400,000 letters, and two that are not UTF-8
    whole = found.train + found.test
    assert whole == "\ufffd" + "a/c.py" * 100_000 + "\n\ufffd" + "b.py" * 100_000
    assert found.name == "the source of Python's standard library"
    (tmp_path / "b.py").write_text("b" * 399_998)
    with pytest.raises(ValueError, match=r"is not in .*; name a text of your own"):
        text_source.text(None)


@pytest.fixture
def hub(monkeypatch):
    """The parts of a data set, each a list of texts, and the names that were asked for."""
    from datasets import Dataset, DatasetDict

    parts, asked = {}, []

    def load(*names):
        asked.append(names)
        return DatasetDict({part: Dataset.from_dict({"text": texts, "n": texts}) for part, texts in parts.items()})

    monkeypatch.setattr("datasets.load_dataset", load)
    return parts, asked


def test_a_data_set_of_the_hub(hub):
    parts, asked = hub
    parts |= {"test": ["c"], "train": ["a", "b"], "validation": ["d", "e"]}
    assert text_source.text("some/text") == text_source.Text("a\nb", "d\ne", "some/text")
    del parts["validation"]
    assert text_source.text("some/text:small") == text_source.Text("a\nb", "c", "some/text:small")
    assert asked == [("some/text", None), ("some/text", "small")]
    del parts["test"]
    parts["train"] = [str(n) for n in range(20)]
    assert text_source.text("some/text").test == "19"
    parts["other"] = parts.pop("train")
    with pytest.raises(ValueError, match="some/text must have a part 'train' with a column 'text'"):
        text_source.text("some/text")


def test_a_data_set_without_texts_or_network(monkeypatch):
    from datasets import Dataset, DatasetDict

    monkeypatch.setattr("datasets.load_dataset", lambda *names: DatasetDict(train=Dataset.from_dict({"words": ["a"]})))
    with pytest.raises(ValueError, match="a column 'text'"):
        text_source.text("some/text")

    def offline(*names):
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(ValueError, match=r"some/text is not a file or folder, and .*no network"):
        text_source.text("some/text")
