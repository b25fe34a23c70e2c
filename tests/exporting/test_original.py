"""Models in their own architecture again: longer tables, and RoPE."""

import pytest
import torch

import locant
from locant.exporting.refusal import CannotExport
from tests.exporting.models import differ, swapped
from tests.hf_models import make, output


@pytest.mark.parametrize("kind", ["bert", "roberta", "gpt2", "opt", "distilbert", "electra", "albert"])
@pytest.mark.parametrize("spec", ["learned:length=70", "sinusoidal"])
def test_a_longer_table(tmp_path, kind, spec):
    model = swapped(kind, spec)
    done = locant.export(model, tmp_path / "out", length=70)
    assert (done.to, done.exact, done.length) == ("original", True, 70)
    again = type(model).from_pretrained(tmp_path / "out").eval()
    ids = torch.randint(3, 60, (2, 70))
    assert differ(output(model, input_ids=ids), output(again, input_ids=ids), torch.ones_like(ids)) < 1e-5


@pytest.mark.parametrize(
    "spec", ["rope", "rope:theta=500", "rope:scaling=linear,factor=2", "rope:scaling=ntk,factor=4",
             "rope:scaling=yarn,factor=4,original=16", "rope:scaling=llama3,factor=4,original=16"]
)  # fmt: skip
def test_rope_again(tmp_path, spec):
    done = locant.export(swapped("llama", spec), tmp_path / "out")
    assert (done.to, done.exact) == ("original", True)


def test_positions_that_were_read_and_put_back(tmp_path):
    for kind in ("bert", "llama"):
        model = make(kind)
        locant.swap(model, locant.native(model))
        assert locant.export(model, tmp_path / kind).to == "original"


def test_a_model_with_its_own_positions_is_saved_as_it_is(tmp_path):
    model = make("bert")
    assert locant.export(model, tmp_path / "out").difference == 0


def test_auto_names_every_reason(tmp_path):
    with pytest.raises(CannotExport) as problem:
        locant.export(swapped("bert", "alibi"), tmp_path / "out")
    for words in ("original: bert has no place for alibi", "mpnet: ", "t5:shared=layers", "smollm3: ", "jinabert: ",
                  "to='onnx'"):  # fmt: skip
        assert words in str(problem.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"to": "jinabert"}, "not in transformers"), ({"to": "gguf"}, "must be one of"), ({"length": 1}, "at least 2")],
)
def test_what_is_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        locant.export(swapped("bert", "alibi"), tmp_path / "out", **change)


def test_native_positions_beside_a_scheme_are_refused(tmp_path):
    model = make("bert")
    locant.swap(model, "t5:shared=layers", keep_native=True)
    with pytest.raises(CannotExport, match="keeps its own positions"):
        locant.export(model, tmp_path / "out")
