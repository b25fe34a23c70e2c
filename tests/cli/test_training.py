"""`locant compare`, `train` and `finetune` as they are typed."""

import json
from pathlib import Path

import pytest

import locant
from locant.experiments.learned import curves_of, stored_curves
from locant.hf import loading
from locant.report.comparison import comparison_page
from tests.command_line import locant_command

TINY = "quick:length=16,longest=2,batch=4,layers=1,width=16,heads=2,vocabulary=300,evaluated=256"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("one two three four five, once I caught a fish alive\n" * 300)
    return str(path)


def run(*words, code=0):
    done = locant_command(*words)
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def draws_from_stored_curves_alone(out, monkeypatch):
    """The page opens no model; without the stored curves it does, and is the same."""
    runs = [out / "runs" / name for name in ("learned.s0", "tisa-kernels=2.s0")]
    computed = [curves_of(locant.load(str(run)), length=16) for run in runs]
    assert [stored_curves(run) for run in runs] == computed
    assert [(each.fixed, bool(each.curves)) for each in computed] == [(False, True)] * 2
    with monkeypatch.context() as patch:
        patch.setattr(loading, "load", lambda *_, **__: pytest.fail("a model was opened"))
        drawn = comparison_page(out)
    assert "What each scheme learned" in [section.title for section in drawn.sections]
    stored = {run: (run / "curves.json").read_bytes() for run in runs}
    (runs[0] / "curves.json").unlink()
    (runs[1] / "curves.json").write_text("{")
    assert comparison_page(out) == drawn
    for run, content in stored.items():
        (run / "curves.json").write_bytes(content)


def test_compare_ends_with_a_table_and_a_page_and_does_nothing_twice(tmp_path, text, monkeypatch):
    command = ["compare", "clm", "--schemes", "learned,tisa:kernels=2", "--data", text, "--seeds", 1, "--budget",
               "6steps", "--preset", TINY, "-o", tmp_path / "out"]  # fmt: skip
    said = run(*command)
    assert "2 schemes × 1 seed, 6 steps each" in said
    assert "learned, seed 0: loss" in said
    assert "no winner" in said
    assert "cannot" in said  # a learned table at twice the length
    page = tmp_path / "out" / "report.html"
    assert page.exists()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").rglob("*") if path.is_file()}
    run(*command)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    draws_from_stored_curves_alone(tmp_path / "out", monkeypatch)
    # One more run of the same comparison, by hand.
    said = run("train", "clm", "alibi", "--data", text, "--budget", "6steps", "--preset", TINY, "-o", tmp_path / "out")
    assert "alibi, seed 0: loss" in said
    assert "alibi" in str(locant.native(locant.load(tmp_path / "out" / "runs" / "alibi.s0")))
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["schemes"][-1] == "alibi"


def test_finetune_starts_from_a_trained_model(tmp_path, text):
    run("train", "clm", "nope", "--data", text, "--budget", "6steps", "--preset", TINY, "-o", tmp_path / "one")
    trained = tmp_path / "one" / "runs" / "nope.s0"
    said = run("finetune", "clm", "native", "--model", trained, "--data", text, "--budget", "2steps", "--preset", TINY,
               "-o", tmp_path / "two")  # fmt: skip
    assert "native, seed 0: loss" in said
    first = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    second = [json.loads(line) for line in (tmp_path / "two/runs/native.s0/metrics.jsonl").read_text().splitlines()]
    assert second[0]["loss"] < first[0]["loss"]  # not from scratch


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "clmm", "--schemes", "nope", "-o", "x"], "did you mean 'clm'"),
        (["compare", "clm", "--schemes", "nope", "--budget", "soon", "-o", "x"], "a budget must look like"),
        (["compare", "clm", "--schemes", "nope,nope", "-o", "x"], "twice"),
        (["compare", "clm", "--schemes", "nope", "--preset", "huge", "-o", "x"], "unknown preset"),
        (["compare", "clm", "--schemes", "nope", "--data", "./none.txt", "-o", "x"], "no file or folder"),
        (["compare", "glue", "--schemes", "native", "-o", "x"], "glue needs one of its tasks"),
        (["compare", "clm:x", "--schemes", "native", "-o", "x"], "takes nothing after a colon"),
        (["finetune", "glue:CoLA", "native", "--model", "./none", "-o", "x"], "no such shape"),
    ],
)
def test_mistakes_are_said_in_one_sentence_and_nothing_is_left(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    assert message in run(*words, code=2)
    assert not list(Path(tmp_path).glob("x/runs/*"))
