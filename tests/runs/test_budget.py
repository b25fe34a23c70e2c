"""Budgets as text: steps or time."""

import pytest

from locant.runs.budget import Budget


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("10min", Budget(seconds=600)),
        ("90s", Budget(seconds=90)),
        ("1.5h", Budget(seconds=5400)),
        ("2000steps", Budget(steps=2000)),
        ("1 step", Budget(steps=1)),
    ],
)
def test_reads(text, budget):
    assert Budget.parse(text) == budget


@pytest.mark.parametrize("text", ["", "10", "min", "-3min", "0steps", "1.5steps", "10 days"])
def test_refuses(text):
    with pytest.raises(ValueError, match="a budget"):
        Budget.parse(text)
