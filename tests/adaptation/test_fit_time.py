"""A fit that would take too long uses fewer sequences."""

import pytest
import torch

from locant.adaptation import fit_time, fitting
from tests import hf_models
from tests.adaptations import fitted


@pytest.mark.parametrize("kind", ["bert", "albert", "llama"])
def test_fewer_sequences_if_time_is_short(kind, monkeypatch):
    """ALBERT's layers share an attention, so each batch has several goals."""
    seen = []
    minimize = fitting._minimize

    def watched(scheme, requests, goal, *others):
        assert [len(request.q) for request in requests] == [len(weights) for weights in goal]
        seen.append([len(request.q) for request in requests])
        return minimize(scheme, requests, goal, *others)

    monkeypatch.setattr(fitting, "_minimize", watched)
    queries = kind == "llama"
    long = fitted(hf_models.make(kind), "tisa:kernels=2", length=16, tokens=160, queries=queries, seconds=1e6)
    all_of_them = seen[0]
    seen.clear()
    short = fitted(hf_models.make(kind), "tisa:kernels=2", length=16, tokens=160, queries=queries, seconds=1e-6)
    assert set(seen[0]) == {1}
    assert max(all_of_them) == 10
    assert len(long.heads) == len(short.heads)


def test_the_share_follows_from_the_time_of_an_evaluation(monkeypatch):
    clock = iter([0.0, 9.0, 10.0, 12.0])  # two evaluations, of 9 and of 2 seconds
    monkeypatch.setattr(fit_time.time, "perf_counter", lambda: next(clock))
    shares = []
    monkeypatch.setattr(fitting, "fewer", lambda share, cache, goals: shares.append(share) or goals)
    model = hf_models.make("bert")
    fitted(model, "tisa:kernels=2", length=16, tokens=32, seconds=100.0)
    wanted = 100 / len(model.encoder.layer) / (fit_time.EVALUATIONS * fitting.ITERATIONS * 2.0)
    assert shares == pytest.approx([wanted])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_scheme_without_parameters_takes_no_time():
    found = fitted(hf_models.make("bert"), "alibi", length=16, tokens=32, seconds=1e-9)
    assert torch.isfinite(torch.tensor(found.explained))
