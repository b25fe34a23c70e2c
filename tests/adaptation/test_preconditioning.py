"""Optimizers in units of each parameter's characteristic scale."""

import pytest
import torch

import locant
from locant.adaptation import preconditioning


def test_scaled_steps_equal_a_learning_rate_for_each_number():
    start, unit = torch.randn(6), torch.tensor([1.0, 0.1, 10, 1, 2, 0.5])
    ours = torch.nn.Parameter(start.clone())
    optimizer = preconditioning.ScaledAdamW([{"params": [ours], "lr": 0.01}], {ours: unit})
    theirs = [torch.nn.Parameter(value.clone()) for value in start]
    plain = torch.optim.AdamW(
        [{"params": [p], "lr": 0.01 * float(u)} for p, u in zip(theirs, unit, strict=True)], weight_decay=0.0
    )
    for number in range(5):
        gradient = torch.randn(6)
        ours.grad = gradient.clone()
        for p, g in zip(theirs, gradient, strict=True):
            p.grad = g.clone()
        optimizer.step()
        plain.step()
        torch.testing.assert_close(ours.data, torch.stack([p.data for p in theirs]), msg=f"step {number}")


def test_steps_of_a_large_parameter_are_not_rounded_away():
    start = torch.full((3,), 8e6)
    ours, unit = (torch.nn.Parameter(x) for x in (start.clone(), start / 8e6))
    scaled = preconditioning.ScaledAdamW([{"params": [ours], "lr": 0.01}], {ours: 8e6})
    plain = torch.optim.AdamW([unit], lr=0.01, weight_decay=0.0)
    for _ in range(5):
        gradient = torch.randn(3)
        ours.grad, unit.grad = gradient.clone(), gradient.clone()
        scaled.step()
        plain.step()
    torch.testing.assert_close(ours.data / 8e6, unit.data)
    assert float((ours.data - start).abs().min()) > 1e4


def test_l_bfgs_in_units_of_the_scale_finds_a_badly_scaled_minimum():
    """(x / 10⁶ − 1)² + (10⁶ y − 1)²: without scales the first step is far too short in x and too long in y."""
    goal = torch.tensor([1e6, 1e-6], dtype=torch.float64)

    def minimum(scales):
        x = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def loss():
            total = ((x / goal - 1) ** 2).sum()
            total.backward()
            return total.detach()

        preconditioning.minimize(loss, [x], {x: scales}, iterations=20)
        assert x.grad is None
        return x.detach() / goal

    torch.testing.assert_close(minimum(goal), torch.ones(2, dtype=torch.float64))
    assert float((minimum(1.0) - 1).abs().max()) > 0.5


class Free(locant.Scheme):
    """Returns any scale."""

    def __init__(self, scale):
        super().__init__()
        self.scale_, self.curve = scale, torch.nn.Parameter(torch.zeros(4, 3))

    def parameter_scale(self, name):
        return self.scale_


@pytest.mark.parametrize(
    ("scale", "got"),
    [
        (0.0, "0 … 0"),
        (torch.tensor([1.0, -2.0, 1.0]), "-2 … 1"),
        (float("nan"), "nan"),
        (torch.ones(5), r"a tensor \[5\]"),
        (torch.ones(2, 4, 3), r"a tensor \[2, 4, 3\]"),
    ],
)
def test_impossible_scales_are_named(scale, got):
    with pytest.raises(ValueError, match=rf"free: parameter_scale\('curve'\) must return .*\[4, 3\]; got {got}"):
        preconditioning.parameter_scales(Free(scale))


def test_an_outer_scheme_decides_for_the_schemes_it_contains():
    class Outer(Free):
        def __init__(self):
            super().__init__(2.0)
            self.inner = Free(5.0)

        def parameter_scale(self, name):
            return 3.0 if name == "inner.curve" else super().parameter_scale(name)

    outer = Outer()
    frozen = torch.nn.Sequential(outer, Free(7.0).requires_grad_(False))
    scales = preconditioning.parameter_scales(frozen)
    assert scales == {outer.curve: 2.0, outer.inner.curve: 3.0}
