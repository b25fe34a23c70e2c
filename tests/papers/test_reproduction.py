"""Running the claims of a paper: shared steps, refused folders, stored verdicts."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from locant.papers import NAMES, find_paper, reproduction
from locant.papers.claim import Measured, Part
from locant.papers.place import Place
from locant.papers.reproduction import NOT_RUN
from locant.papers.rules import CONFIRMED, CONTRADICTED, Criterion, Larger
from locant.papers.steps import Adapting, Input, Joining, Measuring, Step, Training, joined, source, unique
from locant.papers.steps import made as model_made
from locant.runs import files, run_folder
from locant.runs.run_folder import held
from tests.papers import made_up
from tests.papers.made_up import PAPER, Broken, Positive

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def no_calls():
    made_up.CALLS.clear()


def run(at, claims=PAPER.claims):
    return list(reproduction.run(claims, at, on_step=lambda step, number, total: lambda share: None))


def test_verdicts_of_all_claims(tmp_path):
    at = reproduction.begin(PAPER, "quick", tmp_path / "out", None)
    found = run(at)
    assert [each.verdict for each in found] == [CONFIRMED, CONTRADICTED, NOT_RUN]
    assert "there is no number" in found[2].problem
    assert made_up.CALLS == ["numbers", "fails"]  # one step for three claims
    stored = reproduction.findings(PAPER, at)
    assert stored["X1"].found.parts[0].effect == found[0].found.parts[0].effect
    assert stored["X1"].found.tables["values"].column("value") == [1.0, 1.1, 1.2]
    assert stored["X3"].verdict == NOT_RUN


def test_what_is_done_is_not_done_again(tmp_path):
    at = reproduction.begin(PAPER, "quick", tmp_path, None)
    run(at)
    run(reproduction.begin(PAPER, "quick", tmp_path, None))
    assert made_up.CALLS == ["numbers", "fails", "fails"]  # a step that failed is tried again


def test_a_claim_with_a_finding_needs_no_steps(tmp_path):
    first = reproduction.begin(PAPER, "quick", tmp_path / "first", None)
    before = run(first, PAPER.claims[:1])
    second = tmp_path / "second"
    for path in ("reproduction.json", "findings"):  # as kept in a repository: no steps, no runs
        (shutil.copytree if (first.folder / path).is_dir() else shutil.copy)(first.folder / path, made(second) / path)
    at = reproduction.begin(PAPER, "quick", second, None)
    assert [step.name for step in reproduction.plan(PAPER.claims[:1], at).left] == []
    assert [step.name for step in reproduction.plan(PAPER.claims[:1], at).steps] == ["numbers"]
    assert run(at, PAPER.claims[:1]) == before
    assert made_up.CALLS == ["numbers"]
    assert [each.verdict for each in run(at, PAPER.claims[:2])] == [CONFIRMED, CONTRADICTED]
    assert made_up.CALLS == ["numbers", "numbers"]  # another claim needs the step that was not kept


@dataclasses.dataclass(frozen=True)
class Making(Step):
    """A step that leaves a model and a number."""

    name: str
    made: Input | None = None  # a model that it reads

    def run(self, at, progress):
        made_up.CALLS.append(self.name)
        assert self.made is None or self.made.path(at).exists()
        made(at.model(self.name))
        return {"calls": len(made_up.CALLS)}

    def operations(self, at):
        return 1.0

    def is_there(self, at):
        return at.model(self.name).exists()


def test_numbers_of_steps_are_enough_to_continue(tmp_path):
    """What a finished step made is made again if a step that is not done reads it, and only then."""
    at = Place(tmp_path, tmp_path, None, None)
    one, unread = Making("one"), Making("unread")
    two = Making("two", model_made("one"))
    three = Making("three", model_made("two"))
    steps = [one, unread, two, three]
    assert two.reads == {"one"}
    assert reproduction.remaining(steps, at) == steps
    for step in (one, unread, two):
        reproduction._do(step, at, lambda share: None)
    assert reproduction.remaining(steps, at) == [three]
    shutil.rmtree(tmp_path / "models")
    assert reproduction.remaining([one, unread, two], at) == []
    assert reproduction.remaining(steps, at) == [one, two, three]
    made(at.model("two"))
    assert reproduction.remaining(steps, at) == [three]  # nothing needs the model of `one`
    before = at.mark("two").read_text()
    made(at.model("one"))
    reproduction._do(two, at, lambda share: None)
    assert at.mark("two").read_text() == before  # claims may have read its numbers


def test_what_a_step_reads_is_found_in_its_function(tmp_path):
    at = reproduction.Place(tmp_path, tmp_path, None, find_paper("variance").sizes["small"])
    steps = unique(step for claim in find_paper("variance").claims for step in claim.steps(at))
    reads = {step.name: step.reads for step in steps}
    assert reads["variance-trace-clm-rope-s1"] == {"variance-clm-rope"}
    assert reads["variance-bigrams"] == {"variance-clm-nope"}
    assert reads["variance-stories"] == {"variance-stories-nope"}
    assert reads["variance-clm-nope"] == set()


@pytest.mark.parametrize("paper", [find_paper(name) for name in NAMES], ids=lambda paper: paper.name)
def test_a_step_comes_after_those_that_it_reads(paper, tmp_path):
    for size in paper.sizes.values():
        at = Place(tmp_path, tmp_path, None, size)
        for claim in paper.claims:
            before = set()
            for step in claim.steps(at):
                assert step.reads <= before, step.name
                before.add(step.name)


def made(folder):
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_a_step_that_was_interrupted_is_done_again(tmp_path):
    at = reproduction.begin(PAPER, "quick", tmp_path, None)
    whole = made_up.NUMBERS.function

    def stops(at):
        raise KeyboardInterrupt

    object.__setattr__(made_up.NUMBERS, "function", stops)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(at, PAPER.claims[:1])
    finally:
        object.__setattr__(made_up.NUMBERS, "function", whole)
    assert not reproduction.is_done(made_up.NUMBERS, at)
    assert [each.verdict for each in run(at, PAPER.claims[:1])] == [CONFIRMED]


def other_paper(**changes):
    return dataclasses.replace(PAPER, **changes)


class Easier(Positive):
    criteria = (Criterion("mean", Larger(0.4)),)


@pytest.mark.parametrize(
    ("paper", "preset", "what"),
    [
        (other_paper(name="other"), "quick", "paper: 'made' there, 'other' now"),
        (PAPER, "small", "preset: 'quick' there"),
        (other_paper(claims=(Easier(), *PAPER.claims[1:])), "quick", "rules"),
        (other_paper(sizes={"quick": made_up.Sizes((1.0,))}), "quick", "sizes"),
    ],
)
def test_another_paper_preset_rule_or_size_is_refused(tmp_path, paper, preset, what):
    reproduction.begin(PAPER, "quick", tmp_path, None)
    with pytest.raises(ValueError, match=what):
        reproduction.begin(paper, preset, tmp_path, None)
    assert reproduction.begin(PAPER, "quick", tmp_path, None).folder == tmp_path


def test_another_version_is_refused(tmp_path, monkeypatch):
    reproduction.begin(PAPER, "quick", tmp_path, None)
    monkeypatch.setattr(reproduction, "__version__", "99.0")
    with pytest.raises(ValueError, match=r"version: .* there, '99\.0' now"):
        reproduction.begin(PAPER, "quick", tmp_path, None)


def test_a_folder_with_foreign_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        reproduction.begin(PAPER, "quick", tmp_path, None)


def test_an_unknown_preset_or_claim(tmp_path):
    with pytest.raises(ValueError, match="quick, small, paper"):
        reproduction.begin(PAPER, "large", tmp_path / "out", None)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="X1, X2, X3"):
        PAPER.chosen(["A9"])
    assert [claim.id for claim in PAPER.chosen(["x2", "X2"])] == ["X2"]


@pytest.fixture
def another_process(tmp_path, monkeypatch):
    """A folder in which another process is doing the step `numbers`, and what ends that."""
    monkeypatch.setattr(reproduction, "PAUSE", 0.0)
    at = reproduction.begin(PAPER, "quick", tmp_path, None)
    lock = contextlib.ExitStack()
    lock.enter_context(held(at.work / reproduction.LOCKS / "numbers"))
    yield at, lock.close
    lock.close()


def test_a_step_of_another_process_is_waited_for(another_process):
    at, died = another_process
    waited = []

    def wait(steps):
        waited.append([step.name for step in steps])
        died()

    found = list(reproduction.run(PAPER.claims[:2], at, on_wait=wait))
    assert [each.verdict for each in found] == [CONFIRMED, CONTRADICTED]
    assert waited == [["numbers"]]
    assert made_up.CALLS == ["numbers"]


def test_what_another_process_did_meanwhile_is_not_done_again(another_process):
    at, died = another_process

    def finishes(steps):
        files.write_json(at.mark("numbers"), {"done": True, "seconds": 1.0, "numbers": {"values": [-1.0, -1.1, -1.2]}})
        died()

    found = list(reproduction.run(PAPER.claims[:1], at, on_wait=finishes))
    assert [each.verdict for each in found] == [CONTRADICTED]
    assert made_up.CALLS == []


def test_other_steps_go_on_meanwhile(another_process):
    at, died = another_process
    found = reproduction.run(PAPER.claims, at, on_wait=lambda steps: died())
    assert [each.id for each in found] == ["X3", "X1", "X2"]
    assert made_up.CALLS == ["fails", "numbers"]


def test_a_step_that_reads_a_locked_one_is_not_begun(another_process, monkeypatch):
    at, died = another_process
    reader = Measuring("reader", Reader(Input("model", "numbers")), made_up.seconds)
    monkeypatch.setattr(Broken, "steps", lambda self, at: [made_up.NUMBERS, reader])
    list(reproduction.run(PAPER.claims[2:], at, on_wait=lambda steps: died()))
    assert made_up.CALLS == ["numbers", "reader"]


@dataclasses.dataclass(frozen=True)
class Reader:
    model: Input

    def __call__(self, at):
        made_up.CALLS.append("reader")
        return {"values": [1.0]}


def test_missing_data_is_named_before_anything_runs(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"wiki\.train\.raw"):
        reproduction.check_data(PAPER.claims, made_up.Sizes(), tmp_path)
    reproduction.check_data(PAPER.claims[:2], made_up.Sizes(), None)


def test_the_estimate_of_a_large_step_is_refused(tmp_path):
    at = reproduction.begin(PAPER, "quick", tmp_path, None)
    planned = reproduction.plan(PAPER.claims, at)
    assert [step.name for step in planned.left] == ["numbers", "fails"]
    reproduction.check_machine(planned, at, long=False)
    large = dataclasses.replace(planned, seconds=1e6)
    with pytest.raises(ValueError, match=r"277\.8 h"):
        reproduction.check_machine(large, at, long=False)
    reproduction.check_machine(large, at, long=True)
    run(at, PAPER.claims[:1])
    assert [step.name for step in reproduction.plan(PAPER.claims, at).left] == ["fails"]


def test_a_machine_without_memory(tmp_path, monkeypatch):
    at = reproduction.begin(PAPER, "quick", tmp_path, None)
    monkeypatch.setattr(reproduction.machine_memory, "available", lambda: 2**20)
    with pytest.raises(ValueError, match=r"numbers needs about 1\.0 GiB"):
        reproduction.check_machine(reproduction.plan(PAPER.claims, at), at, long=True)


def test_a_damaged_finding(tmp_path):
    at = reproduction.begin(PAPER, "quick", tmp_path, None)
    run(at, PAPER.claims[:1])
    path = tmp_path / "findings" / "X1.json"
    path.write_text(json.dumps({"id": "X1"}))
    with pytest.raises(ValueError, match=r"X1\.json is damaged"):
        reproduction.findings(PAPER, at)


def test_two_steps_of_one_name():
    other = Measuring("numbers", made_up.fails, made_up.seconds)
    assert unique(iter([made_up.NUMBERS, made_up.NUMBERS])) == [made_up.NUMBERS]
    with pytest.raises(ValueError, match="called numbers"):
        unique(iter([made_up.NUMBERS, other]))


def test_an_effect_without_a_criterion():
    with pytest.raises(ValueError, match="median"):
        Positive().verdict(Measured([Part("median", "all", made_up.estimate([1.0]))]))


def test_joined_texts(tmp_path):
    for name in ("wikitext-2-raw", "books"):
        (tmp_path / name).mkdir()
    (tmp_path / "wikitext-2-raw" / "wiki.train.raw").write_text("train words")
    (tmp_path / "wikitext-2-raw" / "wiki.valid.raw").write_text("valid words")
    (tmp_path / "books" / "one.txt").write_text("x" * 19 + "y")
    at = Place(tmp_path / "out", tmp_path / "out", tmp_path, None)
    Joining("both", (source("wikitext"), source("books"))).run(at, lambda share: None)
    out = joined("both").path(at)
    assert (out / "train.txt").read_text() == "train words\n" + "x" * 19
    assert (out / "valid.txt").read_text() == "valid words\ny"


@pytest.mark.slow
def test_a_training_step(tmp_path):
    data = tmp_path / "data" / "wikitext-2-raw"
    data.mkdir(parents=True)
    words = " ".join(f"word{n % 97} and{n % 31}" for n in range(6000))
    (data / "wiki.train.raw").write_text(words)
    (data / "wiki.valid.raw").write_text(words[: len(words) // 4])
    at = Place(tmp_path / "out", tmp_path / "out", tmp_path / "data", None)
    preset = "quick:length=16,batch=2,layers=1,heads=2,width=16,vocabulary=300,evaluated=64,longest=1"
    step = Training("lm", "clm", ("nope", "alibi"), 2, 3, preset, source("wikitext"), keep_models=True)
    seen = []
    numbers = step.run(at, seen.append)
    files.write_json(at.mark("lm"), {"done": True, "seconds": 1.0, "numbers": numbers})
    assert step.operations(at) > 0
    found = step.scores(at)
    assert step.is_there(at)
    assert step.results(at)[0].steps == []
    assert {scheme: sorted(seeds) for scheme, seeds in found.items()} == {"nope": [0, 1], "alibi": [0, 1]}
    assert found["nope"][0] != found["nope"][1]
    folder = step.model_of("alibi", 1).path(at)
    assert (folder / "model.safetensors").exists()
    assert all(0 <= share <= 1 for share in seen)
    # Nothing is trained again.
    logging = dataclasses.replace(step, keep_models=False, keep_log=True)
    again = logging.run(at, seen.append)
    assert [{**run, "log": None} for run in again["runs"]] == [{**run, "log": None} for run in numbers["runs"]]
    assert [row["step"] for row in again["runs"][0]["log"]][-1] == 3
    assert not (folder / "model.safetensors").exists()
    assert not step.is_there(at)
    assert logging.is_there(at)


def test_an_adaptation_that_was_killed_before_its_mark_is_done(tmp_path):
    """`adapt` refuses a folder that is done, so the step must not call it again. There is no model to open here."""
    at = Place(tmp_path, tmp_path, tmp_path, None)
    step = Adapting("a", source("minilm"), "alibi", source("wikitext"), steps=1)
    with pytest.raises(FileNotFoundError):
        step.run(at, lambda share: None)
    at.model("a").mkdir(parents=True)
    (at.model("a") / run_folder.DONE).touch()
    files.write_json(at.model("a").parent / "a.json", {"rows": []})
    assert step.run(at, lambda share: None) == {"rows": []}


def test_numbers_of_a_step_with_other_settings_are_refused(tmp_path):
    at = Place(tmp_path, tmp_path, None, None)
    step = Making("one")
    reproduction._do(step, at, lambda share: None)
    assert reproduction.is_done(step, at)
    other = Making("one", model_made("another"))
    assert other.digest != step.digest == Making("one").digest
    with pytest.raises(ValueError, match=r"one\.json was made with other settings than those of today; delete it"):
        reproduction.remaining([other], at)
    mark = json.loads(at.mark("one").read_text())
    del mark["digest"]
    at.mark("one").write_text(json.dumps(mark))
    assert reproduction.is_done(other, at)  # a mark of before has none


def test_steps_have_digests_that_do_not_change():
    for paper in (find_paper(name) for name in NAMES):
        at = Place(Path(), Path(), None, paper.sizes["small"])
        first, second = ([step.digest for claim in paper.claims for step in claim.steps(at)] for _ in range(2))
        assert first == second
        steps = {step.name: step.digest for claim in paper.claims for step in claim.steps(at)}
        assert len(set(steps.values())) == len(steps)


@pytest.mark.parametrize("paper", [find_paper(name) for name in NAMES], ids=lambda paper: paper.name)
def test_the_table_in_the_documents_has_the_verdicts_of_the_stored_findings(paper):
    at = Place(DOCS / "results" / paper.name, Path(), None, paper.sizes["small"])
    page = (DOCS / "papers.md").read_text(encoding="utf-8")
    for claim in paper.claims:
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {claim.id} |")]
        finding = reproduction.findings(paper, at)[claim.id]
        said = "not run yet" if finding.verdict == NOT_RUN else f"**{finding.verdict}**"
        assert f"| {said} |" in row


@pytest.mark.parametrize("paper", [find_paper(name) for name in NAMES], ids=lambda paper: paper.name)
def test_the_stored_findings_have_the_rules_and_sizes_of_today(paper, tmp_path):
    shutil.copy(DOCS / "results" / paper.name / "reproduction.json", tmp_path)
    reproduction.begin(paper, "small", tmp_path, None)  # refuses others
