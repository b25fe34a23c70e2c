"""Things about the project as a whole: imports, and that the documents tell the truth."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import locant

ROOT = Path(__file__).parent.parent
HEAVY = ["transformers", "datasets", "matplotlib", "plotext", "typer", "rich", "pandas", "scipy", "sklearn"]


def test_importing_locant_loads_torch_and_nothing_heavier():
    code = (
        f"import locant, sys; print([m for m in {HEAVY} if m in sys.modules], 'torch' in sys.modules)\n"
        "from locant.analysis import behaviour, curve, invariance, properties, speed, text, variance\n"
        "assert 'transformers' not in sys.modules, 'analyses of schemes, tables and theory need torch alone'"
    )
    # Torch itself imports whatever is installed of a few of these; what matters is what locant adds to it.
    torch_alone = f"import torch, sys; print([m for m in {HEAVY} if m in sys.modules], True)"
    ours, theirs = (
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
        for text in (code, torch_alone)
    )
    assert ours == theirs
    assert "transformers" not in ours
    assert "matplotlib" not in ours


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITHOUT_PYTHON = {"glossary.md", "log.md", "performance.md"}


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if path.name not in WITHOUT_PYTHON], ids=lambda path: path.name
)
def test_the_python_in_the_documents_runs(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    schemes = dict(locant.SCHEMES)
    names: dict = {}
    try:
        for block in python_blocks(path):
            exec(compile(block, str(path), "exec"), names)
    finally:  # what a document adds to the schemes is not there for the next test
        locant.SCHEMES.clear()
        locant.SCHEMES.update(schemes)
    assert "locant" in names


def test_links_between_documents_lead_somewhere():
    others = [ROOT / name for name in ("CONTRIBUTING.md", "DESIGN.md", "CHANGELOG.md", "docs/results/README.md")]
    for path in [*DOCUMENTS, *others]:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
