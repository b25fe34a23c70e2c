"""The project as a whole: imports, and that the code and the links in the documents work."""

import pickle
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import locant

ROOT = Path(__file__).parent.parent
HEAVY = ["transformers", "datasets", "matplotlib", "plotext", "typer", "rich", "pandas", "scipy", "sklearn"]


IMPORTS = f"""
import sys
import locant
slow = ["torch", *{HEAVY}]
assert not [name for name in slow if name in sys.modules], "import locant"
import torch  # which imports some of the packages itself, if they are installed
before = set(sys.modules)
assert locant.attend and locant.scheme("tisa", n_heads=2) and locant.testing.check_scheme
added = set(sys.modules) - before
assert not [name for name in slow if name in added], "locant.attend"
from locant.analysis import behaviour, curve, invariance, properties, speed, text, variance
assert "transformers" not in sys.modules, "analyses of schemes, tables and theory need torch alone"
"""


def test_importing_locant_loads_nothing_and_using_it_loads_torch_and_nothing_heavier():
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


def test_the_names_of_locant_are_listed_and_have_help():
    assert set(locant.__all__) <= set(dir(locant))
    public = {name for name in dir(locant) if not name.startswith("__")}
    assert public == {*locant.__all__, "attention", "imports", "schemes", "spec", "terms"}
    assert {"SCHEMES", "Scheme", "Tisa"} <= set(dir(locant.schemes))
    text = pydoc.plain(pydoc.render_doc(locant))
    for part in ("attend(", "class Scheme(", "swap(", "adapt("):
        assert part in text
    with pytest.raises(AttributeError, match="module 'locant' has no attribute 'atend'"):
        locant.atend  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'locant.schemes' has no attribute 'Tysa'"):
        locant.schemes.Tysa  # noqa: B018


def test_help_is_there_without_transformers(monkeypatch):
    monkeypatch.setattr(locant, "find_spec", lambda name: None)
    for name in ("load", "native", "swap", "adapt", "fit"):
        monkeypatch.delitem(vars(locant), name, raising=False)
    assert not {"load", "swap", "adapt"} & set(dir(locant))
    assert {"attend", "scheme"} <= set(dir(locant))


def test_every_scheme_is_found_by_its_class_and_by_its_name():
    for name, location in locant.schemes.CLASSES.items():
        cls = getattr(locant.schemes, location.split(".")[1])
        assert locant.SCHEMES[name] is cls
        assert cls.__module__ == f"locant.schemes.{location.split('.')[0]}"
        assert pickle.loads(pickle.dumps(cls)) is cls
    assert locant.schemes.names() == list(locant.SCHEMES)
    assert locant.schemes.map_names() == list(locant.schemes.MAPS) == list(locant.schemes.MAP_CLASSES)
    for name, location in locant.schemes.MAP_CLASSES.items():
        assert locant.schemes.class_of(name) is getattr(locant.schemes, location.split(".")[1])
    assert not set(locant.SCHEMES) & set(locant.schemes.MAPS)


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITHOUT_PYTHON = {"census.md", "glossary.md", "gpu.md", "log.md", "performance.md", "reliability.md"}


SLOW = {"export.md"}  # it writes ONNX


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.slow if path.name in SLOW else ())
        for path in DOCUMENTS
        if path.name not in WITHOUT_PYTHON
    ],
    ids=lambda path: path.name,
)
def test_the_python_in_the_documents_runs(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    schemes, maps = dict(locant.SCHEMES), dict(locant.schemes.MAPS)
    names: dict = {}
    try:
        for block in python_blocks(path):
            exec(compile(block, str(path), "exec"), names)
    finally:  # what a document adds to the schemes is not there for the next test
        locant.SCHEMES.clear()
        locant.SCHEMES.update(schemes)
        locant.schemes.MAPS.clear()
        locant.schemes.MAPS.update(maps)
    assert "locant" in names


def test_links_between_documents_lead_somewhere():
    others = [
        ROOT / name
        for name in ("CONTRIBUTING.md", "DESIGN.md", "CHANGELOG.md", "SECURITY.md", "docs/results/README.md")
    ]
    for path in [*DOCUMENTS, *others]:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
