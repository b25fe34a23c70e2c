"""Saving, opening again, and opening what transformers 5 no longer can."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertModel,
)

import locant
from locant.hf import WordOrderWarning
from tests.hf.test_swapping import EXACT
from tests.hf_models import CONFIGS, inputs, make, output, spread

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize(
    ("spec", "keep"), [("tisa:kernels=3+learned:length=40", False), ("huang4:clip=5", False), ("alibi", True)]
)
@pytest.mark.parametrize("kind", CONFIGS)
def test_saved_and_opened_again(kind, spec, keep, tmp_path):
    model, given = spread(locant.swap(make(kind), spec, keep_native=keep)), inputs(kind)
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin")) + list(tmp_path.glob("*.py"))
    again = locant.load(tmp_path).eval()
    assert type(again) is type(model)
    assert torch.equal(output(again, **given), output(model, **given))
    assert locant.native(again).kind == "swapped"
    again.save_pretrained(tmp_path / "second")
    assert torch.equal(output(locant.load(tmp_path / "second").eval(), **given), output(model, **given))
    # Without locant's help no class of transformers makes a model of it.
    with pytest.raises(Exception, match="changed by locant"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.slow
def test_opened_in_a_fresh_process_and_without_locant(tmp_path):
    kinds = ("bert", "llama", "t5", "vit")
    for kind in kinds:
        model = spread(locant.swap(make(kind), "tisa:kernels=3"))
        model.save_pretrained(tmp_path / kind)
        given = inputs(kind)
        save_file({**given, "expected": output(model, **given)}, tmp_path / kind / "case.safetensors")
    code = f"""
import torch, locant
torch.set_num_threads(1)
from safetensors.torch import load_file
for kind in {kinds!r}:
    case = load_file(f"{tmp_path}/{{kind}}/case.safetensors")
    expected = case.pop("expected")
    with torch.no_grad():
        got = locant.load(f"{tmp_path}/{{kind}}").eval()(**case).last_hidden_state
    assert torch.equal(got, expected), kind
print("the same")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "the same" in done.stdout, done.stderr
    code = f"""
import sys, transformers
for name in ("AutoModel", "BertModel"):
    try:
        getattr(transformers, name).from_pretrained({str(tmp_path / "bert")!r})
    except Exception as problem:
        print(name, "refused:", problem)
    else:
        print(name, "OPENED")
print("locant" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    assert "OPENED" not in done.stdout
    auto, _, bert = done.stdout.partition("BertModel refused:")
    assert "AutoModel refused:" in auto
    assert "locant" in auto
    assert "locant" in bert
    assert done.stdout.endswith("False\n")


def test_auto_classes_and_their_arguments(tmp_path):
    model = spread(locant.swap(make("bert", AutoModelForMaskedLM), "tisa"))
    model.save_pretrained(tmp_path)
    given = inputs("bert")
    expected = output(model, **given)
    for opened in (
        locant.load(tmp_path),
        locant.load(tmp_path, AutoModelForMaskedLM),
        AutoModelForMaskedLM.from_pretrained(tmp_path),
        locant.load(tmp_path, device_map="cpu"),
    ):
        assert torch.equal(output(opened.eval(), **given), expected)
    assert locant.load(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16
    base = AutoModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(output(base, **given), output(model.base_model, **given), **EXACT)
    classifier = locant.load(tmp_path, AutoModelForSequenceClassification, num_labels=3)
    assert classifier.num_labels == 3
    torch.testing.assert_close(
        classifier.bert.encoder.layer[0].attention.self.locant.offset,
        model.bert.encoder.layer[0].attention.self.locant.offset,
    )
    model.bert.save_pretrained(tmp_path / "base")  # the part below the head knows how to save itself too
    torch.testing.assert_close(output(locant.load(tmp_path / "base").eval(), **given), output(base, **given), **EXACT)


def test_a_shared_scheme_is_shared_again(tmp_path):
    model = spread(locant.swap(make("bert"), locant.scheme("tisa", n_heads=4)))
    model.save_pretrained(tmp_path)
    again = locant.load(tmp_path).eval()
    layers = again.encoder.layer
    assert layers[0].attention.self.locant is layers[1].attention.self.locant
    assert torch.equal(output(again, **inputs("bert")), output(model, **inputs("bert")))


def test_an_opened_model_can_be_swapped_but_not_taken_back(tmp_path):
    locant.swap(make("bert"), "tisa").save_pretrained(tmp_path)
    model = locant.load(tmp_path)
    with pytest.warns(WordOrderWarning, match="open the original model"):
        locant.swap(model, "huang4:clip=3")
    output(model, **inputs("bert"))
    with pytest.raises(ValueError, match=r"native positions cannot be put back: .* load the original model"):
        locant.swap(model, "native")
    with pytest.raises(ValueError, match="native positions cannot be kept"):
        locant.swap(model, "tisa", keep_native=True)


def test_model_card(tmp_path):
    locant.swap(make("bert"), "tisa:kernels=3").save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "| `encoder.layer.1.attention.self` | `tisa:kernels=3` |" in card
    assert "Maximum length: 40 before, none now" in card
    (tmp_path / "README.md").write_text("my own")
    locant.swap(make("bert"), "alibi").save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "my own"


def test_an_ordinary_folder_is_opened_as_it_is(tmp_path):
    model = make("bert")
    model.save_pretrained(tmp_path)
    assert torch.equal(output(locant.load(tmp_path).eval(), **inputs("bert")), output(model, **inputs("bert")))


def test_after_native_a_model_saves_as_it_did(tmp_path):
    model = make("bert")
    locant.swap(locant.swap(model, "tisa"), "native")
    model.save_pretrained(tmp_path)
    assert torch.equal(
        output(BertModel.from_pretrained(tmp_path).eval(), **inputs("bert")), output(model, **inputs("bert"))
    )


def test_a_whole_whose_part_was_swapped_is_not_saved_as_if_nothing_were(tmp_path):
    model = make("bert", AutoModelForMaskedLM)
    locant.swap(model.bert, "alibi")
    with pytest.raises(ValueError, match=r"only a part of this BertForMaskedLM was swapped \(bert\).*swap the whole"):
        model.save_pretrained(tmp_path)
    locant.swap(model, "alibi").save_pretrained(tmp_path / "whole")
    given = inputs("bert")
    assert torch.equal(output(locant.load(tmp_path / "whole").eval(), **given), output(model, **given))
    locant.swap(model, "native").save_pretrained(tmp_path / "native")
    assert torch.equal(
        output(AutoModelForMaskedLM.from_pretrained(tmp_path / "native").eval(), **given), output(model, **given)
    )


# ---- folders that are not right -------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    locant.swap(make("bert"), "tisa:kernels=3").save_pretrained(tmp_path)
    return tmp_path


def test_a_truncated_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(Exception, match=r"(?i)incomplete|header|metadata|invalid|truncat"):
        locant.load(folder)


def test_weights_that_do_not_fit_the_schemes(folder):
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file({n: x for n, x in weights.items() if "layer.1.attention.self.locant" not in n}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"do not fit the schemes of its config; missing_keys: .*layer\.1.*locant"):
        locant.load(folder)


def test_a_tampered_config(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["locant"]["locant"]["stacks"][0]["layers"][0]["scheme"] = "tisaa"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"unknown scheme 'tisaa' .*did you mean 'tisa'"):
        locant.load(folder)
    config["locant"]["locant"]["stacks"][0]["layers"][0]["scheme"] = "tisa:kernels=4"
    path.write_text(json.dumps(config))
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)mismatch|do not fit"):
        locant.load(folder)
    config["locant"]["locant"]["format"] = 7
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="written by a newer locant"):
        locant.load(folder)


def test_a_folder_of_an_older_locant_opens(folder):
    """It lacks the entries that were added to plans since."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    plan = config["locant"]["locant"]
    del plan["unlearned"], plan["digest"], plan["stacks"][0]["native_count"]
    path.write_text(json.dumps(config))
    assert locant.native(locant.load(folder)).kind == "swapped"


@pytest.mark.parametrize(
    ("spec", "change"),
    [
        ("alibi", lambda stack: stack["layers"][1].update(scheme="nope")),
        ("alibi", lambda stack: [layer.update(scheme="alibi:scaled=true") for layer in stack["layers"]]),
        ("first+tisa", lambda stack: stack.update(native_count=True)),
    ],
)
def test_another_valid_plan_is_not_the_one_that_was_saved(tmp_path, spec, change):
    """No weight contradicts another scheme without parameters, so the plan has a digest."""
    locant.swap(make("llama"), spec).save_pretrained(tmp_path)
    locant.load(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    plan = config["locant"]["locant"]
    change(plan["stacks"][0])
    for layer in plan["stacks"][0]["layers"]:
        layer["same_as"] = layer["module"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="the plan is not the one that was saved"):
        locant.load(tmp_path)
    del plan["digest"]  # an editor who knows
    path.write_text(json.dumps(config))
    locant.load(tmp_path)


@pytest.mark.parametrize("key", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_a_weight_that_is_missing_is_not_made_up(tmp_path, key):
    """transformers fills in random numbers, and warns."""
    locant.swap(make("llama", AutoModelForCausalLM), "tisa").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights[key]
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ValueError, match=f"missing_keys: {key}"):
        locant.load(tmp_path)
    if key == "lm_head.weight":
        locant.load(tmp_path, AutoModel)  # a model without a head does not need it


def test_numbers_of_a_scheme_that_are_not_finite(folder):
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if name.endswith("locant.amplitude"))
    weights[name][0, 0] = float("nan")
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"amplitude of tisa.* not finite"):
        locant.load(folder)


def test_pushing_while_saving_would_push_the_wrong_config(tmp_path):
    with pytest.raises(ValueError, match="save a swapped model first, then push it"):
        locant.swap(make("bert"), "tisa").save_pretrained(tmp_path, push_to_hub=True)


# ---- Trainer --------------------------------------------------------------------------------------


def test_trainer_checkpoints_resume(tmp_path):
    """Stopped after 4 of 8 steps and resumed: the weights are those of 8 steps in one go."""
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": torch.randint(3, 60, (8,)), "labels": torch.randint(3, 60, (8,))} for _ in range(16)]

    def train(folder, resume=None, stop=None):
        model = locant.swap(make("bert", AutoModelForMaskedLM), "tisa:kernels=3")
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        arguments = TrainingArguments(
            str(folder), max_steps=8, save_steps=4, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[],
            disable_tqdm=True, use_cpu=True, seed=0, logging_steps=100, lr_scheduler_type="constant",
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=resume)
        return model

    torch.manual_seed(5)
    whole = train(tmp_path / "a")
    shutil.copytree(tmp_path / "a" / "checkpoint-4", tmp_path / "b" / "checkpoint-4")
    resumed = train(tmp_path / "b", resume=str(tmp_path / "b" / "checkpoint-4"))
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value)
    start = locant.swap(make("bert", AutoModelForMaskedLM), "tisa:kernels=3").state_dict()
    assert any(not torch.equal(start[n], x) for n, x in whole.state_dict().items() if n.endswith("locant.sharpness"))
    opened = locant.load(tmp_path / "a" / "checkpoint-8").eval()
    torch.testing.assert_close(output(opened, **inputs("bert")), output(whole.eval(), **inputs("bert")))


# ---- relative_key and relative_key_query of transformers 4 ----------------------------------------
# tests/hf/data/relative_key holds tiny random checkpoints saved by transformers 4.57.6, with the logits it gave.


@pytest.mark.parametrize("folder", sorted((DATA / "relative_key").iterdir()), ids=lambda path: path.name)
def test_lost_checkpoints(folder, tmp_path):
    expected = load_file(folder / "expected.safetensors")
    model = locant.load(folder).eval()
    full = output(model, input_ids=expected["full_ids"])
    torch.testing.assert_close(full, expected["full_logits"], **EXACT)
    padded = output(model, input_ids=expected["padded_ids"], attention_mask=expected["padded_mask"])
    torch.testing.assert_close(padded, expected["padded_logits"], **EXACT)
    assert str(model.base_model.encoder.layer[0].attention.self.locant).startswith(
        "huang4" if folder.name.endswith("query") else "shaw:values=false"
    )
    longer = torch.randint(3, 40, (1, 40))  # transformers 4 raises here; the last row is used
    assert output(model, input_ids=longer).isfinite().all()
    model.save_pretrained(tmp_path)
    assert torch.equal(output(locant.load(tmp_path).eval(), input_ids=expected["full_ids"]), full)
    base = locant.load(folder, AutoModel).eval()
    assert output(base, input_ids=expected["full_ids"]).shape[-1] == 16
    # transformers 5 alone makes another model of it: what this is for
    plain = AutoModelForMaskedLM.from_pretrained(folder).eval()
    assert (output(plain, input_ids=expected["full_ids"]) - expected["full_logits"]).abs().max() > 0.1


def test_a_lost_checkpoint_without_its_tables(tmp_path):
    source = DATA / "relative_key" / "bert_relative_key"
    shutil.copytree(source, tmp_path / "copy")
    path = tmp_path / "copy" / "model.safetensors"
    weights = load_file(path)
    save_file({n: x for n, x in weights.items() if "layer.1.attention.self.distance" not in n}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"there is no distance_embedding.weight for .*layer\.1"):
        locant.load(tmp_path / "copy")
    save_file({n: x for n, x in weights.items() if "distance" not in n}, path, {"format": "pt"})
    with pytest.raises(ValueError, match="=relative_key, but the weights have no distance_embedding"):
        locant.load(tmp_path / "copy")


def test_a_lost_checkpoint_in_the_old_format(tmp_path):
    source = DATA / "relative_key" / "bert_relative_key_query"
    shutil.copy(source / "config.json", tmp_path)
    torch.save(load_file(source / "model.safetensors"), tmp_path / "pytorch_model.bin")
    expected = load_file(source / "expected.safetensors")
    got = output(locant.load(tmp_path).eval(), input_ids=expected["full_ids"])
    torch.testing.assert_close(got, expected["full_logits"], **EXACT)


def test_a_config_that_names_no_class_is_not_opened_quietly(tmp_path):
    make("bert", AutoModelForMaskedLM).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="opening the model as BertModel, without a head"):
        locant.load(tmp_path)
