"""Schemes as curves over the offset."""

import math

import pytest

import locant
from locant.analysis.curve import curves
from tests import cases


@pytest.mark.parametrize("spec", cases.SPECS)
def test_every_scheme_has_curves(spec):
    found = curves(locant.scheme(spec, n_heads=4, head_dim=8, d_model=32), reach=12)
    assert bool(found) == (spec != "nope")
    for curve in found:
        assert curve.r == list(range(-12, 13))
        assert all(len(line) == 25 for line in curve.values)


def test_the_curve_of_rope_is_the_mean_of_its_cosines():
    rope = curves(locant.scheme("rope", head_dim=8), reach=5)[0]
    assert rope.values[0][5] == pytest.approx(1.0)
    expected = sum(math.cos(3 * 10000 ** (-t / 4)) for t in range(4)) / 4
    assert rope.values[0][8] == pytest.approx(expected, rel=1e-6)
