"""The documentation site, without mkdocs: its pages, its reference and its notebooks."""

import ast
import importlib
import json
import re
from pathlib import Path

import pytest
import yaml

import locant
from tests.test_project import DOCUMENTS, ROOT, python_blocks

DOCS = ROOT / "docs"
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
OUTSIDE = {"index.md", "design.md", "contributing.md", "changelog.md", "security.md"}
"""Pages that docs/site/repository.py makes of files outside docs/."""


def listed(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in listed(entry)]


def test_the_site_lists_every_page_once():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - set(CONFIG["not_in_nav"].split())
    notebooks = {path.relative_to(DOCS).with_suffix(".md").as_posix() for path in NOTEBOOKS}
    assert sorted(listed(CONFIG["nav"])) == sorted(pages | notebooks | OUTSIDE)


def test_the_site_asks_other_hosts_for_nothing():
    assert CONFIG["theme"]["font"] is False
    assert not re.findall(r"https?://", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert not re.findall(r"https?://|@import", (DOCS / "site" / "site.css").read_text(encoding="utf-8"))


def directives() -> list[str]:
    pages = sorted((DOCS / "reference").glob("*.md"))
    return [
        name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]


def found(name: str):
    """Returns what a dotted name stands for."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise AttributeError(name)


def in_reference(name: str) -> bool:
    """Whether a name has an entry, or its module or class has one that includes it."""
    parts = name.split(".")
    entries = set(directives())
    return any(".".join(parts[:end]) in entries for end in range(2, len(parts) + 1))


def test_the_reference_has_every_public_name_once():
    entries = directives()
    assert len(entries) == len(set(entries))
    assert {f"locant.{name}" for name in locant.__all__} <= set(entries)
    locations = [*locant.schemes.CLASSES.values(), *locant.schemes.MAP_CLASSES.values()]
    files = {location.partition(".")[0] for location in locations}
    assert {f"locant.schemes.{name}" for name in files} <= set(entries)


@pytest.mark.parametrize("name", directives())
def test_the_entries_of_the_reference_exist(name):
    assert found(name) is not None


def imported(block: str) -> set[str]:
    """Returns the dotted names that a block of Python imports from locant."""
    names = set()
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("locant"):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_the_reference_has_what_the_documents_use():
    used = {name for path in DOCUMENTS for block in python_blocks(path) for name in imported(block)}
    for path in NOTEBOOKS:
        used |= {name for cell in code_cells(path) for name in imported(cell)}
    for path in DOCUMENTS:
        used |= set(re.findall(r"`(locant\.[a-z]\w*(?:\.\w+)+)[`(]", path.read_text(encoding="utf-8")))
    assert len(used) > 15
    assert {name for name in used if not in_reference(name)} == set()


def code_cells(path: Path) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    for cell in notebook["cells"]:
        assert cell["id"]
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(path)):
        exec(compile(cell, f"{path.name}, code cell {number}", "exec"), names)
    assert capsys.readouterr().out


def anchors(path: Path) -> set[str]:
    """Returns the anchors that GitHub, and the site, give to the headings of a document."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ +(.+)$", text, flags=re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().strip() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def test_anchors_of_links_exist():
    others = ["CONTRIBUTING.md", "DESIGN.md", "CHANGELOG.md", "SECURITY.md", "docs/results/README.md"]
    seen = 0
    for path in [*DOCUMENTS, *(ROOT / name for name in others), *(DOCS / "reference").glob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", path.read_text(encoding="utf-8")):
            leads_to = path.parent / target if target else path
            assert anchor in anchors(leads_to), f"{path.name} links to {target}#{anchor}"
            seen += 1
    assert seen > 20


def test_links_of_the_reference_and_the_notebooks_lead_somewhere():
    texts = {path: path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md")}
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts[path] = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for path, text in texts.items():
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
