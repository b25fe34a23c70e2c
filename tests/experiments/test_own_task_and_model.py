"""docs/own-task.md and docs/own-model.md: their files, saved and compared as the pages say."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import locant
from locant import imports
from locant.experiments import arms, comparison, own_model
from locant.experiments.presets import SCRATCH
from locant.experiments.run import execute
from locant.experiments.tasks import find_task
from locant.runs.budget import Budget
from locant.verbs.comparing import ComparisonResult

DOCS = Path(__file__).parent.parent.parent / "docs"
TINY = "quick:length=16,longest=2,batch=4,layers=2,width=16,heads=2,evaluated=64"


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A function that saves the code of a page to a file in the current folder; imports are forgotten at the end."""
    loaded, schemes = dict(imports._LOADED), dict(locant.SCHEMES)
    monkeypatch.chdir(tmp_path)

    def save(name, file):
        (code,) = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), flags=re.DOTALL)
        Path(file).write_text(code, encoding="utf-8")
        return file

    yield save
    imports._LOADED.clear()
    imports._LOADED.update(loaded)
    locant.SCHEMES.clear()
    locant.SCHEMES.update(schemes)


def compared(task, schemes, model=None, data=None, preset=TINY):
    """The runs of a comparison in this process, which takes less time than processes of their own."""
    out = Path("out")
    found = comparison.begin(out, task=task, schemes=schemes, data=data, model=model, seeds=[0],
                             budget=Budget(steps=3), preset=preset, calibrate=lambda *_: 1.0)  # fmt: skip
    for run in comparison.pending(out, found):
        execute(run, comparison.where(out, run), out / comparison.DATA)
    return ComparisonResult(out)


def test_a_task_of_ones_own(page):
    with pytest.raises(ValueError, match=r"unknown task 'first'.* needs its file: imports='FILE.py'"):
        find_task("first")
    imports.load(page("own-task.md", "my_task.py"))
    found = compared("first", ["learned", "alibi"])
    assert {row["finished"] for row in found.table} == {1}
    scores = {row["scheme"]: row for row in found.table}
    assert 0 <= scores["alibi"]["score_at_32"] <= 1
    assert scores["learned"]["score_at_32"] is None  # its positions end
    assert all(row["test_noise"] is not None for row in found.table)
    assert found.comparison.work.imports == ("my_task.py",)


@pytest.mark.parametrize(("model", "schemes"), [("my_model:neox", ["native", "tisa"]),
                                                ("my_model:small", ["learned", "tisa"]),
                                                ("my_model:small", ["fox", "inkling:extent=8,width=2"])])  # fmt: skip
def test_a_model_of_ones_own(page, model, schemes):
    imports.load(page("own-model.md", "my_model.py"))
    found = compared("algo:copy", schemes, model=model)
    assert {row["finished"] for row in found.table} == {1}, found.runs
    assert found.comparison.work.imports == ("my_model.py",)
    losses = {run.run.scheme: run.steps[0]["loss"] for run in found.runs}
    assert len(set(losses.values())) == 2  # the schemes differ
    if model == "my_model:neox":
        assert "tisa" in str(locant.native(locant.load(Path("out/runs/tisa.s0"))))


def test_all_schemes_get_a_module_with_the_same_weights_and_native_is_refused(page):
    imports.load(page("own-model.md", "my_model.py"))
    task, preset = find_task("algo:copy"), SCRATCH["quick"]
    setting = comparison.Setting(preset, task.tokenizer(None, preset), Path())
    made = [arms.build(task, setting, "my_model:small", spec, 0) for spec in ("nope", "learned", "tisa")]
    for model in made[1:]:
        assert torch.equal(model.module.words.weight, made[0].module.words.weight)
    with pytest.raises(ValueError, match="has no native positions"):
        arms.check(task, setting, "my_model:small", "native")


def wanted(spec):
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return own_model.Wanted(SCRATCH["quick"], 7, 16, "AutoModelForCausalLM", tokens, {}, spec)


class Deaf(nn.Module):
    """Takes a scheme and ignores it."""

    def __init__(self, asked):
        super().__init__()
        self.schemes = asked.schemes(1, n_heads=2, head_dim=4, d_model=8)
        self.words = nn.Embedding(9, 7)

    def forward(self, ids, mask):
        return self.words(ids)


@pytest.mark.parametrize(
    ("spec", "message"),
    [("tisa", "attend is not called with the scheme of layer 1"), ("rope", "attend is not called"),
     ("learned:length=16", "is not added to the tokens"), ("fox", "attend is not called"),
     ("logn", "attend is not called with the scheme of layer 1")],
)  # fmt: skip
def test_a_module_that_ignores_its_scheme_is_refused(spec, message):
    asked = wanted(spec)
    with pytest.raises(ValueError, match=f"the module does not use .*{message}"):
        own_model.finish(Deaf(asked), asked)


def test_other_things_than_models_are_refused():
    with pytest.raises(ValueError, match=r"must return an nn\.Module, got int"):
        own_model.finish(3, wanted("nope"))
    with pytest.raises(ValueError, match="the module has no scheme"):
        own_model.finish(nn.Linear(2, 2), wanted("nope"))
