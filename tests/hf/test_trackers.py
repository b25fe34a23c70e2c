"""Trackers of transformers' Trainer: named by one option, checked before anything runs, given all numbers."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import TrainerCallback
from transformers.integrations import integration_utils

import locant
from locant.experiments import comparison
from locant.experiments.run import execute
from locant.hf import trackers
from locant.runs.budget import Budget
from locant.verbs import comparing
from tests import hf_models
from tests.adaptations import adapted
from tests.command_line import locant_command

TINY = "quick:length=16,longest=1,batch=4,layers=1,width=16,heads=2,vocabulary=300,evaluated=64"


@pytest.fixture
def tracked(monkeypatch):
    """A tracker called stub, and what it was told: (name of the run, logs)."""
    told = []

    class Stub(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            told.append((args.run_name, dict(logs)))

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "stub", Stub)
    monkeypatch.setattr(integration_utils, "get_available_reporting_integrations", lambda: ["stub"])
    return told


def test_names_are_checked_before_anything_runs(tracked, tmp_path):
    assert trackers.checked("stub, stub") == ("stub", "stub")
    assert trackers.checked(()) == trackers.checked("") == ()
    with pytest.raises(ValueError, match=r"unknown tracker 'wandbb' \(did you mean 'wandb'\?\)"):
        trackers.checked("wandbb")
    with pytest.raises(ImportError, match="reporting to wandb needs its package; install it with: pip install wandb"):
        locant.compare("clm", ["nope"], out=tmp_path / "out", report_to="wandb")
    done = locant_command("compare", "clm", "--schemes", "nope", "--report-to", "stb", "-o", tmp_path / "out")
    assert "did you mean 'stub'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_reports_its_loss_and_what_callbacks_add(tracked, tmp_path):
    (tmp_path / "text.txt").write_text("one two three four five, once I caught a fish alive\n" * 100)
    found = comparison.begin(tmp_path / "out", task="clm", schemes=["learned"], data=str(tmp_path / "text.txt"),
                             model=None, seeds=[0], budget=Budget(steps=2), preset=TINY,
                             calibrate=lambda *_: 1.0)  # fmt: skip
    handed = []

    class Pool:
        def work(self, runs, data):
            handed.extend(runs)
            yield

    comparing.follow(tmp_path / "out", found, Pool(), report_to=("stub",))
    ((run, here),) = handed
    assert run.report_to == ("stub",)
    assert run == replace(run, report_to=())  # it is the same run without a tracker
    execute(run, Path(here), tmp_path / "out" / comparison.DATA)
    losses = [logs["loss"] for name, logs in tracked if "loss" in logs and name == "learned.s0"]
    assert len(losses) == 2
    assert any("invariance/gram" in logs for _, logs in tracked)


def test_adapt_reports_loss_and_agreement(tracked):
    done = adapted(hf_models.make("bert"), budget="12steps", report_to="stub")
    both = [logs for _, logs in tracked if "loss" in logs]
    assert [logs["agreement"] for logs in both] == [done.evaluations[0].agreement]
