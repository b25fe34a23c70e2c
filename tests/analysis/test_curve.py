"""Schemes as curves over the offset."""

import math

import pytest
import torch

import locant
from locant.analysis.curve import curves
from tests import cases, frontier_cases


@pytest.mark.parametrize("spec", cases.SPECS)
def test_every_scheme_has_curves(spec):
    found = curves(locant.scheme(spec, n_heads=4, head_dim=8, d_model=32), reach=12)
    assert bool(found) == (spec != "nope")
    for curve in found:
        assert curve.r == list(range(-12, 13))
        assert all(len(line) == 25 for line in curve.values)


@pytest.mark.parametrize("spec", frontier_cases.SPECS)
def test_schemes_that_compute_something_for_each_token_have_curves(spec):
    found = curves(locant.scheme(spec, n_heads=4, head_dim=8, d_model=32), reach=12)
    assert found
    assert all(len(line) == len(curve.r) for curve in found for line in curve.values)


def test_the_levels_of_fox_and_grape_are_a_straight_line_at_the_start():
    (fox,) = curves(locant.scheme("fox", n_heads=2, d_model=8), reach=5)
    assert (fox.field, fox.r) == ("levels", [-5, -4, -3, -2, -1, 0])
    torch.testing.assert_close(fox.values, [[r / 16 for r in fox.r], [r / 1024 for r in fox.r]], atol=1e-6, rtol=1e-5)
    grape = curves(locant.scheme("grape:two_sided=true", n_heads=2, head_dim=4), reach=3)[-1]
    slopes = locant.scheme("alibi", n_heads=2).terms(torch.arange(-3, 4)).bias
    assert (grape.field, grape.r) == ("levels", [-3, -2, -1, 0, 1, 2, 3])
    torch.testing.assert_close(torch.tensor(grape.values), slopes.float(), atol=1e-5, rtol=1e-5)


def test_a_temperature_is_shown_over_positions():
    heat = curves(locant.scheme("rope+logn:n0=4", n_heads=2, head_dim=8), reach=5)[-1]
    assert (heat.field, heat.axis, heat.r[:4]) == ("temperature", "position", [0, 1, 3, 7])
    assert heat.values[0][:5] == pytest.approx([1, 1, 1, 1.5, 2])
    assert {row["field"] for row in heat.rows()} == {"temperature by position"}


def test_the_curve_of_rope_is_the_mean_of_its_cosines():
    rope = curves(locant.scheme("rope", head_dim=8), reach=5)[0]
    assert rope.values[0][5] == pytest.approx(1.0)
    expected = sum(math.cos(3 * 10000 ** (-t / 4)) for t in range(4)) / 4
    assert rope.values[0][8] == pytest.approx(expected, rel=1e-6)
