"""`locant swap` of sentence-transformers models: the new folder opens with the pooling and all modules of the old."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import constants
from transformers import AutoTokenizer

import locant
from locant.hf.plan import ANY_LENGTH
from locant.hf.sentence_folder import sentence_folder
from tests import bert, sentence_models
from tests.command_line import locant_command
from tests.sentence_models import TEXTS, kinds, opened

BY_HAND = {"mean": lambda x: x.mean(0), "cls": lambda x: x[0], "lasttoken": lambda x: x[-1]}
"""Pooling -> the vector of the states [L, d] of a text."""


def make(mode: str, folder: Path) -> str:
    return sentence_models.save_causal(folder) if mode == "lasttoken" else sentence_models.save(folder, mode)


def swapped(folder, out, spec="tisa:kernels=2", *options) -> Path:
    done = locant_command("swap", folder, spec, "-o", out, *options)
    assert done.exit_code == 0, done.output
    return out


@pytest.mark.parametrize("mode", BY_HAND)
def test_a_swapped_model_opens_with_all_its_modules(tmp_path, mode):
    folder = make(mode, tmp_path / "model")
    out = swapped(folder, tmp_path / "out")
    before, after = opened(folder), opened(out)
    assert kinds(after) == kinds(before) == ["Transformer", "Pooling", "Normalize"]
    assert after[1].get_config_dict() == before[1].get_config_dict()
    assert after[1].pooling_mode == mode
    vectors = after.encode(TEXTS)
    assert abs((vectors**2).sum(1) - 1).max() < 1e-5
    model, tokenizer = locant.load(out).eval(), AutoTokenizer.from_pretrained(out)
    for text, vector in zip(TEXTS, vectors, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            states = model.base_model(**inputs).last_hidden_state[0]
        by_hand = F.normalize(BY_HAND[mode](states), dim=0)
        torch.testing.assert_close(torch.tensor(vector), by_hand, rtol=1e-4, atol=1e-5)


def test_every_module_is_copied(tmp_path):
    folder = sentence_models.save(tmp_path / "model", ("cls", "mean"), dense=True)
    out = swapped(folder, tmp_path / "out")
    assert kinds(opened(out)) == ["Transformer", "Pooling", "Dense", "Normalize"]
    assert torch.equal(opened(out)[2].linear.weight, opened(folder)[2].linear.weight)
    for name in ("config_sentence_transformers.json", "1_Pooling/config.json", "2_Dense/config.json"):
        assert (out / name).read_text() == (Path(folder) / name).read_text()


def test_the_transformer_may_have_a_folder_of_its_own(tmp_path):
    folder = Path(sentence_models.save(tmp_path / "model", "cls"))
    inner = folder / "0_Transformer"
    inner.mkdir()
    for path in [path for path in folder.iterdir() if path.is_file()]:
        if path.name not in ("modules.json", "config_sentence_transformers.json"):
            path.rename(inner / path.name)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    assert sentence_folder(str(inner)).root == folder.resolve()
    assert sentence_folder(str(folder / "1_Pooling")) is None
    for number, given in enumerate((folder, inner)):
        out = swapped(given, tmp_path / f"out{number}")
        assert opened(out)[1].pooling_mode == "cls"
        assert locant.load(out).config.max_position_embeddings == ANY_LENGTH


@pytest.mark.parametrize("legacy", [False, True])
def test_the_length_is_what_the_scheme_allows(tmp_path, legacy):
    folder = Path(sentence_models.save(tmp_path / "model"))
    if legacy:  # old folders have the length in a file of sentence-transformers
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 24, "do_lower_case": False}))
    assert opened(folder).max_seq_length == 24
    wanted = {("alibi",): ANY_LENGTH, ("learned:length=48",): 48, ("alibi", "--keep-native"): 24}
    for number, (words, length) in enumerate(wanted.items()):
        assert opened(swapped(folder, tmp_path / str(number), *words)).max_seq_length == length


def test_a_kept_table_bounds_the_tokenizer(tmp_path):
    """RoBERTa's table has 514 rows for 512 positions."""
    from tests import hf_models

    model = hf_models.make("roberta")
    model.save_pretrained(tmp_path / "model")
    bert.tokenizer().save_pretrained(tmp_path / "model")
    out = swapped(tmp_path / "model", tmp_path / "out", "tisa", "--keep-native")
    length = AutoTokenizer.from_pretrained(out).model_max_length
    assert length == 38
    locant.load(out)(input_ids=torch.full((1, length), 5))


def test_a_plain_folder_stays_plain(tmp_path):
    out = swapped(bert.save(tmp_path / "model"), tmp_path / "out")
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    assert sentence_folder(str(tmp_path / "model")) is None


def test_a_model_of_the_hub(tmp_path, monkeypatch):
    name, commit = "someone/some-encoder", "0" * 40
    cache = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    sentence_models.save(tmp_path / "model", "cls")
    shutil.copytree(tmp_path / "model", cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    found = opened(swapped(name, tmp_path / "out"))
    assert (found[1].pooling_mode, found.max_seq_length) == ("cls", ANY_LENGTH)
    (cache / "snapshots" / commit / "modules.json").unlink()
    with pytest.warns(UserWarning, match="cannot tell whether someone/some-encoder is a sentence-transformers model"):
        assert sentence_folder(name) is None
    with warnings.catch_warnings():  # there is no such model, and opening it raises
        warnings.simplefilter("error")
        assert sentence_folder("someone/another") is None


@pytest.mark.parametrize(
    ("modules", "wrong"),
    [
        ('[{"path": "../secret", "type": "sentence_transformers.models.Pooling"}]', "leads out of the folder"),
        ('[{"path": "/etc", "type": "sentence_transformers.models.Pooling"}]', "leads out of the folder"),
        ('[{"path": "C:\\\\x", "type": "sentence_transformers.models.Pooling"}]', "leads out of the folder"),
        ('[{"path": "", "type": "custom_st.Transformer"}]', "'custom_st.Transformer' is code of that folder"),
        ('[{"path": "9_Gone", "type": "sentence_transformers.models.Dense"}]', "9_Gone, which is missing"),
        (
            '[{"path": "", "type": "sentence_transformers.models.Transformer"},'
            ' {"path": "", "type": "sentence_transformers.models.Pooling"}]',
            "a folder of its own",
        ),
        ('{"path": ""}', "expected a JSON list, got dict"),
        ("[" * 100_000, "nested too deeply"),
        ('[{"type": "sentence_transformers.models.Pooling"}]', "must be a list of modules"),
        ("[]", "must be a list of modules"),
        ("no json", "is damaged"),
    ],
)
def test_a_modules_file_that_cannot_be_copied_is_refused(tmp_path, modules, wrong):
    folder = Path(sentence_models.save(tmp_path / "model"))
    (folder / "modules.json").write_text(modules)
    done = locant_command("swap", folder, "alibi", "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert wrong in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["secret", "folder"])
def test_links_out_of_the_model_are_not_copied(tmp_path, name):
    folder = Path(sentence_models.save(tmp_path / "model"))
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "folder").mkdir()
    (folder / "1_Pooling" / "link").symlink_to(tmp_path / name)
    done = locant_command("swap", folder, "alibi", "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert f"is a link to {tmp_path / name}" in done.stderr
    assert not (tmp_path / "out" / "modules.json").exists()
