"""The attention that a model runs: its own, through the seam, and its own again."""

from transformers import LlamaConfig

from locant.hf.seam import through_seam
from tests.hf_models import make


class WithPart(LlamaConfig):
    sub_configs = {"part": LlamaConfig, "missing": LlamaConfig}  # noqa: RUF012  (as transformers has it)


def test_a_config_without_a_module_gets_its_implementation_back():
    """transformers sets the attention of inner configs too, whether or not a module has them."""
    model = make("llama", attn_implementation="sdpa")
    model.config.__class__ = WithPart
    model.config.part, model.config.missing = LlamaConfig(attn_implementation="eager"), None
    with through_seam(model):
        assert model.config._attn_implementation == "locant:sdpa"
        assert model.config.part._attn_implementation == "locant:eager"
    assert model.config._attn_implementation == "sdpa"
    assert model.config.part._attn_implementation == "eager"
