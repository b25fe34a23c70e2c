"""A fit that would take too long uses fewer sequences, and ends the search in each layer when its time is over."""

import pytest
import torch

from locant.adaptation import fit_time, fitting, preconditioning
from tests import hf_models
from tests.adaptations import fitted


@pytest.mark.parametrize("kind", ["bert", "albert", "llama"])
def test_fewer_sequences_if_time_is_short(kind, monkeypatch):
    """ALBERT's layers share an attention, so each batch has several goals."""
    seen = []
    minimize = fitting._minimize

    def watched(scheme, requests, goal, *others, **named):
        assert [len(request.q) for request in requests] == [len(weights) for weights in goal]
        seen.append([len(request.q) for request in requests])
        return minimize(scheme, requests, goal, *others, **named)

    monkeypatch.setattr(fitting, "_minimize", watched)
    queries = kind == "llama"
    long = fitted(hf_models.make(kind), "tisa:kernels=2", length=16, tokens=160, queries=queries, seconds=1e6)
    all_of_them = seen[0]
    seen.clear()
    short = fitted(hf_models.make(kind), "tisa:kernels=2", length=16, tokens=160, queries=queries, seconds=1e-6)
    assert set(seen[0]) == {1}
    assert max(all_of_them) == 10
    assert len(long.heads) == len(short.heads)
    assert not any("time ran out" in notice for notice in long.notices)
    assert any("time ran out before the fit of" in notice for notice in short.notices)


def test_the_share_follows_from_the_time_of_an_evaluation(monkeypatch):
    clock = iter([0.0, 9.0, 10.0, 12.0])  # two evaluations, of 9 and of 2 seconds
    monkeypatch.setattr(fit_time.time, "perf_counter", lambda: next(clock, 12.0))
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


def test_every_layer_gets_an_equal_part_of_the_time_that_is_left(monkeypatch):
    now = 0.0
    monkeypatch.setattr(fit_time.time, "perf_counter", lambda: now)
    clock = fit_time.FitClock(90.0, 3)
    assert clock.next_layers(1) == 30
    now = 60.0  # the first layer took twice as long
    assert clock.next_layers(1) == 15
    now = 100.0
    assert clock.next_layers(1) == 0
    assert fit_time.FitClock(None, 3).next_layers(1) == float("inf")


def test_a_search_out_of_time_ends_with_the_best_it_has_found(monkeypatch):
    """Every evaluation takes a second: after three of them the fourth is not begun."""
    now, losses = 0.0, []
    monkeypatch.setattr(preconditioning.time, "perf_counter", lambda: now)
    x = torch.nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.float64))

    def loss():
        nonlocal now
        now += 1
        total = (x**4).sum() + (x[0] * x[1] - 1) ** 2
        total.backward()
        losses.append((float(total.detach()), x.detach().clone()))
        return total.detach()

    assert not preconditioning.minimize(loss, [x], {x: 1.0}, iterations=50, seconds=2.5)
    assert len(losses) == 3
    torch.testing.assert_close(x.detach(), min(losses, key=lambda pair: pair[0])[1])
    x.data.fill_(2.0)
    assert preconditioning.minimize(loss, [x], {x: 1.0}, iterations=50)
    assert len(losses) > 10
