"""Optimizers in units of each parameter's characteristic scale."""

import torch

from locant.adaptation import preconditioning


def test_steps_in_units_are_those_of_a_rate_for_each_number():
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
