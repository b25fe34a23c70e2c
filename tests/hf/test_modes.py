"""A model is left in the mode it was found in."""

from types import SimpleNamespace

import pytest
from torch import nn

from locant.hf.modes import cache_kept, evaluating


def fail():
    raise ValueError("it")


def test_every_part_returns_to_its_own_mode():
    module = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    module[0].eval()
    with evaluating(module):
        assert not any(part.training for part in module.modules())
    assert [part.training for part in module.modules()] == [True, False, True]
    with pytest.raises(ValueError, match="it"), evaluating(module):
        fail()
    assert [part.training for part in module.modules()] == [True, False, True]


@pytest.mark.parametrize("before", [{}, {"use_cache": True}, {"use_cache": False}])
def test_the_cache_of_a_config(before):
    model = SimpleNamespace(config=SimpleNamespace(**before))
    with cache_kept(model):
        model.config.use_cache = not before.get("use_cache", True)
    assert vars(model.config) == before
    with pytest.raises(ValueError, match="it"), cache_kept(model):
        fail()
    assert vars(model.config) == before
