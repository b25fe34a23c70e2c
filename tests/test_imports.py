"""Schemes of the user's own: imported by name, remembered by folders, never run by a folder alone."""

import json
import shutil
import sys

import pytest
import torch

import locant
from locant import imports
from locant.experiments import comparison
from locant.runs.budget import Budget
from tests.command_line import locant_command
from tests.hf_models import inputs, make, output

CODE = """
from pathlib import Path
import torch
import locant
from locant import Terms
from locant.schemes.base import wide

Path({marker!r}).touch()

class Cauchy(locant.Scheme):
    def __init__(self, *, start: float = 8.0, n_heads: int) -> None:
        super().__init__()
        self.start, self.n_heads = start, n_heads
        self.width = torch.nn.Parameter(torch.full((n_heads,), start))

    def terms(self, r):
        return Terms(bias=-torch.log1p((r / wide(self.width)[:, None]) ** 2))

    def parameter_count(self):
        return self.n_heads
"""
TINY = "quick:length=16,longest=1,batch=4,layers=1,width=16,heads=2,vocabulary=300,evaluated=64"


@pytest.fixture
def forget():
    """A function that forgets all imported code, as a new process would; also called at the end."""
    schemes, loaded, path = dict(locant.SCHEMES), dict(imports._LOADED), list(sys.path)
    maps = dict(locant.schemes.MAPS)

    def all_of_it():
        for name in imports._LOADED.keys() - loaded.keys():
            sys.modules.pop(name, None)
        imports._LOADED.clear()
        imports._LOADED.update(loaded)
        locant.SCHEMES.clear()
        locant.SCHEMES.update(schemes)
        locant.schemes.MAPS.clear()
        locant.schemes.MAPS.update(maps)
        assert sys.path == path

    yield all_of_it
    all_of_it()


@pytest.fixture
def mine(tmp_path, forget, monkeypatch):
    """A file with a scheme, in the current folder, and the file that it writes when it is run."""
    marker = tmp_path / "was-run"
    (tmp_path / "my_schemes.py").write_text(CODE.format(marker=str(marker)))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "my_schemes.py", marker


def test_files_and_modules_by_name(mine, forget):
    path, _ = mine
    (code,) = imports.load(path)
    assert (code.name, code.stem) == ("my_schemes.py", "my_schemes")
    assert str(locant.scheme("cauchy:start=4+rope", n_heads=2, head_dim=8)) == "cauchy:start=4+rope"
    assert imports.load([str(path)]) == (code,)  # once
    shutil.copy(path, path.with_name("copy.py"))
    forget()
    assert imports.expanded("rope+my_schemes:Cauchy:start=4,nope") == "rope+cauchy:start=4,nope"
    assert imports.needed(["native+cauchy"])["cauchy"].source == "my_schemes"
    assert imports.expanded("tisa:kernels=5+learned:length=512,huang4:clip=64,heads=own") == (
        "tisa:kernels=5+learned:length=512,huang4:clip=64,heads=own"
    )


MAP = """
from locant.schemes import Map

class Halved(Map):
    monotone = True

    def __init__(self, scheme, *, by: int = 2):
        super().__init__(scheme)
        self.by = by

    def positions(self, pos):
        return pos // self.by
"""


def test_maps_of_your_own(mine, forget):
    path, _ = mine
    path.write_text(MAP)
    imports.load(path)
    assert "halved" in locant.schemes.MAPS
    assert "halved" not in locant.SCHEMES
    spec = "tisa@halved:by=3+rope@grouped"
    assert str(locant.scheme(spec, n_heads=4, head_dim=8)) == spec
    assert imports.needed([spec, "rope/nope@halved"]).keys() == {"halved"}
    model = locant.swap(make("bert"), spec)
    model.save_pretrained(path.parent / "model")
    assert (path.parent / "model" / "my_schemes.py").read_text() == MAP
    before = output(model, **inputs("bert"))
    forget()
    with pytest.raises(ValueError, match=r"uses the scheme 'halved' of 'my_schemes\.py'"):
        locant.load(path.parent / "model")
    again = locant.load(path.parent / "model", imports=path.parent / "model" / "my_schemes.py").eval()
    assert torch.equal(output(again, **inputs("bert")), before)
    forget()
    assert imports.expanded("rope@my_schemes:Halved:by=3@grouped:size=2") == "rope@halved:by=3@grouped:size=2"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import locant\nclass Alibi(locant.Scheme): pass", "alibi is already a scheme .* rename it"),
        ("from locant.schemes import Map\nclass Grouped(Map): pass", "grouped is already a scheme or map .* rename it"),
        ("1 / 0", "my_schemes.py could not be imported: ZeroDivisionError"),
    ],
)
def test_code_that_cannot_be_imported_is_named(mine, content, message):
    path, _ = mine
    path.write_text(content)
    before = locant.SCHEMES["alibi"]
    with pytest.raises(ImportError, match=message):
        imports.load(path)
    assert locant.SCHEMES["alibi"] is before
    done = locant_command("check", "cauchy", "--import", path)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "could not be imported" in done.stderr


def test_mistakes_in_references(mine, forget):
    for spec, message in (
        ("my_schemes:Nothing", "my_schemes has no 'Nothing'"),
        ("no_such_module:Cauchy", "no_such_module could not be imported: ModuleNotFoundError"),
        ("my_schemes:torch", "must be a subclass of locant.Scheme"),
        ("rope:base", "write options as name=value"),  # rope is a scheme; no module of that name is imported
    ):
        done = locant_command("check", spec)
        assert done.exit_code == 2, spec
        assert message in done.stderr


def test_a_spec_alone_never_imports(mine):
    _, marker = mine
    with pytest.raises(ValueError, match="write options as name=value"):
        locant.scheme("my_schemes:Cauchy", n_heads=2)
    assert not marker.exists()


def test_commands_take_it_before_or_after_the_spec(mine, forget):
    for words in (["cauchy", "--import", "my_schemes.py"], ["--import=my_schemes.py", "cauchy:start=3"],
                  ["my_schemes:Cauchy:start=2"]):  # fmt: skip
        done = locant_command("check", *words)
        assert done.exit_code == 0, done.output
        forget()
    assert "unknown scheme 'cauchy'" in locant_command("check", "cauchy").stderr


def test_a_saved_model_asks_for_its_code_and_never_runs_it(mine, forget, tmp_path, recwarn):
    path, marker = mine
    make("gpt2").save_pretrained(tmp_path / "plain")
    assert locant_command("swap", "plain", "cauchy:start=4", "--import", path, "-o", "new").exit_code == 0
    swapped = locant.load(tmp_path / "new")
    forget()
    marker.unlink()
    copy = tmp_path / "new" / "my_schemes.py"
    assert copy.read_bytes() == path.read_bytes()
    path.unlink()
    with pytest.raises(ValueError, match="runs no code of a folder by itself") as refused:
        locant.load(tmp_path / "new")
    assert str(refused.value).endswith(f"imports={str(copy)!r}")
    done = locant_command("inspect", tmp_path / "new", "-o", tmp_path / "page.html")
    assert f"--import {copy}" in done.stderr
    assert not marker.exists()
    opened = locant.load(tmp_path / "new", imports=copy)
    assert marker.exists()
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(opened(ids)[0], swapped(ids)[0])
    assert str(tmp_path) not in (tmp_path / "new" / "config.json").read_text()
    forget()
    changed = tmp_path / "other" / "my_schemes.py"
    changed.parent.mkdir()
    changed.write_text(copy.read_text() + "# another version\n")
    with pytest.warns(UserWarning, match="another version of"):
        locant.load(tmp_path / "new", imports=changed)


def begin(out, text, schemes=("nope", "cauchy")):
    return comparison.begin(out, task="clm", schemes=list(schemes), data=str(text), model=None, seeds=[0],
                            budget=Budget(steps=2), preset=TINY, calibrate=lambda *_: 1.0)  # fmt: skip


def test_a_comparison_is_continued_with_the_same_code_alone(mine, forget, tmp_path):
    path, marker = mine
    (tmp_path / "text.txt").write_text("one two three four five, once I caught a fish alive\n" * 100)
    out = tmp_path / "out"
    imports.load(path)
    assert begin(out, "text.txt").work.imports == ("my_schemes.py",)
    copy = out / "imports" / "my_schemes.py"
    assert copy.read_bytes() == path.read_bytes()
    forget()
    marker.unlink()
    with pytest.raises(ValueError, match=f"pass imports='{copy}'"):
        begin(out, "text.txt", ["nope"])  # a folder of somebody else, with a scheme that everybody has
    assert not marker.exists()
    imports.load(path)
    assert begin(out, "text.txt").schemes == ("nope", "cauchy")
    path.write_text(path.read_text() + "# changed\n")
    imports.load(path)
    with pytest.raises(ValueError, match=r"my_schemes.py has changed since this comparison began"):
        begin(out, "text.txt")
    stored = json.loads((out / "comparison.json").read_text())
    (out / "comparison.json").write_text(json.dumps({**stored, "work": {**stored["work"], "imports": ["../x.py"]}}))
    with pytest.raises(ValueError, match="imports must be a list of names"):
        comparison.open_folder(out)


def test_a_scheme_of_this_process_alone_cannot_be_compared(mine, forget, tmp_path):
    imports.load(mine[0])
    cls = locant.SCHEMES["cauchy"]
    forget()
    locant.SCHEMES["cauchy"] = cls
    with pytest.raises(ValueError, match="known to this process alone"):
        locant.compare("clm", "nope,cauchy", out=tmp_path / "out")


def test_a_scheme_in_a_file_without_a_docstring_is_described_by_its_class(tmp_path, forget):
    path = tmp_path / "plain.py"
    path.write_text('from locant import Scheme\n\n\nclass Bare(Scheme):\n    """Adds nothing."""\n')
    result = locant_command("schemes", "bare", "--import", str(path))
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Adds nothing.")
    assert "None" not in result.output
