"""The tables and conclusions of a folder of runs."""

import json
import math
import os

import pytest

from locant.experiments import results, tasks
from locant.experiments.learned import Learned
from locant.experiments.results import described, gaps, learned_curves, outcome, outcomes, sentences
from locant.experiments.run import Run
from locant.experiments.tasks.language import Causal
from locant.hf import loading
from locant.runs import run_folder
from tests.comparisons import begin, begun, fail, finish, folder_of, rows_of, whole, write


class Choice(Causal):
    name = "choice"
    metric = "accuracy"
    higher_is_better = True


def conclusions(out, comparison) -> list[str]:
    return sentences(comparison, rows_of(out, comparison))


def test_the_lowest_loss_is_first(tmp_path):
    rows = rows_of(tmp_path, whole(tmp_path))
    assert [row.scheme for row in rows] == ["tisa", "alibi", "learned", "nope"]
    by_scheme = {row.scheme: row for row in rows}
    tisa = by_scheme["tisa"]
    assert tisa.score.mean == pytest.approx(3.65)
    assert tisa.score.high == pytest.approx(3.65 + 0.37262, abs=1e-5)
    assert tisa.against.estimate.mean == pytest.approx(-0.45)
    assert tisa.against.estimate.low == pytest.approx(-0.57421, abs=1e-5)
    assert (tisa.against.verdict, by_scheme["nope"].against.verdict) == ("better", "no difference shown")
    assert tisa.by_length[1024].mean == pytest.approx(3.65 + 3 * 0.125)
    assert by_scheme["learned"].refused == dict.fromkeys((256, 512, 1024), "its positions end at 128")
    assert list(by_scheme["learned"].by_length) == [128]
    assert by_scheme["learned"].against is None
    assert (tisa.parameters, tisa.seconds_per_step, tisa.finished, tisa.wanted) == (0, 0.25, 3, 3)
    assert [row.scheme for row in rows if row.baseline] == ["learned"]


def test_the_highest_accuracy_is_first(tmp_path, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "choice", lambda detail: Choice())
    comparison = begin(tmp_path, ["a", "b", "c"], task="choice")
    for scheme, at in (("a", 0.6), ("b", 0.9), ("c", 0.3)):
        for seed in range(3):
            finish(tmp_path, comparison, scheme, seed, at + seed / 100 + (0.001 * seed**2 if scheme != "a" else 0))
    rows = rows_of(tmp_path, comparison)
    assert [(row.scheme, row.against and row.against.verdict) for row in rows] == [
        ("b", "better"), ("a", None), ("c", "worse"),
    ]  # fmt: skip
    assert conclusions(tmp_path, comparison)[0].startswith(
        "b has the best mean accuracy, 0.9117. Against the second, a: better"
    )


def test_a_score_that_is_no_number_is_last_and_wins_nothing(tmp_path):
    comparison = begin(tmp_path, ["learned", "rope", "nope"], seeds=2)
    for seed, (learned, rope) in enumerate([(4.0, 3.0), (4.2, math.nan)]):
        finish(tmp_path, comparison, "learned", seed, learned)
        finish(tmp_path, comparison, "rope", seed, rope)
    rows = rows_of(tmp_path, comparison)
    assert [row.scheme for row in rows] == ["learned", "rope", "nope"]
    assert math.isnan(rows[1].score.mean)
    assert rows[1].score.low is None
    assert rows[1].against.verdict == "no number"
    assert not [sentence for sentence in sentences(comparison, rows) if "best" in sentence and "rope" in sentence]


def test_the_sentences_of_a_whole_comparison(tmp_path):
    assert conclusions(tmp_path, whole(tmp_path)) == [
        "tisa has the best mean loss, 3.65. Against the second, alibi: no difference shown "
        "(difference −0.1333, 95 % interval −0.3231 to +0.0564, 3 seeds).",
        "Better than learned in loss: tisa (−0.45) and alibi (−0.3167).",
        "nope against learned: no difference shown (difference +0.05, 95 % interval −0.3226 to +0.4226, 3 seeds).",
        "At 1,024 tokens, 8 × the trained length, alibi has the best mean loss: 3.596 (3.783 at 128). Its "
        "interval overlaps with that of tisa.",
        "learned cannot read 256, 512 and 1,024 tokens: its positions end at 128.",
    ]


def test_first_against_baseline_is_one_sentence(tmp_path):
    found = conclusions(tmp_path, whole(tmp_path, schemes=("learned", "tisa")))
    assert len([sentence for sentence in found if "tisa" in sentence and "learned" in sentence]) == 1
    assert found[0].startswith(
        "tisa has the best mean loss, 3.65. Against the second, learned: better (difference −0.45"
    )


def test_one_that_is_worse_comes_with_its_interval(tmp_path):
    comparison = begin(tmp_path, ["a", "b", "c", "d"])
    for seed in range(3):
        for scheme, score in (("a", 4.2), ("b", 4.1), ("c", 5.0), ("d", 4.25)):
            finish(tmp_path, comparison, scheme, seed, score + seed / 10 + (seed == 1) * (scheme in "bc") / 50)
    # c − a: 0.8, 0.82, 0.8; d − a: 0.05 three times, but for rounding
    assert conclusions(tmp_path, comparison)[1:3] == [
        "The difference to a is the same in every seed, so there is no spread to judge it by: d (+0.05).",
        "c is worse than a in loss (difference +0.8067, 95 % interval +0.778 to +0.8354, 3 seeds).",
    ]


def test_many_without_a_difference_are_one_sentence(tmp_path):
    comparison = begin(tmp_path, ["a", "b", "c", "d"], seeds=2)
    for scheme, (one, two) in {"a": (3.0, 3.1), "b": (2.9, 3.3), "c": (3.2, 3.05), "d": (3.1, 3.4)}.items():
        finish(tmp_path, comparison, scheme, 0, one)
        finish(tmp_path, comparison, scheme, 1, two)
    assert "c and d against a: no difference shown." in conclusions(tmp_path, comparison)


def test_one_seed_has_no_winner(tmp_path):
    found = conclusions(tmp_path, whole(tmp_path, seeds=1))
    assert found[0] == "One seed: no interval, and no winner. The order may be chance; train 3 seeds or more."
    assert not [
        sentence
        for sentence in found
        if "better than" in sentence or "against" in sentence.lower() or "best" in sentence
    ]


@pytest.mark.parametrize(("seeds", "failed"), [(1, ()), (2, (1,)), (3, (1, 2))])
def test_more_seeds_are_announced_only_while_runs_go_on(seeds, failed, tmp_path):
    comparison = begin(tmp_path, ["learned", "tisa"], seeds=seeds)
    finish(tmp_path, comparison, "learned", 0, 4.0)
    for scheme in comparison.schemes:
        for seed in failed:
            fail(tmp_path, comparison, scheme, seed, "no space left")
    begin_of = "One seed:" if seeds == 1 else "One seed so far:"
    found = conclusions(tmp_path, comparison)
    assert found[0].startswith(begin_of)
    assert f"{1 + 2 * len(failed)} of {2 * seeds} runs have ended so far." in found
    finish(tmp_path, comparison, "tisa", 0, 4.0)
    found = conclusions(tmp_path, comparison)
    assert found[0].startswith("One seed: no interval")
    assert not [sentence for sentence in found if "so far" in sentence]


def test_while_runs_go_on(tmp_path):
    comparison = begin(tmp_path, ["learned", "tisa"], seeds=2)
    assert conclusions(tmp_path, comparison) == ["No run has finished yet.", "0 of 4 runs have ended so far."]
    finish(tmp_path, comparison, "learned", 0, 4.0)
    finish(tmp_path, comparison, "tisa", 0, 3.9)
    begun(tmp_path, comparison, "learned", 1, upto=4)
    assert conclusions(tmp_path, comparison)[0] == (
        "One seed so far: no interval yet, and no winner. The order may be chance."
    )
    assert conclusions(tmp_path, comparison)[-1] == "2 of 4 runs have ended so far."
    finish(tmp_path, comparison, "tisa", 1, 3.8)
    rows = rows_of(tmp_path, comparison)
    assert rows[0].against.verdict == "one seed"
    assert sentences(comparison, rows)[0] == (
        "Only one seed of learned: no interval there, and no conclusion on the difference."
    )


def test_failures_have_their_reason(tmp_path):
    comparison = begin(tmp_path, ["learned", "rope"], seeds=3)
    for seed in range(3):
        finish(tmp_path, comparison, "learned", seed, 4.0 + seed / 10)
    for seed, reason in enumerate(["the loss was nan at step 10", "no space left", "the loss was nan at step 10"]):
        fail(tmp_path, comparison, "rope", seed, reason)
    rows = rows_of(tmp_path, comparison)
    assert [row.scheme for row in rows] == ["learned", "rope"]
    assert rows[1].failed[1] == "no space left"
    assert rows[1].against.verdict == "no seed in common"
    assert sentences(comparison, rows)[-2:] == [
        "rope failed with seeds 0 and 2: the loss was nan at step 10.",
        "rope failed with seed 1: no space left.",
    ]


def test_files_that_are_being_written(tmp_path):
    comparison = begin(tmp_path, ["learned"], seeds=2)
    here = begun(tmp_path, comparison, "learned", 0, upto=6)
    with (here / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 8, "lo')
    first, second = outcomes(tmp_path, comparison)
    assert (first.state, first.step, first.score("loss")) == ("begun", 6, None)
    assert (second.state, second.step) == ("new", 0)
    assert outcome(tmp_path, Run(comparison.work, "learned", 0)) == first


def test_only_a_failed_run_has_a_reason(tmp_path, monkeypatch):
    comparison = begin(tmp_path, ["learned"], seeds=3)
    finish(tmp_path, comparison, "learned", 0, 4.0)
    fail(tmp_path, comparison, "learned", 1, "no space left")
    (fail(tmp_path, comparison, "learned", 2, "") / "FAILED").write_text("{}")
    assert [(each.state, each.reason) for each in outcomes(tmp_path, comparison)] == [
        ("done", ""), ("failed", "no space left"), ("failed", "unknown"),
    ]  # fmt: skip
    monkeypatch.setattr(run_folder, "state", lambda here: "failed")  # as it was before another process began it again
    again = outcome(tmp_path, Run(comparison.work, "learned", 0))
    assert (again.state, again.reason) == ("begun", "")


def test_a_finished_run_without_tests_has_no_score(tmp_path):
    comparison = begin(tmp_path, ["learned"], seeds=1)
    here = begun(tmp_path, comparison, "learned", 0)
    for steps in (0.5, 0.25):  # of a run that was interrupted after its first cost
        cost = {"kind": "cost", "seconds_per_step": steps, "seconds": {}, "memory_mb": 1.0, "scheme_parameters": 3}
        write(here, [cost])
    (here / "DONE").touch()
    (found,) = outcomes(tmp_path, comparison)
    assert (found.score("loss"), found.step) == (None, 40)
    rows = rows_of(tmp_path, comparison)
    assert (rows[0].seconds_per_step, rows[0].parameters, rows[0].by_length, rows[0].noise) == (0.25, 3, {}, None)
    assert not [sentence for sentence in sentences(comparison, rows) if "tokens" in sentence]


def test_costs_and_noise_are_means_over_finished_runs(tmp_path):
    comparison = begin(tmp_path, ["learned"], seeds=4)
    for seed, (seconds, memory, noise) in enumerate([(1.0, 10.0, 0.1), (3.0, 30.0, 0.3), (5.0, math.nan, None)]):
        here = folder_of(tmp_path, comparison, "learned", seed)
        at = {"kind": "test", "values": {"loss": 4.0 + seed}, "by_position": [], "refused": ""}
        known = {} if noise is None else {"noise": {"loss": noise, "other": 9.0}}
        cost = {"kind": "cost", "seconds_per_step": seconds, "seconds": {}, "memory_mb": memory, "scheme_parameters": 3}
        write(here, [{**at, **known, "length": 128}, {**at, "noise": {"loss": 7.0}, "length": 256}, cost])
        (here / "DONE").touch()
    begun(tmp_path, comparison, "learned", 3)
    (row,) = rows_of(tmp_path, comparison)
    assert (row.seconds_per_step, row.memory_mb, row.noise) == pytest.approx((3.0, 20.0, 0.2))
    assert (row.finished, row.wanted, row.scores) == (3, 4, {0: 4.0, 1: 5.0, 2: 6.0})


def test_gaps_are_those_of_the_seeds_that_both_have(tmp_path):
    comparison = begin(tmp_path, ["learned", "tisa"], seeds=3)
    for scheme, scores in {"learned": {0: 4.0, 2: 4.5}, "tisa": {2: 3.0, 1: 9.0, 0: 2.0}}.items():
        for seed, score in scores.items():
            finish(tmp_path, comparison, scheme, seed, score)
    tisa, learned = rows_of(tmp_path, comparison)[::-1]
    assert (tisa.scheme, learned.scheme) == ("tisa", "learned")
    assert gaps(tisa, learned) == [-2.0, -1.5]
    assert gaps(learned, tisa) == [2.0, 1.5]


def test_versions_of_all_runs(tmp_path):
    comparison = begin(tmp_path, ["learned"], seeds=4)
    assert described(tmp_path, outcomes(tmp_path, comparison)) == {}
    about = [
        {"versions": {"torch": "2.9", "python": 3.11}, "began": "2026-01-02", "processes": 1},
        {"versions": {"torch": "2.8"}, "began": "2026-01-03", "processes": 4},
        {"versions": {"torch": "2.9"}, "began": "2026-01-01", "processes": 2},
    ]
    for seed, each in enumerate(about):
        (folder_of(tmp_path, comparison, "learned", seed + 1) / "run.json").write_text(json.dumps(each))
    assert described(tmp_path, outcomes(tmp_path, comparison)) == {
        "torch": ["2.9", "2.8"], "python": ["3.11"], "processes of a run": ["4", "2"],
        "first run began": ["2026-01-01"], "last run began": ["2026-01-03"],
    }  # fmt: skip
    for seed in (1, 2, 3):
        (folder_of(tmp_path, comparison, "learned", seed) / "run.json").write_text("{}")
    assert described(tmp_path, outcomes(tmp_path, comparison)) == {}


@pytest.fixture
def opened(monkeypatch):
    """The folders of the models that were opened. A model is its folder, and its curves name folder and length."""
    folders = []
    monkeypatch.setattr(loading, "load", lambda here: folders.append(here) or here)
    monkeypatch.setattr(results, "curves_of", lambda model, length: Learned(problem=f"{model.name}, {length}"))
    return folders


def test_curves_come_from_the_folder_or_else_from_its_model(tmp_path, opened):
    comparison = begin(tmp_path, ["learned"], seeds=2)
    stored, bare = (finish(tmp_path, comparison, "learned", seed, 4.0) for seed in (0, 1))
    (stored / "curves.json").write_text(json.dumps({"curves": [], "fixed": True, "problem": ""}))
    one, other = outcomes(tmp_path, comparison)
    assert learned_curves(tmp_path, one) == Learned(fixed=True)
    assert opened == []
    for _ in range(2):  # opened once
        assert learned_curves(tmp_path, other) == Learned(problem="learned.s1, 128")
        assert opened == [bare]
    os.utime(bare / "DONE", ns=(1, 1))  # another run in the same folder
    learned_curves(tmp_path, other)
    assert opened == [bare, bare]


@pytest.mark.parametrize(
    ("problem", "words"),
    [(OSError("no weights\nin a folder"), "no weights"), (NotImplementedError(), "NotImplementedError")],
)
def test_a_model_without_curves_has_a_reason(problem, words, tmp_path, opened, monkeypatch):
    def refuse(model, length):
        raise problem

    monkeypatch.setattr(results, "curves_of", refuse)
    comparison = begin(tmp_path, ["learned"], seeds=1)
    finish(tmp_path, comparison, "learned", 0, 4.0)
    (found,) = outcomes(tmp_path, comparison)
    assert learned_curves(tmp_path, found) == Learned(problem=words)
