"""Weights that are not numbers."""

import math

import pytest
import torch
from torch import nn

from locant.hf.finite import check_finite


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_the_first_weight_that_is_no_number_is_named(strange):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    check_finite(model)
    with torch.no_grad():
        model[0].bias[1] = strange
    with pytest.raises(
        ValueError, match=r"^0\.bias has numbers that are not finite \(NaN or ∞\); load the model again"
    ):
        check_finite(model)
    with torch.no_grad():
        model[1].weight[0, 1] = model[1].bias[0] = strange
    with pytest.raises(ValueError, match=r"^0\.bias has .*, and so have 2 more"):
        check_finite(model)
