"""`locant.load` on folders of swapped models whose config and weights do not belong together."""

import json

import pytest

import locant
from tests.hf_models import make


@pytest.fixture
def folder(tmp_path):
    locant.swap(make("llama", num_hidden_layers=1), "tisa").save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder, change):
    path = folder / "config.json"
    data = json.loads(path.read_text())
    change(data["locant"])
    path.write_text(json.dumps(data))


def test_a_config_of_a_larger_model_than_the_weights_is_refused(folder):
    """Before it is built: the embeddings alone would have 2**25 numbers."""
    rewrite(folder, lambda data: data.update(vocab_size=2**20))
    with pytest.raises(ValueError, match=r"a model of 33,\d+,\d+ numbers, but the weights have \d+,\d+;.*embed_tokens"):
        locant.load(folder)


def test_sizes_of_a_plan_that_the_weights_do_not_allow_are_refused(folder):
    rewrite(folder, lambda data: data["locant"]["stacks"][0].update(width=65))
    with pytest.raises(ValueError, match="width of layer 0 of stack 0 is 65; the weights allow 1 to 64"):
        locant.load(folder)
