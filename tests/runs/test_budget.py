"""Budgets as text: steps or time."""

import pytest

from locant.runs.budget import Budget, spell_time


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("10min", Budget(seconds=600)),
        ("90s", Budget(seconds=90)),
        ("1.5h", Budget(seconds=5400)),
        ("2000steps", Budget(steps=2000)),
        ("1 step", Budget(steps=1)),
        (" 2.0 steps ", Budget(steps=2)),
        ("999999999999steps", Budget(steps=10**12 - 1)),
        *((f"3{unit}", Budget(seconds=10_800)) for unit in ("h", "hour", "hours")),
        *((f"3 {unit}", Budget(seconds=180)) for unit in ("m", "min", "minute", "minutes")),
        *((f" 0.5{unit}", Budget(seconds=0.5)) for unit in ("s", "sec", "second", "seconds")),
    ],
)
def test_reads(text, budget):
    assert Budget.parse(text) == budget


@pytest.mark.parametrize("text", ["", "10", "min", "-3min", "0steps", "1.5steps", "10 days", "1000000000000s", 10])
def test_refuses(text):
    with pytest.raises(ValueError, match="a budget"):
        Budget.parse(text)


def test_an_error_is_short():
    with pytest.raises(ValueError, match=rf"got '{'x' * 38}…$"):
        Budget.parse("x" * 1000)


def test_durations_have_one_unit():
    assert [spell_time(seconds) for seconds in (0.4, 89, 90, 720, 5399, 5400, 12_600)] == [
        "0 s", "89 s", "2 min", "12 min", "90 min", "1.5 h", "3.5 h",
    ]  # fmt: skip
