"""SECURITY.md: no network unless a hub name is given, no code from a folder, and every line has a test that exists."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModel

import locant
from tests.command_line import locant_command
from tests.hf_models import make

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "locant"

WITHOUT_NETWORK = """
import importlib, pkgutil, socket, sys
from pathlib import Path

asked = []

def refuse(*args, **kwargs):
    asked.append(args)
    raise OSError("no network in this test")

def connect(self, address):
    return refuse(address) if self.family in (socket.AF_INET, socket.AF_INET6) else plain(self, address)

plain, socket.socket.connect = socket.socket.connect, connect
socket.getaddrinfo = socket.gethostbyname = refuse

import locant

for module in pkgutil.walk_packages(locant.__path__, "locant."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as problem:
        assert problem.name == "triton", problem  # the only optional package that `make test` does not install

import torch
from transformers import AutoModel
from tests.command_line import locant_command
from tests.hf_models import make

folder = Path(sys.argv[1])
q = torch.randn(1, 4, 5, 8)
locant.attend(q, q, q, locant.scheme("tisa", n_heads=4, head_dim=8))
model = make("bert")
model.save_pretrained(folder / "plain")
locant.swap(model, "alibi").save_pretrained(folder / "swapped")
locant.native(locant.load(folder / "plain"))
locant.load(str(folder / "swapped"))
AutoModel.from_pretrained(folder / "swapped")
done = locant_command("swap", folder / "plain", "tisa", "-o", folder / "again")
assert done.exit_code == 0, done.output
for name in ("./none", "/none", "~/none", "a/b/c", Path("none")):
    try:
        locant.load(name)
    except ValueError as problem:
        assert "there is no folder" in str(problem), problem
    else:
        raise AssertionError(name)
assert asked == [], asked
try:
    locant.load("owner/model")
except OSError:
    pass
assert asked, "this test does not see the network"
"""


@pytest.mark.slow
def test_no_network_unless_a_hub_name_is_given(tmp_path):
    """Imports every module and uses local folders with sockets that refuse; a hub name shows that they would."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment.pop("HF_HUB_OFFLINE", None)
    environment["HF_HOME"] = str(tmp_path / "home")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NETWORK, str(tmp_path)], env=environment, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def calls():
    """Every call in src: (where, the function as it is written, its keyword arguments)."""
    return [
        (f"{path.name}:{node.lineno}", ast.unparse(node.func), {x.arg: ast.unparse(x.value) for x in node.keywords})
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


def test_every_call_of_transformers_forbids_remote_code(calls):
    """Without the argument transformers asks at the terminal; an answer of "y" would run the code."""
    found = [(where, given) for where, called, given in calls if called.endswith(".from_pretrained")]
    assert len(found) >= 6
    assert [where for where, given in found if given.get("trust_remote_code") != "False"] == []


def test_pickles_are_opened_as_tensors_alone(calls):
    """These run code: torch.load without weights_only, pickle, yaml, eval and exec."""
    assert {given.get("weights_only") for _, called, given in calls if called == "torch.load"} == {"True"}
    forbidden = {"eval", "exec", "pickle.load", "pickle.loads", "pickle.Unpickler", "yaml.load", "marshal.loads"}
    assert [where for where, called, _ in calls if called in forbidden] == []
    assert "json.loads" in {called for _, called, _ in calls}


EVIL = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
class Config(BertConfig):
    model_type = "evil"
class Model(BertModel):
    config_class = Config
class Words(PreTrainedTokenizerFast):
    pass
def generate(model, **kwargs):
    pass
"""
CODE = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForCausalLM": "evil.Model"}


@pytest.fixture
def evil(tmp_path):
    """A function that puts code into a folder, and the file that the code would write."""
    marker = tmp_path / "was-run"

    def plant(folder, **changes):
        for place in ("evil.py", "custom_generate/generate.py"):
            (folder / place).parent.mkdir(exist_ok=True)
            (folder / place).write_text(EVIL.format(marker=str(marker)))
        (folder / "custom_generate" / "requirements.txt").touch()
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "Words", "auto_map": {"AutoTokenizer": ["evil.Words", "evil.Words"]}})
        )
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "auto_map": CODE, **changes}))
        return folder

    return plant, marker


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_code_in_a_folder_is_never_run(kind, evil, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # the answer that would run it
    plant, marker = evil
    make(kind).save_pretrained(tmp_path / "plain")
    locant.swap(make(kind), "alibi").save_pretrained(tmp_path / "swapped")
    locant.load(plant(tmp_path / "plain"))
    locant.load(plant(tmp_path / "swapped"))
    AutoModel.from_pretrained(tmp_path / "swapped")
    config = json.loads((tmp_path / "swapped" / "config.json").read_text())
    arguments = {"trust_remote_code": True, "weights_only": False, "use_kernels": True, "layers": 1}
    (tmp_path / "swapped" / "config.json").write_text(json.dumps({**config, **arguments}))
    assert len(AutoModel.from_pretrained(tmp_path / "swapped", num_labels=7).config.id2label) == 7
    assert locant_command("swap", tmp_path / "plain", "tisa", "-o", tmp_path / "out").exit_code == 0
    with pytest.raises(ValueError, match="custom code"):
        locant.load(plant(tmp_path / "plain", model_type="evil"))
    with pytest.raises(ValueError, match="never runs code"):
        locant.load(tmp_path / "plain", trust_remote_code=True)
    assert not marker.exists()


def test_a_folder_that_names_code_does_not_run_it(evil, tmp_path):
    """Neither the module that a plan names is imported, nor a file of that name in the folder."""
    plant, marker = evil
    locant.swap(make("gpt2"), "alibi").save_pretrained(tmp_path / "swapped")
    plant(tmp_path / "swapped")
    config = json.loads((tmp_path / "swapped" / "config.json").read_text())
    plan = config["locant"]["locant"]
    for layer in plan["stacks"][0]["layers"]:
        layer["scheme"] = "mine"
    for code in ("evil.py", "evil", "../evil.py", str(tmp_path / "swapped" / "evil.py")):
        plan["imports"] = {"mine": {"code": code, "sha256": ""}}
        (tmp_path / "swapped" / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="runs no code of a folder by itself"):
            locant.load(tmp_path / "swapped")
    for wrong in ({"mine": 3}, {"mine": {"code": 3}}, []):
        plan["imports"] = wrong
        (tmp_path / "swapped" / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="imports of the plan"):
            locant.load(tmp_path / "swapped")
    assert not marker.exists()


def test_every_line_of_the_security_page_has_a_test():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) >= 20
    for file, test in named:
        defined = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")}
        assert test in defined, f"{file} has no {test}"
    heads = [line for line in rows if line.endswith("| test |")]
    without = [line for line in rows if line not in heads and "::" not in line]
    assert heads
    assert without == []
