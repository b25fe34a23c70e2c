"""Exported folders in a process that cannot import locant."""

import pytest
from transformers import AutoModelForCausalLM

import locant
from locant.exporting.token_order import Exchange
from tests.exporting.models import differ, padded, swapped, without_locant
from tests.hf_models import output


@pytest.mark.slow
def test_every_stock_architecture(tmp_path):
    runs = [
        ("mpnet", swapped("bert", "t5:shared=layers+first"), "AutoModel", "MPNetModel", Exchange(0, 1)),
        ("smollm3", swapped("llama", "rope/nope", auto=AutoModelForCausalLM), "AutoModelForCausalLM",
         "SmolLM3ForCausalLM", Exchange(0, 0)),
        ("original", swapped("roberta", "learned:length=70"), "AutoModel", "RobertaModel", Exchange(1, 1)),
    ]  # fmt: skip
    asked, expected = [], []
    for to, model, auto, name, exchange in runs:
        assert locant.export(model, tmp_path / to).to == to
        for side in ("right", "left"):
            batch = padded(side, 60, pad=exchange.a)
            asked.append((tmp_path / to, auto, {**batch, "input_ids": exchange(batch["input_ids"])}))
            expected.append((name, output(model, **batch), batch["attention_mask"]))
    for (name, outputs, mask), (found_name, found) in zip(expected, without_locant(*asked), strict=True):
        assert found_name == name
        assert differ(outputs, found, mask) < 1e-5
