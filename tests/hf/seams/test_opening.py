"""The call of an attention through a seam."""

import pytest
import torch
from torch import nn

from locant.hf.seams.opening import additive, call


def recorded(module, dropout, **options):
    """What reaches the attention of a module without a scheme."""
    found = {}

    def own(module, query, key, value, mask, **others):
        found.update(others, mask=mask)
        return query.transpose(1, 2), None

    x = torch.randn(1, 2, 3, 4)
    call(module, x, x, x, None, scaling=0.5, dropout=dropout, own=own, **options)
    return found


def test_the_original_gets_what_its_class_was_asked_for():
    module = nn.Module().eval()
    assert recorded(module, 0.1, output_attentions=True)["output_attentions"] is True
    found = recorded(module, 0.1)
    assert (found["output_attentions"], found["scaling"], found["mask"]) == (False, 0.5, None)
    assert recorded(module, 0.1, is_causal=False)["is_causal"] is False


@pytest.mark.parametrize("dropout", [0.1, nn.Dropout(0.1)], ids=["rate", "module"])
def test_dropout_is_for_training(dropout):
    assert recorded(nn.Module().train(), dropout)["dropout"] == 0.1
    assert recorded(nn.Module().eval(), dropout)["dropout"] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bool_masks_become_numbers_and_others_stay(dtype):
    like = torch.zeros(1, dtype=dtype)
    found = additive(torch.tensor([True, False]), like)
    assert found.dtype == dtype
    assert found.tolist() == [0.0, torch.finfo(dtype).min]
    numbers = torch.tensor([0.0, -1e4])
    assert additive(numbers, like) is numbers
    assert additive(None, like) is None
