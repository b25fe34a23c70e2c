"""The folder of a swapped model, opened by transformers and sentence-transformers: with locant, and without."""

import json
import os
import subprocess
import sys

import pytest

import locant
from locant.adaptation.card import card
from locant.hf import WordOrderWarning
from locant.hf.checkpoint import hub_name
from tests import bert, hf_models, sentence_models
from tests.adaptations import adapted
from tests.command_line import locant_command

OPEN = """
import sys

folder = sys.argv[1]
ways = {
    "AutoConfig": lambda **more: AutoConfig.from_pretrained(folder, **more),
    "AutoModel": lambda **more: AutoModel.from_pretrained(folder, **more),
    "AutoModelForMaskedLM": lambda **more: AutoModelForMaskedLM.from_pretrained(folder, **more),
    "pipeline": lambda **more: pipeline("feature-extraction", folder, device="cpu", **more),
    "SentenceTransformer": lambda **more: SentenceTransformer(folder, device="cpu", **more),
}

def everything_opens():
    for way in ways.values():
        way()
    model = SentenceTransformer(folder, device="cpu")
    assert [type(module).__name__ for module in model] == ["Transformer", "Pooling", "Normalize"]
    assert model.encode(["a cat " * 100]).shape == (1, 16)
    assert model.max_seq_length > 10_000
    assert "alibi" in str(locant.native(model[0].model))
"""
IMPORTS = """
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoTokenizer, BertModel, pipeline
"""
WITHOUT = """
def message(call, **more):
    try:
        call(**more)
    except Exception as problem:
        return str(problem)
    raise AssertionError("opened without locant")

assert "locant" not in sys.modules
for name, way in ways.items():
    for trusted in ({}, {"trust_remote_code": True}):
        found = message(way, **trusted)
        assert "pip install 'locant[hf]'" in found and "locant.load" in found, (name, trusted, found)
found = message(lambda: BertModel.from_pretrained(folder))
assert "pip install 'locant[hf]'" in found and "locant.load, or with AutoModel after `import locant`" in found, found
AutoTokenizer.from_pretrained(folder)
assert "locant" not in sys.modules
"""
FIRST = """
import sys
import locant

assert "torch" not in sys.modules
from transformers import AutoModel

assert "locant.hf" not in sys.modules
assert "alibi" in str(locant.native(AutoModel.from_pretrained(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("opening")
    model = sentence_models.save(place / "model")
    assert locant_command("swap", model, "alibi", "-o", place / "new").exit_code == 0
    return place / "new"


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        OPEN + IMPORTS + WITHOUT + "import locant\neverything_opens()",
        FIRST,
    ],
    ids=["import transformers first", "import locant first"],
)
def test_a_folder_needs_locant_and_says_so(folder, script):
    """Without locant every error names it; after `import locant`, whenever that is, everything opens."""
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=200,
        stdin=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_no_code_is_in_the_folder(folder):
    assert not list(folder.rglob("*.py"))
    config = json.loads((folder / "config.json").read_text())
    place, _, name = config["auto_map"]["AutoConfig"].partition("--")
    assert " " in place  # no repository can have this name
    assert name


def test_transformers_4_does_not_hinder_an_import(monkeypatch):
    from locant import registering

    monkeypatch.setitem(sys.modules, "locant.transformers_config", None)
    registering._register(None)


def test_cards_have_the_install_line_and_no_local_path(tmp_path):
    path = bert.save(tmp_path / "model")
    with pytest.warns(WordOrderWarning):
        locant.swap(locant.load(path), "alibi").save_pretrained(tmp_path / "swapped")
    adapted(locant.load(path), "alibi", budget="1steps", out=tmp_path / "adapted")
    sentences = sentence_models.save(tmp_path / "sentences")
    done = adapted(
        locant.load(sentences), "alibi", budget="1steps", tokenizer=bert.tokenizer(), out=tmp_path / "vectors"
    )
    for name in ("swapped", "adapted", "vectors"):
        text = (tmp_path / name / "README.md").read_text()
        assert "pip install 'locant[hf]'" in text, name
        assert "import locant  # before transformers opens the folder" in text
        assert "base_model" not in text
        assert str(tmp_path) not in text
    assert "SentenceTransformer(" in text
    assert "modules.json of sentences" in text
    settings = {**json.loads((tmp_path / "vectors" / "adapt.json").read_text()), "model": "owner/model"}
    assert "\nbase_model: owner/model\n" in card(done, settings, [])


def test_a_card_names_an_original_of_the_hub(tmp_path):
    model = hf_models.make("bert")
    model.config._name_or_path = "owner/model"
    model.name_or_path = "owner/model"
    with pytest.warns(WordOrderWarning):
        locant.swap(model, "alibi").save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "\nbase_model: owner/model\n" in text
    assert "locant adapt owner/model alibi" in text


def test_hub_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bert").mkdir()
    assert hub_name("owner/model") == "owner/model"
    assert hub_name("gpt2") == "gpt2"
    for local in ("bert", "./bert", str(tmp_path / "bert"), "~/bert", "a/b/c", "", None):
        assert hub_name(local) is None
