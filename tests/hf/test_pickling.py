"""A swapped model that is pickled, copied or sent to another process keeps its positions, to the last bit."""

import copy
import inspect
import io
import pickle
import subprocess
import sys
from types import MethodType

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import locant
from locant.hf.methods import Method
from tests.hf_models import CONFIGS, inputs, make, output, spread

SPECS = ["learned:length=40", "first", "tisa", "rope+learned:length=40"]


def pickled(model, protocol=pickle.HIGHEST_PROTOCOL):
    return pickle.loads(pickle.dumps(model, protocol))


def through_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_family_keeps_its_positions(kind, tmp_path):
    """Outputs, plan, original positions and `save_pretrained` all come back."""
    plain, given = output(make(kind), **inputs(kind)), inputs(kind)
    for spec in SPECS:
        model = spread(locant.swap(make(kind), spec))
        before = output(model, **given)
        assert not torch.equal(before, plain)
        for again in (pickled(model), through_torch(model), copy.deepcopy(model)):
            assert torch.equal(output(again, **given), before), spec
        assert str(locant.native(again)) == str(locant.native(model))
    again = pickled(model)
    again.save_pretrained(tmp_path)
    assert torch.equal(output(locant.load(tmp_path).eval(), **given), before)
    assert torch.equal(output(locant.swap(again, "native"), **given), plain)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol(protocol):
    for kind in ("mpnet", "t5", "llama", "vit"):
        model, given = spread(locant.swap(make(kind), "tisa+learned:length=40")), inputs(kind)
        assert torch.equal(output(pickled(model, protocol), **given), output(model, **given))


@pytest.mark.parametrize("spec", SPECS)
def test_a_part_alone(spec):
    """The base model of a model with a head, and the encoder of an encoder-decoder."""
    ids = inputs("llama")["input_ids"]
    model = spread(locant.swap(make("llama", AutoModelForCausalLM), spec))
    assert torch.equal(output(pickled(model.model), input_ids=ids), output(model.model, input_ids=ids))
    whole = spread(locant.swap(make("t5"), spec))
    assert torch.equal(output(pickled(whole.encoder), input_ids=ids), output(whole.encoder, input_ids=ids))


def test_in_wrappers():
    peft = pytest.importorskip("peft")
    model, given = spread(locant.swap(make("llama"), "tisa+learned:length=40")), inputs("llama")
    before = output(model, **given)
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["q_proj"]))
    for wrapped in (torch.nn.DataParallel(model), adapted):
        assert torch.equal(output(pickled(wrapped), **given), before)


OPEN = """
import sys, torch
torch.set_num_threads(int(sys.argv[2]))  # the same bits
model, given, before = torch.load(sys.argv[1], weights_only=False)
with torch.no_grad():
    assert torch.equal(model(**given).last_hidden_state, before)
"""


@pytest.mark.slow
def test_in_another_process_that_did_not_import_locant(tmp_path):
    model, given = locant.swap(make("modernbert"), "sinusoidal"), inputs("modernbert")
    torch.save((model, given, output(model, **given)), tmp_path / "model.pt")
    subprocess.run([sys.executable, "-c", OPEN, tmp_path / "model.pt", str(torch.get_num_threads())], check=True)


def test_a_cache_keeps_the_positions_of_its_rows():
    model = spread(locant.swap(make("llama"), "tisa"))
    ids, pos = torch.randint(3, 60, (2, 5)), torch.stack([torch.arange(5), torch.arange(5) * 2])
    kept = DynamicCache()
    output(model, input_ids=ids, position_ids=pos, past_key_values=kept, use_cache=True)
    for again in (pickled(kept), copy.deepcopy(kept)):
        again.reorder_cache(torch.tensor([1, 0]))
        assert torch.equal(again.locant_positions, pos.flip(0))
    assert torch.equal(kept.locant_positions, pos)


@pytest.mark.parametrize("spec", ["learned:length=40", "tisa"])
def test_a_lost_forward_is_noticed(spec):
    """Whoever puts the forward of the class back: no layer runs without the positions of its stack."""
    model = locant.swap(make("llama"), spec)
    del model.__dict__["forward"]
    with pytest.raises(RuntimeError, match="received no positions; call it through the swapped model"):
        output(model, **inputs("llama"))


@pytest.mark.parametrize("kind", ["llama", "mpnet"])
def test_it_looks_like_a_method(kind):
    model, ids = locant.swap(make(kind), "learned:length=40"), inputs(kind)["input_ids"]
    assert isinstance(model.forward, Method)
    assert inspect.signature(model.forward) == inspect.signature(MethodType(type(model).forward, model))
    with torch.no_grad():
        assert torch.equal(model(ids).last_hidden_state, output(model, input_ids=ids))  # arguments by position


def test_mixed_precision_of_accelerate_can_be_removed(monkeypatch):
    """accelerate wraps the function of `model.forward` and later takes its wrappers off again."""
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setattr(accelerate.state.AcceleratorState, "_shared_state", {})  # one precision for a whole process
    model, given = locant.swap(make("bert"), "tisa"), inputs("bert")
    before = output(model, **given)
    accelerator = accelerate.Accelerator(mixed_precision="bf16")
    prepared = accelerator.prepare_model(model)
    assert not torch.equal(output(prepared, **given), before)
    assert torch.equal(output(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False), **given), before)
