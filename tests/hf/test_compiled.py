"""torch.compile, torch.export and ONNX: a swapped model at every length, also beyond the table that it had."""

import io

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import locant
from tests.attention.test_compiled import Counting
from tests.hf_models import inputs, make, output, spread

EXACT = {"rtol": 0, "atol": 1e-5}
LENGTHS = (9, 12, 41, 100)  # the tables of these models have 40 rows


def swapped(kind, spec, auto=None, **changes):
    model = make(kind, **({} if auto is None else {"auto": auto}), num_hidden_layers=1, **changes)
    return spread(locant.swap(model, spec))


def padded(length, batch=2):
    """Tokens, and a mask that hides the last two of the first sequence."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, 2:][-2:] = 0
    return {"input_ids": inputs("bert", length, batch)["input_ids"], "attention_mask": mask}


@pytest.mark.parametrize(("kind", "masked"), [("bert", False), ("roberta", True)])
def test_one_graph_for_all_lengths(kind, masked):
    model = swapped(kind, "tisa")
    compiled = Counting(model)
    with torch.no_grad():
        for length in LENGTHS:
            given = padded(length) if masked else inputs(kind, length)
            torch.testing.assert_close(compiled.run(**given).last_hidden_state, output(model, **given), **EXACT)
    assert compiled.graphs == 1


@pytest.mark.parametrize("spec", ["rope", "tisa"])
def test_one_graph_for_decoding(spec):
    model = swapped("llama", spec, AutoModelForCausalLM)
    compiled, cache = Counting(model), DynamicCache(config=model.config)
    ids = inputs("llama", 45)["input_ids"]
    with torch.no_grad():
        whole = model(ids).logits
        model(ids[:, :5], past_key_values=cache)
        for t in range(5, 45):
            out = compiled.run(input_ids=ids[:, t : t + 1], past_key_values=cache).logits
            torch.testing.assert_close(out[:, 0], whole[:, t], rtol=0, atol=5e-5)
    assert compiled.graphs == 1


class Hidden(torch.nn.Module):
    """A model that takes and returns tensors."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask=None):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def shapes(masked):
    sizes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=1, max=4096)}
    return (sizes, sizes) if masked else (sizes,)


@pytest.mark.parametrize(("kind", "spec", "masked"), [("bert", "tisa", False), ("gpt2", "t5", True)])
def test_exported_for_any_length(kind, spec, masked):
    layers = {"n_layer": 1} if kind == "gpt2" else {"num_hidden_layers": 1}
    model = spread(locant.swap(make(kind, **layers), spec))
    example = tuple(padded(9).values() if masked else inputs(kind).values())
    with torch.no_grad():
        program = torch.export.export(Hidden(model).eval(), example, dynamic_shapes=shapes(masked))
        saved = io.BytesIO()
        torch.export.save(program, saved)
        run = torch.export.load(saved).module()
        for length in (1, 2, 33, 41, 100, 600):
            given = padded(length, 3) if masked else inputs(kind, length, 3)
            torch.testing.assert_close(run(*given.values()), output(model, **given), **EXACT)
    operators = {str(node.target) for node in program.graph.nodes}
    assert not any(name.startswith("locant") for name in operators), "an exported program must run without locant"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("spec", ["t5", "cope:positions=4"])
def test_onnx(spec, tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed; returns with the extra 'test'")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed; returns with the extra 'test'")
    model, path = swapped("bert", spec), tmp_path / "model.onnx"
    with torch.no_grad():
        torch.onnx.export(
            Hidden(model).eval(), tuple(padded(9).values()), path, dynamo=True, dynamic_shapes=shapes(True),
            input_names=["ids", "mask"], verbose=False,
        )  # fmt: skip
    session = runtime.InferenceSession(path)
    for length in (1, 33, 41, 100, 600):
        given = padded(length, 3)
        named = dict(zip(("ids", "mask"), (x.numpy() for x in given.values()), strict=True))
        torch.testing.assert_close(torch.from_numpy(session.run(None, named)[0]), output(model, **given), **EXACT)
