"""`locant adapt`."""

import pytest

import locant
from locant.adaptation import adapting
from locant.cli import adapting as cli_adapting
from locant.runs import run_folder
from tests import bert, words
from tests.command_line import locant_command


def test_the_command_says_that_another_process_is_at_work(tmp_path):
    path = bert.save(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(words.text()))
    command = ["adapt", path, "alibi", "--text", str(tmp_path / "text.txt"), "-o", str(tmp_path / "out")]
    with run_folder.held(tmp_path / "out"):
        found = locant_command(*command)
    assert found.exit_code == 2
    assert "another process is working in" in found.output


def test_the_command_ends_with_a_table(tmp_path):
    path = bert.save(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(words.text()))
    rows = ["index\tsentence1\tsentence2\tscore", *(f"{n}\tw{n} w6 w7\tw{2 * n} w9\t{n % 5}" for n in range(8, 20))]
    (tmp_path / "STS-B").mkdir()
    (tmp_path / "STS-B" / "dev.tsv").write_text("\n".join(rows) + "\n")
    command = ["adapt", path, "tisa:kernels=2", "--text", str(tmp_path / "text.txt"), "-o", str(tmp_path / "out"),
               "--budget", "3steps", "--eval", f"stsb:{tmp_path / 'STS-B'}"]  # fmt: skip
    found = locant_command(*command)
    assert found.exit_code == 0, found.output
    for state in ("original", "silenced", "fitted", "adapted"):
        assert state in found.output
    assert locant.load(tmp_path / "out") is not None
    assert (tmp_path / "out" / "heads.png").stat().st_size > 10_000
    again = locant_command(*command)
    assert again.exit_code == 2
    assert "is done" in again.output


def test_a_command_killed_while_it_draws_draws_when_it_is_given_again(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("\n".join(words.text()))
    command = ["adapt", bert.save(tmp_path / "model"), "alibi", "--text", str(tmp_path / "text.txt"), "-o",
               str(tmp_path / "out"), "--budget", "2steps"]  # fmt: skip

    def die(done, path):
        path.write_bytes(b"half a picture")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cli_adapting, "draw_adaptation", die)
        assert locant_command(*command).exit_code == 130
    assert not (tmp_path / "out" / run_folder.DONE).exists()
    found = locant_command(*command)
    assert found.exit_code == 0, found.output
    assert (tmp_path / "out" / "heads.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("change", "words_"),
    [
        ({"--eval": "glue"}, "a score must be one of stsb, sentences, longembed, clm, mlm"),
        ({"--eval": "stsb"}, "stsb:PATH"),
        ({"--eval": "clm"}, "predicts no tokens"),
        ({"--text": "nowhere.txt"}, "no file or folder nowhere.txt"),
        ({"--train": "none"}, "--train: expected one of all, scheme; got 'none'"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path, change, words_):
    path = bert.save(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(words.text()))
    options = {"--text": str(tmp_path / "text.txt"), "-o": str(tmp_path / "out"), "--budget": "1steps", **change}
    found = locant_command("adapt", path, "alibi", *(x for pair in options.items() for x in pair))
    assert found.exit_code == 2
    assert words_ in " ".join(found.output.split())


def test_one_who_stops_the_command_is_told_how_to_go_on(tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(adapting, "adapt", stop)
    (tmp_path / "text.txt").write_text("\n".join(words.text()))
    command = ["adapt", bert.save(tmp_path / "model"), "alibi", "--text", str(tmp_path / "text.txt")]
    found = locant_command(*command, "-o", tmp_path / "out")
    assert found.exit_code == 130, found.output
    assert "the same command continues" in found.output
    assert "error" not in found.output


def test_the_command_shows_the_contrastive_stage(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(words.text(400)))
    found = locant_command("adapt", bert.save(tmp_path / "model"), "tisa:kernels=2", "--text", tmp_path / "text.txt",
                           "-o", tmp_path / "out", "--budget", "2steps", "--contrast", "2steps", "--length",
                           200)  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "the contrastive stage" in found.output
    assert "before contrast" in found.output
    assert (tmp_path / "out" / "contrast.csv").read_text().startswith("step,retrieval,agreement,seconds")
