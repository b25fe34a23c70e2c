"""`locant reproduce`, with a paper of our own in place of the real ones."""

import csv
import dataclasses
import sys

import pytest

from locant.cli import papers as cli_papers
from tests.command_line import locant_command
from tests.papers import made_up
from tests.papers.made_up import PAPER, Figures


@pytest.fixture(autouse=True)
def made_up_papers(monkeypatch):
    made_up.CALLS.clear()
    found = {
        "tisa": dataclasses.replace(PAPER, name="tisa", claims=PAPER.claims[:1]),
        "variance": dataclasses.replace(PAPER, name="variance", claims=PAPER.claims[1:2]),
        "huang": dataclasses.replace(PAPER, name="huang"),
    }
    monkeypatch.setattr(cli_papers, "find_paper", found.__getitem__)
    for name in found:
        monkeypatch.setitem(sys.modules, f"locant.report.papers.{name}", Figures())


def reproduce(*words):
    return locant_command("reproduce", *words)


def test_verdicts_are_printed_and_a_page_is_written(tmp_path):
    found = reproduce("huang", "--claim", "x1", "--claim", "X2", "-o", tmp_path / "out")
    assert found.exit_code == 0, found.output
    assert "2 claims, 1 of 1 steps to do" in found.stdout
    assert "X1  confirmed" in found.stdout
    assert "X2  contradicted" in found.stdout
    page = (tmp_path / "out" / "report.html").read_text()
    for words in ("Confirmed: X1.", "Contradicted: X2.", "Not run: X3.", "numbers are zero", "It was measured.",
                  "locant reproduce huang --claim X1 --preset quick -o DIR", "at least 0.5"):  # fmt: skip
        assert words in page
    assert "| X1 | numbers are positive | **confirmed** | 1.1 (mean: all) |" in (tmp_path / "out/claims.md").read_text()
    with (tmp_path / "out" / "csv" / "01-claims-and-verdicts.csv").open() as rows:
        table = {row["claim"]: row for row in csv.DictReader(rows)}
    assert table["X1"]["verdict"] == "confirmed"
    assert float(table["X1"]["effect"]) == pytest.approx(1.1)
    assert table["X3"]["effect"] == ""


def test_a_claim_that_was_not_run_sets_the_exit_code(tmp_path):
    data = tmp_path / "data" / "wikitext-2-raw"
    data.mkdir(parents=True)
    for name in ("wiki.train.raw", "wiki.valid.raw"):
        (data / name).touch()
    found = reproduce("huang", "--data", tmp_path / "data", "-o", tmp_path / "out")
    assert found.exit_code == 1
    assert "X3  not run" in found.stdout
    assert "there is no number" in found.stdout
    assert "X1  confirmed" in found.stdout


def test_missing_data_stops_before_the_first_step(tmp_path):
    found = reproduce("huang", "-o", tmp_path / "out")
    assert found.exit_code == 2
    assert "wiki.train.raw" in found.stderr
    assert made_up.CALLS == []
    assert not (tmp_path / "out").exists()


def test_all_papers_share_their_steps(tmp_path):
    found = reproduce("all", "--claim", "X1", "--claim", "X2", "-o", tmp_path / "out")
    assert found.exit_code == 0, found.output
    assert made_up.CALLS == ["numbers"]
    for name in ("tisa", "variance", "huang"):
        assert (tmp_path / "out" / name / "report.html").exists()
    again = reproduce("all", "--claim", "X1", "--claim", "X2", "-o", tmp_path / "out")
    assert again.exit_code == 0, again.output
    assert made_up.CALLS == ["numbers"]


def test_the_plan_runs_nothing(tmp_path):
    found = reproduce("all", "--plan", "-o", tmp_path / "out")
    assert found.exit_code == 0, found.output
    assert "numbers are positive" in found.stdout
    assert "steps to do" in found.stdout
    assert made_up.CALLS == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["bert"], "tisa, variance, huang"),
        (["tisa", "--preset", "large"], "quick, small"),
        (["huang", "--claim", "Z9"], "X1, X2, X3"),
        (["all", "--claim", "Z9"], "no paper has the claim 'Z9'; there are: X1"),
    ],
)
def test_wrong_words(tmp_path, words, expected):
    found = reproduce(*words, "-o", tmp_path / "out")
    assert found.exit_code == 2
    assert expected in found.stderr
    assert not (tmp_path / "out").exists()


def test_another_preset_in_the_same_folder(tmp_path):
    reproduce("tisa", "-o", tmp_path / "out")
    found = reproduce("tisa", "--preset", "small", "-o", tmp_path / "out")
    assert found.exit_code == 2
    assert "holds another reproduction" in found.stderr
