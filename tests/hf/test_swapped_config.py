"""The config of a swapped model does not build another model."""

import copy

import pytest
import torch
from transformers import AutoModel

import locant
from tests import hf_models


@pytest.mark.parametrize("kind", ["bert", "llama", "opt"])
def test_the_config_of_a_swapped_model_is_refused(kind):
    model = hf_models.make(kind).eval()
    plain = copy.deepcopy(model.config)
    locant.swap(model, "alibi")
    for build in (AutoModel.from_config, type(model)):
        with pytest.raises(ValueError, match=f"a {kind} model that locant has swapped.*copy.deepcopy"):
            build(model.config)
    again = locant.swap(AutoModel.from_config(plain).eval(), "alibi")
    again.load_state_dict(model.state_dict())
    ids = torch.arange(5, 12)[None]
    torch.testing.assert_close(again(ids)[0], copy.deepcopy(model)(ids)[0])
    locant.swap(model, "native")
    assert AutoModel.from_config(model.config).num_parameters() == model.num_parameters()
