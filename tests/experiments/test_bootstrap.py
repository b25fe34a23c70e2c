"""The noise of a test set, by a bootstrap."""

import math

import pytest
import torch

from locant.experiments import bootstrap
from locant.verbs.comparing import ComparisonResult
from tests import comparisons


def test_the_noise_of_a_mean_is_its_standard_error():
    torch.manual_seed(0)
    right = (torch.rand(400) < 0.3).double()
    found = bootstrap.test_noise(lambda at: {"accuracy": float(right[at].mean())}, len(right))
    share = float(right.mean())
    assert found["accuracy"] == pytest.approx(math.sqrt(share * (1 - share) / 400), rel=0.15)
    assert found == bootstrap.test_noise(lambda at: {"accuracy": float(right[at].mean())}, len(right))


def test_scores_without_noise():
    def undefined(at):
        raise ValueError("no correlation")

    assert bootstrap.test_noise(lambda at: {"a": 1.0}, 1) == {}
    assert bootstrap.test_noise(lambda at: {"a": 1.0}, bootstrap.FEW + 1) == {}
    assert bootstrap.test_noise(undefined, 10) == {}
    assert bootstrap.test_noise(lambda at: {"a": 1.0}, 10) == {"a": 0.0}


def note_and_header(out):
    (ranked,) = (figure for figure in ComparisonResult(out).report.sections[0].figures if figure.title == "Ranked")
    return ranked.note, ranked


def test_the_page_has_the_noise_and_says_what_intervals_are_over(tmp_path):
    comparison = comparisons.begin(tmp_path, ["native", "tisa"], seeds=2, task="algo:copy")
    for scheme, scores in {"native": (0.5, 0.75), "tisa": (0.25, 0.5)}.items():
        for seed, score in enumerate(scores):
            here = comparisons.folder_of(tmp_path, comparison, scheme, seed)
            test = {"kind": "test", "length": 128, "values": {"exact": score}, "by_position": [], "refused": "",
                    "noise": {"exact": 0.01 * (seed + 1), "token": 0.5}}  # fmt: skip
            cost = {"kind": "cost", "seconds_per_step": 0.25, "seconds": {"training": 1.0}, "memory_mb": 1.0,
                    "parameters": 10, "scheme_parameters": 0}  # fmt: skip
            comparisons.write(here, [test, cost])
            (here / "DONE").write_text("")
    note, ranked = note_and_header(tmp_path)
    assert "Intervals are over seeds" in note
    assert "bootstrap over the test examples" in note
    at = list(ranked.header).index("± test set")
    assert [row[at] for row in ranked.rows] == pytest.approx([1.96 * 0.015] * 2)
    assert [row["test_noise"] for row in ComparisonResult(tmp_path).table] == pytest.approx([0.015] * 2)


def test_a_page_without_noise_says_so(tmp_path):
    comparisons.whole(tmp_path)
    note, ranked = note_and_header(tmp_path)
    assert "They do not contain the noise of the test set" in note
    assert "± test set" not in ranked.header
