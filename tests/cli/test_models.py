"""`locant swap` on models with and without a head."""

import pytest
from transformers import AutoModel, AutoModelForCausalLM

import locant
from tests.command_line import locant_command
from tests.hf_models import make


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM])
def test_swap_prints_what_changed_and_saves(tmp_path, auto):
    make("gpt2", auto).save_pretrained(tmp_path / "gpt2")
    done = locant_command("swap", tmp_path / "gpt2", "alibi", "-o", tmp_path / "new")
    assert done.exit_code == 0, done.output
    assert "2 attention modules" in done.output
    opened = locant.load(tmp_path / "new")
    assert isinstance(opened, type(make("gpt2", auto)))
    assert "alibi" in str(locant.native(opened))
