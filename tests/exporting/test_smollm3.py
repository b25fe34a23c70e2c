"""Llama with NoPE in some layers, written as SmolLM3."""

import pytest
from transformers import AutoModelForCausalLM, SmolLM3ForCausalLM

import locant
from locant.exporting.refusal import CannotExport
from tests.exporting.models import differ, padded, swapped
from tests.hf_models import output


def test_both_sides_of_padding(tmp_path):
    model = swapped("llama", "rope/nope", auto=AutoModelForCausalLM)
    done = locant.export(model, tmp_path / "out")
    assert (done.to, done.exact) == ("smollm3", True)
    opened = SmolLM3ForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert opened.config.no_rope_layers == [1, 0]
    for batch in (padded("right"), padded("left")):
        assert differ(output(model, **batch), output(opened, **batch), batch["attention_mask"]) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("spec", ["nope", "rope:theta=500/nope", "nope/rope:scaling=linear,factor=2"])
def test_the_relatives_of_llama(tmp_path, kind, spec):
    done = locant.export(swapped(kind, spec), tmp_path / "out")
    assert (done.to, done.exact) == ("smollm3", True)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rope/tisa", "has tisa"),
        ("rope/rope:theta=5", "one RoPE for all layers"),
        ("rope+learned:length=30/learned:length=30", "adds learned"),
        ("rope:partial=0.5/nope", "partial"),
        ("rope@grouped/nope", "within a map"),
        ("rope:scaling=dynamic,factor=2/nope", "scaling=dynamic"),
    ],
)
def test_what_smollm3_cannot_hold(tmp_path, spec, message):
    with pytest.raises(CannotExport, match=message):
        locant.export(swapped("llama", spec), tmp_path / "out", "smollm3")
    assert not (tmp_path / "out").exists()
