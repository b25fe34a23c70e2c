"""Effects with intervals."""

import math

import pytest

from locant.papers.effects import average_gain, gain, rank_correlation


def test_a_lower_loss_is_a_gain():
    found = gain({0: 1.0, 1: 1.5, 7: 9.0}, {0: 2.0, 1: 2.7, 8: 0.0}, higher_is_better=False)
    assert found.mean == pytest.approx(1.1)
    assert found.count == 2
    assert gain({0: 1.0, 1: 1.5}, {0: 2.0, 1: 2.7}, higher_is_better=True).mean == pytest.approx(-1.1)


def test_gains_are_averaged_over_cases_within_each_seed():
    found = average_gain([[1.0, 2.0, 3.0], [3.0, 2.0]])
    assert (found.mean, found.low, found.high, found.count) == (2.0, 2.0, 2.0, 2)
    assert average_gain([]).count == 0


def test_rank_correlation():
    found = rank_correlation([1, 2, 3, 4, 5, 6], [1, 4, 9, 16, 25, 36])
    assert (found.mean, found.low, found.high) == pytest.approx((1, 1, 1))
    assert rank_correlation([1, 2, 3, 4, 5], [5, 4, 3, 2, 1]).mean == pytest.approx(-1)
    assert math.isnan(rank_correlation([1, 2, 3], [1, 2, 3]).mean)
    with pytest.raises(ValueError, match="got 4 and 3"):
        rank_correlation([1, 2, 3, 4], [1, 2, 3])


def test_points_of_one_group_are_drawn_together():
    x = [float(n) for n in range(20)]
    y = [n + (3.0 if n % 2 else -3.0) for n in x]
    alone = rank_correlation(x, y)
    grouped = rank_correlation(x, y, groups=[n // 10 for n in range(20)])
    assert (alone.count, grouped.count) == (20, 2)
    assert alone.mean == pytest.approx(grouped.mean)
    assert grouped.high - grouped.low != pytest.approx(alone.high - alone.low)
