"""What locant says that it can do: `families`, `support_of`, `locant doctor MODEL`; and models that are refused."""

import json

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.quantization_config import QuantizationMethod

import locant
from locant.hf.families import FAMILIES, REFUSED
from locant.hf.seams.families import SEAMS
from locant.hf.support import Layers, support_of
from tests.command_line import locant_command
from tests.hf_models import inputs, make, output


def test_families_say_how_they_are_known():
    found = {each.family: each for each in locant.families()}
    assert found.keys() == FAMILIES.keys() | REFUSED.keys() | SEAMS.keys()
    assert found["bert"].how == "listed"
    assert found["deberta-v2"].how == "by a seam"
    assert found["lilt"].how == "refused"
    assert str(found["llama"]) == "llama: listed (rotary)"
    assert str(found["bloom"]) == "bloom: by a seam (bias)"
    assert str(found["xlm"]) == "xlm: by a seam (how positions enter is found by running the model)"
    assert str(found["convbert"]) == f"convbert: refused ({REFUSED['convbert']})"


@pytest.mark.parametrize(
    ("kind", "how", "layers", "positions"),
    [
        ("bert", "listed", (Layers("", 2, 0),), "absolute: learned:length=40"),
        ("jamba", "by running", (Layers("", 1, 2),), "none: nope"),
        ("mpnet", "by a seam", (Layers("", 2, 0),), "absolute and bias: learned:length=38+t5"),
        ("t5", "listed", (Layers("encoder", 2, 0), Layers("decoder", 2, 0)), "bias: t5"),
    ],
)
def test_what_can_be_done_with_a_model(kind, how, layers, positions):
    model = make(kind)
    before = output(model, **inputs(kind))
    found = support_of(model)
    assert (found.support.how, found.layers, found.not_read, found.not_swapped) == (how, layers, "", "")
    assert found.positions.startswith(positions)
    assert torch.equal(output(model, **inputs(kind)), before)
    swapped = support_of(locant.swap(model, "alibi"))
    assert swapped.layers == layers
    assert swapped.positions.startswith("swapped: alibi")


def test_doctor_says_what_works_for_a_model(tmp_path):
    make("jamba").save_pretrained(tmp_path)
    done = locant_command("doctor", tmp_path)
    assert done.exit_code == 0, done.output
    for words in ("JambaModel, family jamba", "by running: none", "1 attention module, 2 other layers left alone"):
        assert words in done.output
    wrong = locant_command("doctor", tmp_path / "nothing")
    assert wrong.exit_code != 0
    assert "there is no folder" in wrong.stderr


# ---- models that are refused ----------------------------------------------------------------------


class OwnConfig(PreTrainedConfig):
    model_type = "own_attention"

    def __init__(self, vocab_size=60, hidden_size=16, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size, self.hidden_size = vocab_size, hidden_size


class OwnModel(PreTrainedModel):
    """A model as people write it themselves: attention written out, no interface."""

    config_class = OwnConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.tokens, self.places = nn.Embedding(60, 16), nn.Embedding(40, 16)
        self.project = nn.Linear(16, 48)
        self.post_init()

    def get_input_embeddings(self):
        return self.tokens

    def forward(self, input_ids=None, attention_mask=None, return_dict=True):
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        q, k, v = self.project(x).chunk(3, dim=-1)
        return BaseModelOutput(last_hidden_state=(q @ k.mT).softmax(-1) @ v)


def test_code_that_does_not_call_the_interface_is_refused():
    model = OwnModel(OwnConfig()).eval()
    before = output(model, input_ids=torch.arange(3, 9)[None])
    with pytest.raises(NotImplementedError, match="own_attention models cannot be swapped: its attention does not go"):
        locant.swap(model, "alibi")
    assert support_of(model).support.how == "refused"
    assert torch.equal(output(model, input_ids=torch.arange(3, 9)[None]), before)


def test_a_model_without_weights_is_refused():
    with torch.device("meta"):
        model = make("llama")
    with pytest.raises(ValueError, match="no weights yet"):
        locant.swap(model, "alibi")


def test_quantised_weights_are_refused():
    model = make("llama")
    model.is_quantized, model.quantization_method = True, "bitsandbytes"
    with pytest.raises(ValueError, match=r"quantised \(bitsandbytes\); a swap needs floating point"):
        locant.swap(model, "alibi")
    assert "locant_plan" not in vars(model)
    model.quantization_method = QuantizationMethod.GGUF  # opened in floating point
    locant.swap(model, "alibi")


def test_a_family_that_this_transformers_does_not_have(tmp_path):
    locant.swap(make("llama"), "alibi").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    data = json.loads(path.read_text())
    data["locant"]["family"] = "llama9"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="llama9"):
        locant.load(tmp_path)


def test_a_renamed_family_is_found_by_running():
    """Where a newer transformers calls a family by another name, nothing listed is needed."""

    class Renamed(LlamaConfig):
        model_type = "llama_renamed"

    model = make("llama")
    given, before = inputs("llama"), output(model, **inputs("llama"))
    model.config.__class__ = Renamed
    assert support_of(model).support.how == "by running"
    torch.testing.assert_close(output(locant.swap(model, locant.native(model)), **given), before, rtol=0, atol=2e-5)
