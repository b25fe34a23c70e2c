"""From an effect with its interval to a verdict."""

import math

import pytest

from locant.experiments.statistics import Estimate
from locant.papers.rules import (
    CONFIRMED,
    CONTRADICTED,
    NOT_SHOWN,
    Absent,
    Criterion,
    Exact,
    Larger,
    NotWorse,
    together,
)


def effect(mean, low, high, count=3):
    return Estimate(mean, low, high, count)


@pytest.mark.parametrize(
    ("rule", "mean", "low", "high", "verdict"),
    [
        (Larger(0.5), 1.0, 0.1, 1.9, CONFIRMED),
        (Larger(0.5), 0.4, 0.1, 0.7, NOT_SHOWN),  # real, but too small
        (Larger(0.5), 1.0, 0.0, 2.0, NOT_SHOWN),
        (Larger(0.5), 1.0, -0.1, 2.1, NOT_SHOWN),
        (Larger(0.5), -1.0, -1.9, -0.1, CONTRADICTED),
        (Larger(0.5), -1.0, -2.1, 0.0, NOT_SHOWN),
        (NotWorse(0.5), 0.0, -0.4, 0.4, CONFIRMED),
        (NotWorse(0.5), 2.0, 1.0, 3.0, CONFIRMED),
        (NotWorse(0.5), -0.3, -0.5, -0.1, NOT_SHOWN),
        (NotWorse(0.5), -0.6, -0.9, -0.3, NOT_SHOWN),
        (NotWorse(0.5), -0.8, -1.0, -0.6, CONTRADICTED),
        (Absent(0.5), 0.1, -0.2, 0.4, CONFIRMED),
        (Absent(0.5), 0.3, 0.1, 0.5, NOT_SHOWN),
        (Absent(0.5), 0.8, 0.6, 1.0, CONTRADICTED),
        (Absent(0.5), -0.8, -1.0, -0.6, CONTRADICTED),
        (Absent(0.5), 0.0, -0.6, 0.6, NOT_SHOWN),
        (Exact(1e-6), 1e-7, None, None, CONFIRMED),
        (Exact(1e-6), -1e-5, None, None, CONTRADICTED),
    ],
)
def test_verdicts(rule, mean, low, high, verdict):
    assert rule.judge(effect(mean, low, high)) == verdict


@pytest.mark.parametrize("rule", [Larger(0.5), NotWorse(0.5), Absent(5.0)])
def test_too_few_seeds_show_nothing(rule):
    assert rule.judge(effect(1.0, 0.9, 1.1, count=3)) == CONFIRMED
    assert rule.judge(effect(1.0, 0.9, 1.1, count=2)) == NOT_SHOWN
    assert rule.judge(effect(1.0, None, None, count=1)) == NOT_SHOWN
    assert rule.judge(effect(math.nan, None, None, count=3)) == NOT_SHOWN
    assert rule.judge(effect(math.nan, math.nan, math.nan, count=3)) == NOT_SHOWN


def test_a_share_of_the_parts_is_enough():
    yes, no, unclear = effect(1, 0.9, 1.1), effect(-1, -1.1, -0.9), effect(0, -1, 1)
    most = Criterion("x", Larger(0.5), share=0.75)
    assert most.judge([yes, yes, yes, no]) == CONFIRMED
    assert most.judge([yes, yes, no, unclear]) == NOT_SHOWN
    assert most.judge([yes, yes, no, no]) == CONTRADICTED
    every = Criterion("x", Larger(0.5))
    assert every.judge([yes, yes]) == CONFIRMED
    assert every.judge([yes, unclear]) == NOT_SHOWN
    assert every.judge([yes, no]) == CONTRADICTED
    assert every.judge([]) == NOT_SHOWN


def test_a_claim_needs_all_its_criteria():
    assert together([CONFIRMED, CONFIRMED]) == CONFIRMED
    assert together([CONFIRMED, NOT_SHOWN]) == NOT_SHOWN
    assert together([NOT_SHOWN, CONTRADICTED]) == CONTRADICTED
    assert together([]) == NOT_SHOWN


def test_the_words_of_a_rule_have_its_numbers():
    words = Criterion("R²", Larger(0.25, seeds=5), share=0.8).words
    assert words.startswith("R². ")
    assert "0.25" in words
    assert "5 values" in words
    assert "80%" in words
