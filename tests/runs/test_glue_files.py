"""The files of GLUE. tests/experiments/tasks/test_glue.py has the formats of its nine tasks."""

import pytest

from locant.runs.glue_files import listed, read_dev, read_file, read_folder

HEADER = "index\tsentence1\tsentence2\tlabel\n"
LINE = "0\tone\ttwo\tentailment\n"


def write(folder, *names, text=HEADER + LINE):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_folder_of_all_tasks_or_of_one(tmp_path):
    inner = write(tmp_path / "rte", "train.tsv", "dev.tsv")
    for path in (tmp_path, inner):
        parts, folder = read_folder("RTE", path)
        assert (list(parts), folder) == (["train", "dev"], inner)
        assert read_dev("RTE", str(path)) == parts["dev"]
    assert (parts["dev"].texts, parts["dev"].labels, parts["dev"].left_out) == ((["one"], ["two"]), [0], 0)
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*none"):
        read_dev("RTE", str(tmp_path / "none"))


def test_a_plain_file_comes_before_a_packed_one(tmp_path):
    write(tmp_path, "train.tsv", "dev.tsv", "dev.tsv.gz", "dev.tsv.xz")
    assert len(read_folder("RTE", tmp_path)[0]["dev"].labels) == 1


def test_what_is_there_is_listed(tmp_path):
    words = r"has neither a folder RTE nor files such as train\.tsv; there is: "
    with pytest.raises(FileNotFoundError, match=f"{words}nothing$"):
        read_folder("RTE", tmp_path)
    for name in "jihgfedcba":
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match=f"{words}a, b, c, d, e, f, g, h$"):
        read_folder("RTE", tmp_path)
    (tmp_path / "RTE").mkdir()
    words = r"RTE has no train\.tsv \(nor train\.tsv\.xz, train\.tsv\.gz\); there is: "
    with pytest.raises(FileNotFoundError, match=f"{words}nothing$"):
        read_folder("RTE", tmp_path)
    write(tmp_path / "RTE", *"jihgfedcba")
    with pytest.raises(FileNotFoundError, match=f"{words}a, b, c, d, e, f, g, h$"):
        read_folder("RTE", tmp_path)


@pytest.mark.parametrize(("count", "shown"), [(60, repr("x" * 60)), (61, repr("x" * 60 + "…"))])
def test_a_malformed_line_is_shown_up_to_60_letters(count, shown, tmp_path):
    write(tmp_path, "a.tsv", text=HEADER + LINE + "x" * count + "\n")
    with pytest.raises(ValueError, match=f"1 of 2 lines do not have 4 fields .* line 3, with 1: {shown}$"):
        read_file("RTE", tmp_path / "a.tsv")


@pytest.mark.parametrize(
    ("lines", "malformed", "accepted"), [(200, 2, True), (200, 3, False), (9, 1, True), (9, 2, False)]
)
def test_a_hundredth_of_qqp_may_be_malformed_or_one_line(lines, malformed, accepted, tmp_path):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    text = header + "x\n" * malformed + "0\t1\t2\tone\ttwo\t1\n" * (lines - malformed)
    write(tmp_path, "a.tsv", text=text)
    if accepted:
        found = read_file("QQP", tmp_path / "a.tsv")
        assert (len(found.labels), found.left_out) == (lines - malformed, malformed)
    else:
        with pytest.raises(ValueError, match=f"{malformed} of {lines} lines"):
            read_file("QQP", tmp_path / "a.tsv")


@pytest.mark.parametrize("text", ["-0.1", "5.01", "five", "inf"])
def test_scores_are_from_0_to_5(text, tmp_path):
    header = "sentence1\tsentence2\tscore\n"
    write(tmp_path, "a.tsv", text=header + "a\tb\t0\na\tb\t5\n")
    assert read_file("STS-B", tmp_path / "a.tsv").labels == [0.0, 5.0]
    write(tmp_path, "a.tsv", text=f"{header}a\tb\t{text}\n")
    with pytest.raises(ValueError, match=f"a.tsv, line 2: the score is '{text}'; glue:STS-B has numbers from 0 to 5"):
        read_file("STS-B", tmp_path / "a.tsv")


def test_names_are_listed_with_commas():
    assert listed(("a", "b's")) == "'a', \"b's\""
