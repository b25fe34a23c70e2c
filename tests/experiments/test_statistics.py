"""Means, intervals and paired differences, against scipy and by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from locant.experiments import statistics
from locant.experiments.statistics import Difference, Estimate, difference, estimate

scores = st.lists(st.floats(-1e3, 1e3).map(lambda x: round(x, 3)), min_size=2, max_size=12)


@given(scores)
@settings(deadline=None)
def test_the_interval_is_that_of_the_t_test(values):
    if len(set(values)) == 1:
        assert estimate(values) == Estimate(*[pytest.approx(values[0])] * 3, len(values))
        return
    theirs = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    ours = estimate(values)
    assert ours.count == len(values)
    assert ours.mean == pytest.approx(math.fsum(values) / len(values), abs=1e-9)
    assert ours.low == pytest.approx(theirs.low, rel=1e-9, abs=1e-9)
    assert ours.high == pytest.approx(theirs.high, rel=1e-9, abs=1e-9)


def test_by_hand():
    found = estimate([4.0, 4.2, 4.1])
    assert found.mean == pytest.approx(4.1)
    assert found.high - found.mean == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)
    assert found.mean - found.low == pytest.approx(0.24841, abs=1e-5)


def test_one_value_has_no_interval_and_none_has_no_mean():
    assert estimate([2.5]) == Estimate(2.5, None, None, 1)
    nothing = estimate([])
    assert math.isnan(nothing.mean)
    assert (nothing.low, nothing.high, nothing.count) == (None, None, 0)


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_has_no_mean(strange):
    found = estimate([1.0, strange, 2.0])
    assert math.isnan(found.mean)
    assert (found.low, found.high, found.count) == (None, None, 3)
    for higher in (True, False):  # a run that ran away is neither better nor worse by a number
        assert difference({0: strange, 1: 1.0}, {0: 1.0, 1: 1.1}, higher_is_better=higher).verdict == "no number"


@given(scores)
@settings(deadline=None)
def test_a_difference_is_the_paired_t_test(values):
    baseline = {seed: 10.0 + 3.0 * seed for seed in range(len(values))}
    found = difference(
        {seed: baseline[seed] + value for seed, value in enumerate(values)}, baseline, higher_is_better=True
    )
    if max(values) - min(values) > 0.01:
        test = stats.ttest_rel([baseline[seed] + value for seed, value in enumerate(values)], list(baseline.values()))
        interval = test.confidence_interval(0.95)
        assert found.estimate.low == pytest.approx(interval.low, rel=1e-6, abs=1e-6)
        assert found.estimate.high == pytest.approx(interval.high, rel=1e-6, abs=1e-6)
        if abs(test.pvalue - 0.05) > 1e-6:
            shown = "better" if found.estimate.mean > 0 else "worse"
            assert found.verdict == (shown if test.pvalue < 0.05 else "no difference shown")


BASELINE = {0: 4.0, 1: 4.2, 2: 4.1}


@pytest.mark.parametrize(
    ("scheme", "higher", "lower"),
    [
        ({0: 3.5, 1: 3.8, 2: 3.65}, "worse", "better"),  # −0.45 ± 0.124
        ({0: 4.2, 1: 4.1, 2: 4.15}, "no difference shown", "no difference shown"),  # +0.05 ± 0.373
        ({0: 4.5, 1: 4.6, 2: 4.55}, "better", "worse"),  # +0.45 ± 0.124
        ({0: 3.5, 7: 1.0}, "one seed", "one seed"),
        ({7: 1.0}, "no seed in common", "no seed in common"),
        (dict(BASELINE), "no difference shown", "no difference shown"),
        ({0: 4.5, 1: 4.7, 2: 4.6}, "no spread between seeds", "no spread between seeds"),
    ],
)
def test_verdicts(scheme, higher, lower):
    assert difference(scheme, BASELINE, higher_is_better=True).verdict == higher
    assert difference(scheme, BASELINE, higher_is_better=False).verdict == lower


def test_rounding_is_no_evidence():
    """0.7 − 0.6 and 0.4 − 0.3 differ in the last bit: an interval of that width would show anything."""
    scheme, baseline = {0: 0.7, 1: 0.9, 2: 0.4}, {0: 0.6, 1: 0.8, 2: 0.3}
    gaps = {scheme[seed] - baseline[seed] for seed in scheme}
    assert len(gaps) > 1
    assert difference(scheme, baseline, higher_is_better=True).verdict == "no spread between seeds"
    alike = {0: 0.1 + 0.2, 1: 0.7, 2: 0.5}
    assert difference(alike, {0: 0.3, 1: 0.7, 2: 0.5}, higher_is_better=True).verdict == "no difference shown"


def test_only_seeds_that_both_have_count():
    found = difference({0: 3.0, 1: 3.1, 5: 90.0}, {0: 4.0, 1: 4.2, 3: 1.0}, higher_is_better=False)
    assert found == Difference(estimate([3.0 - 4.0, 3.1 - 4.2]), "better")
    assert found.estimate.count == 2


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [((0.0, 2.0), "no difference shown"), ((-2.0, 0.0), "no difference shown"), ((1.0, 2.0), "better"),
     ((-2.0, -1.0), "worse")],
)  # fmt: skip
def test_an_interval_that_ends_at_0_shows_nothing(gaps, verdict, monkeypatch):
    monkeypatch.setattr(statistics, "_quantile", lambda degrees: {1: 1.0}[degrees])  # an interval as wide as the gaps
    found = difference(dict(enumerate(gaps)), {0: 0.0, 1: 0.0}, higher_is_better=True)
    assert (found.estimate.low, found.estimate.high) == gaps
    assert found.verdict == verdict


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ((1.0, 1.0), "no difference shown"),  # not more than the precision of the scores
        ((2.0, 2.0), "no spread between seeds"),
        ((2.0, 3.0), "no spread between seeds"),
        ((200.0, 202.0), "better"),
    ],
)
def test_the_precision_of_scores_is_a_millionth_of_the_largest(gaps, verdict):
    scheme, baseline = {0: 1e6, 1: 5 + gaps[1]}, {0: 1e6 - gaps[0], 1: 5.0}
    assert difference(scheme, baseline, higher_is_better=True).verdict == verdict
    swapped = difference(baseline, scheme, higher_is_better=True).verdict
    assert swapped == {"better": "worse"}.get(verdict, verdict)
