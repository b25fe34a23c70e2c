"""A budget of time becomes steps, and what does not fit is said before the work and in the result."""

import json
import time

import pytest

from locant.adaptation import adapting, distillation
from locant.adaptation.schedule import FEW, Pace, before_fit, too_few
from locant.adaptation.training import EVALUATIONS, EVERY
from tests import bert, hf_models, words
from tests.adaptations import adapted
from tests.command_line import locant_command


def evaluations(steps):
    """How many evaluations a training makes, counted as the training does it."""
    every = max(EVERY, steps // EVALUATIONS)
    return sum(step % every == 0 or step == steps for step in range(1, steps + 1))


@pytest.mark.parametrize("pace", [Pace(0.5, 0.05), Pace(0.5, 1.0), Pace(3.5, 18.5), Pace(0.01, 0.0)])
@pytest.mark.parametrize("seconds", [-3.0, 0.0, 3.0, 11.0, 60.0, 1000.0])
def test_a_training_with_its_evaluations_takes_no_longer_than_its_time(pace, seconds):
    steps = pace.steps(seconds)
    assert steps * pace.step + evaluations(steps) * pace.evaluation <= max(0.0, seconds) + 1e-9
    more = steps + 1
    assert more * pace.step + evaluations(more) * pace.evaluation > seconds


def test_what_is_said_before_the_work():
    said = before_fit("60s", Pace(3.5, 18.5, timing=10.0), 18.5, 0)
    assert said == "60s have room for 9 steps of 3.5 s, less the time of the fit; measuring adds about 56 s"
    assert before_fit("9steps", None, 60.0, 1) == (
        "9steps are steps of training; the fit takes its time before them, and measuring adds about 3 min "
        "and the time of 1 score in each of four states"
    )
    assert too_few("60s", Pace(3.5, 18.5, timing=10.0), 49.0) == (
        "the model is fitted only, not trained: the fit took 49 s of 60s, and fewer than 5 steps of 3.5 s fit into "
        "the rest; 100 steps need a budget of about 10 min"
    )


@pytest.fixture
def slow_steps(monkeypatch):
    """A step that takes a second, by the measurement."""
    monkeypatch.setattr(adapting, "seconds_per_step", lambda *_: 1.0)


@pytest.mark.usefixtures("slow_steps")
def test_a_budget_without_room_for_a_few_steps_gives_a_fitted_model(tmp_path):
    said = []
    model = hf_models.make("bert")
    done = adapted(model, budget="3s", out=tmp_path / "out", on_stage=said.append)
    assert [row.state for row in done.rows] == ["original", "silenced", "fitted"]
    assert (done.steps, done.trained) == (0, False)
    assert "fitted only, not trained" in done.notices[0]
    assert [stage for stage in said if "have room for" in stage and "measuring adds" in stage]
    assert said.index("timing a step") < said.index("measuring the original")
    assert not [stage for stage in said if stage == "training"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "It was not trained after that (budget 3s, seed 0)." in card
    assert "fitted only" in card
    assert "| adapted |" not in card
    assert json.loads((tmp_path / "out" / "adapt.json").read_text())["steps"] == 0


@pytest.mark.usefixtures("slow_steps")
def test_the_command_says_that_a_model_is_fitted_only(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(words.text(40)))
    done = locant_command("adapt", bert.save(tmp_path / "model"), "tisa", "--text", tmp_path / "text.txt", "--budget",
                          "2s", "--length", 16, "-o", tmp_path / "out")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "with tisa, fitted only" in done.stdout
    assert "not trained" in done.stdout
    assert "2s have room for" in done.stdout


def test_a_few_steps_that_were_asked_for_are_made_and_called_too_few():
    done = adapted(hf_models.make("bert"), budget=f"{FEW - 1}steps")
    assert (done.steps, done.trained) == (FEW - 1, False)
    assert done.notices == [f"{FEW - 1} steps are too few to adapt a model: take it as fitted only"]
    done = adapted(hf_models.make("bert"), budget=f"{FEW}steps")
    assert (done.steps, done.trained, done.notices) == (FEW, True, [])


@pytest.fixture
def counted_time(monkeypatch):
    """A clock that counts training losses: every step takes one second, and all other work none."""
    now, real = [0.0], distillation.distillation_loss

    def loss(*arguments):
        now[0] += 1.0
        return real(*arguments)

    monkeypatch.setattr(distillation, "distillation_loss", loss)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_time_is_kept(counted_time):
    """Fit and training take what the budget says."""
    done = adapted(hf_models.make("bert"), budget="20s")
    assert done.steps == 17  # and three to time a step
    assert counted_time == [20.0]


def test_the_last_evaluation_is_the_agreement_of_the_result():
    """It is not measured twice."""
    done = adapted(hf_models.make("bert"), budget="12steps")
    assert done.rows[3].agreement == done.evaluations[-1].agreement
    assert done.evaluations[-1].step == 12


def test_nothing_to_train_is_said():
    done = adapted(hf_models.make("llama"), "nope", train="scheme", budget="30s")
    assert [row.state for row in done.rows] == ["original", "silenced", "fitted"]
    assert done.notices == ["the model is fitted only: nope has no parameters to train"]


@pytest.mark.usefixtures("counted_time")
def test_timing_a_step_changes_nothing_of_the_result():
    """A resumed adaptation does not time a step, and must end with the same bits.

    By the counted clock the fit takes no time. A time limit that ends the fit early gives another fit.
    """
    model, other = hf_models.make("bert"), hf_models.make("bert")
    steps = adapted(model, budget="20s").steps
    assert adapted(other, budget=f"{steps}steps").steps == steps == 17
    for (name, weight), again in zip(model.named_parameters(), other.parameters(), strict=True):
        assert weight.equal(again), name
