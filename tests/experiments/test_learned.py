"""Learned curves over the seeds of a scheme: the mean over heads does not depend on their order."""

import pytest

from locant.analysis.curve import WHAT, Curve
from locant.experiments import learned as module
from locant.experiments.learned import Learned, over_seeds, store_curves, stored_curves


def learned(*heads: list[float], what: str = WHAT["bias"], fixed: bool = False, problem: str = "") -> Learned:
    """A run with one layer and offsets −1, 0, 1."""
    return Learned((("layer 1", Curve("tisa", "bias", what, [-1, 0, 1], list(heads))),), fixed, problem)


def test_heads_may_come_in_any_order_and_constants_do_not_count():
    one = learned([1.0, 2.0, 3.0], [0.0, 0.0, 4.0])
    other = learned([10.0, 10.0, 14.0], [11.0, 12.0, 13.0])  # the same two curves, the other way round and 10 higher
    (found,) = over_seeds([one, other], causal=False)
    # mean over heads 0.5, 1, 3.5; pairs of tokens 1, 2, 1
    level = (0.5 + 2 * 1 + 3.5) / 4
    assert found.mean == pytest.approx([0.5 - level, 1 - level, 3.5 - level])
    assert found.low == pytest.approx(found.mean)
    assert found.high == pytest.approx(found.mean)
    assert (found.place, found.r, found.seeds) == ("layer 1", [-1, 0, 1], 2)


def test_the_interval_is_that_of_the_mean_over_seeds():
    gains = [learned([1.0, 1.0, gain], what=WHAT["gain"]) for gain in (1.0, 2.0, 3.0)]
    (found,) = over_seeds(gains, causal=False)
    assert found.mean == pytest.approx([1, 1, 2])  # a gain is not centred
    assert found.high[2] - found.low[2] == pytest.approx(2 * 4.3027 / 3**0.5, rel=1e-4)  # Student's t with 2 degrees


def test_a_causal_model_has_no_later_keys():
    (found,) = over_seeds([learned([1.0, 2.0, 9.0]), learned([1.0, 2.0, -9.0])], causal=True)
    assert found.r == [-1, 0]
    assert found.mean == pytest.approx([1 - 5 / 3, 2 - 5 / 3])


def test_nothing_to_compare():
    assert over_seeds([learned([1.0, 2.0, 3.0])], causal=False) == []
    assert over_seeds([learned([1.0, 2.0, 3.0], fixed=True)] * 2, causal=False) == []
    assert over_seeds([learned([1.0, 2.0, 3.0]), Learned(problem="no model")], causal=False) == []


def test_an_error_without_words_does_not_end_the_run(tmp_path, monkeypatch):
    def refuse(model, length):
        raise NotImplementedError

    monkeypatch.setattr(module, "curves_of", refuse)
    store_curves(None, tmp_path, 8)
    assert stored_curves(tmp_path) == Learned(problem="NotImplementedError")
