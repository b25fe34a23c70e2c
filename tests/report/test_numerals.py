"""Numbers of a column have the same decimals."""

import math

import pytest

from locant.report.numerals import column_texts, interval_texts


@pytest.mark.parametrize(
    ("cells", "texts"),
    [
        ([0.5, 0.25], ["0.50", "0.25"]),
        ([4.1, 4.15, 3.65], ["4.10", "4.15", "3.65"]),
        ([1.5, 1.0 / 7, 0.0], ["1.500", "0.143", "0.000"]),
        ([12.3456, 0.0012, -0.5], ["12.35", "0.0012", "−0.50"]),
        ([1234.56, 7.0], ["1235", "7"]),
        ([12, 3], ["12", "3"]),
        (["cannot", 0.5, None, math.nan, 0.125], ["cannot", "0.500", "–", "–", "0.125"]),
        ([2.5e8, 1.5], ["2.5e+08", "1.5"]),
        ([], []),
    ],
)
def test_a_column_keeps_its_zeros(cells, texts):
    assert column_texts(cells) == texts


def test_differences_have_signs():
    assert column_texts(["", 0.5, -0.25, 0.0], 3, plus=True) == ["", "+0.50", "−0.25", "0.00"]


def test_a_column_of_intervals():
    assert interval_texts([(0.5, 0.75), None, (None, None), (-1.0, 2.125)]) == [
        "0.500 … 0.750",
        "",
        "",
        "−1.000 … 2.125",
    ]
