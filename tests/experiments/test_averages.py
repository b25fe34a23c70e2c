"""Scores of several seeds along an axis."""

import math
from types import SimpleNamespace

import pytest

from locant.experiments import averages
from locant.experiments.averages import Average, average


def run(scheme="tisa", state="done", steps=(), tests=()):
    """A run with what the averages read of it."""
    return SimpleNamespace(run=SimpleNamespace(scheme=scheme), state=state, steps=list(steps), tests=list(tests))


def test_a_mean_goes_from_the_lowest_run_to_the_highest():
    found = average([{4: 1.0, 2: 3.0}, {2: 5.0}, {2: 10.0, 8: 7.0}])
    assert found == Average([2, 4, 8], [6.0, 1.0, 7.0], [3.0, 1.0, 7.0], [10.0, 1.0, 7.0])


def test_the_interval_of_a_mean_is_students():
    found = average([{1: 4.0}, {1: 4.2, 2: 5.0}, {1: 4.1}], interval=True)
    assert found.mean == pytest.approx([4.1, 5.0])
    assert (found.low[0], found.high[0]) == pytest.approx((4.1 - 0.24841, 4.1 + 0.24841), abs=1e-5)
    assert (found.low[1], found.high[1]) == (None, None)  # one run has no interval


@pytest.mark.parametrize("interval", [False, True])
def test_without_two_runs_at_one_place_there_is_no_interval(interval):
    assert average([{}, {}], interval=interval) is None
    assert average([], interval=interval) is None
    assert average([{1: 2.0}, {3: 4.0}], interval=interval) == Average([1, 3], [2.0, 4.0], None, None)


@pytest.mark.parametrize("interval", [False, True])
def test_a_score_that_is_no_number_spoils_its_place_alone(interval):
    found = average([{1: math.inf, 2: 3.0}, {1: 1.0, 2: 3.0}], interval=interval)
    assert math.isnan(found.mean[0])
    assert (found.low[0], found.high[0]) == (None, None)
    assert (found.mean[1], found.low[1], found.high[1]) == (3.0, 3.0, 3.0)


def test_the_runs_of_a_scheme():
    done, begun, new = run(steps=[{}]), run(state="begun", steps=[{}]), run(state="new")
    other = run(scheme="alibi", steps=[{}])
    assert averages.averaged_runs([other, begun, done, new], "tisa") == [done]
    assert averages.averaged_runs([other, begun, new], "tisa") == [begun]
    assert averages.averaged_runs([other, new], "tisa") == []


def test_by_step_and_by_length():
    tests = [{"length": 8, "values": {"loss": 3.0}, "by_position": [[0, 3.0]]},
             {"length": 16, "values": {"loss": 2.5}, "by_position": [[0, 2.5]]},
             {"length": 32, "values": {}, "by_position": []}]  # fmt: skip
    found = run(steps=[{"step": 2, "loss": 5}, {"step": 4}, {"step": 6, "loss": "4.5"}], tests=tests)
    assert averages.by_step(found, "loss") == {2: 5.0, 6: 4.5}
    assert averages.by_length(found, "loss") == {8: 3.0, 16: 2.5}
    assert averages.minus_trained({8: 3.0, 16: 2.5}, 8) == {8: 0.0, 16: -0.5}
    assert averages.minus({1: 5.0, 2: 3.0}, {2: 1.0, 3: 9.0}) == {2: 2.0}
    assert averages.longest_read(found) == 16
    assert averages.longest_read(run(tests=tests[2:])) is None
    assert averages.by_position(found, 16, 8) == {8.5: 2.5}
    assert averages.by_position(found, 32, 8) == averages.by_position(found, 64, 8) == {}


@pytest.mark.parametrize(
    ("width", "trained", "middles"),
    [
        # 8 bins up to the trained 16 positions, 8 up to 32, 8 up to 64
        (1, 16, [*(n + 1.5 for n in range(0, 32, 2)), *(n + 2.5 for n in range(32, 64, 4))]),
        (2, 16, [*(n + 1.5 for n in range(0, 32, 2)), *(n + 2.5 for n in range(32, 64, 4))]),
        (8, 16, [n + 4.5 for n in range(0, 64, 8)]),  # wide ones stay as they are
        (1, 70, [n + 4.5 for n in range(0, 64, 8)]),  # an eighth of 70 in whole positions
    ],
)
def test_bins_beyond_the_trained_length_are_joined(width, trained, middles):
    parts = [[start, float(start + (width + 1) / 2)] for start in range(0, 64, width)]  # the score is the position
    found = averages.by_position(run(tests=[{"length": 64, "by_position": parts}]), 64, trained)
    assert list(found) == middles
    assert list(found.values()) == middles
