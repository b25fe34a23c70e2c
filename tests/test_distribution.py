"""Wheel and sdist: what is in them, and that README's snippets run from the wheel in a fresh environment."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from tests import bert
from tests.test_project import ROOT, python_blocks

SOURCE = ROOT / "src"
BINARIES = "/usr/bin", "/bin", "/usr/local/bin"


def run(*command, **options):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300, check=False, **options
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def build(kind: str, project: Path, out: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", out, cwd=project)
    return next(out.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling is not installed; returns with the extra 'test'")
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def members(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("locant/")}


def test_the_wheel_holds_every_file_of_the_package_and_nothing_compiled(wheel):
    there = {
        path.relative_to(SOURCE).as_posix()
        for path in (SOURCE / "locant").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert members(wheel) == there
    assert {"locant/attention/fused.c", "locant/report/page.css", "locant/report/page.js", "locant/py.typed"} <= there
    assert wheel.name.endswith("-py3-none-any.whl")  # no compiler is needed to install it


def test_the_sdist_builds_the_same_wheel(wheel, tmp_path):
    sdist = build("sdist", ROOT, tmp_path / "sdist")
    assert sdist.stat().st_size < 2**21
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    again = build("wheel", next((tmp_path / "unpacked").iterdir()), tmp_path / "again")
    assert members(again) == members(wheel)
    for name in members(wheel):
        assert zipfile.ZipFile(again).read(name) == zipfile.ZipFile(wheel).read(name)


@pytest.fixture(scope="module")
def fresh(wheel, tmp_path_factory) -> Path:
    """Returns the Python of a new environment with the wheel. It borrows the packages that locant needs from ours.

    A path in a .pth file is searched last, and .pth files in it are ignored: locant comes from the wheel, also if our
    own environment has an editable one.
    """
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", folder)  # our pip installs into it
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    paths = {sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))}
    (site / "borrowed.pth").write_text("\n".join(sorted(paths)) + "\n")
    return python


def surroundings(cache: Path, **changes: str) -> dict[str, str]:
    cache.mkdir(mode=0o700, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LOCANT_FUSED", "CC")}
    return {**kept, "LOCANT_CACHE": str(cache), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **changes}


def readme_swap() -> str:
    """Returns README's second snippet."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Swap")[2].partition("## ")[0]
    return "\n".join(line[4:] for line in section.splitlines() if line.startswith("    "))


WHERE = """
import sys
from pathlib import Path
import locant
assert Path(locant.__file__).is_relative_to(sys.prefix), locant.__file__
"""


@pytest.mark.slow
def test_the_snippets_of_the_readme_run_from_the_wheel(fresh, tmp_path):
    """The hub cannot be reached here, so a tiny BERT in a folder stands for bert-base-uncased."""
    bert.save(tmp_path / "tiny")
    first, second = python_blocks(ROOT / "README.md")[0], readme_swap()
    assert second.count('"bert-base-uncased"') == 1
    second = second.replace('"bert-base-uncased"', '"tiny"')
    text = 'text = "the cat sat on the mat. the dog saw the cat. " * 200\n'
    (tmp_path / "snippets.py").write_text(WHERE + first + text + second, encoding="utf-8")
    run(fresh, "-W", "ignore", "snippets.py", cwd=tmp_path, env=surroundings(tmp_path / "cache"))
    assert (tmp_path / "new" / "config.json").exists()
    if any(Path(folder, "cc").exists() for folder in BINARIES):
        assert list((tmp_path / "cache").glob("fused-*.so")), "the first use builds the kernel"


@pytest.mark.slow
def test_the_wheel_works_without_a_compiler(fresh, tmp_path):
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    (tmp_path / "snippet.py").write_text(WHERE + python_blocks(ROOT / "README.md")[0], encoding="utf-8")
    env = surroundings(tmp_path / "cache", PATH=str(nothing))
    run(fresh, "snippet.py", cwd=tmp_path, env=env)
    said = run(fresh.with_name("locant"), "doctor", cwd=tmp_path, env=env)
    assert "no C compiler was found" in said
    assert not list((tmp_path / "cache").glob("*.so"))


def test_the_workflow_runs_what_the_makefile_has_on_every_python():
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    jobs = workflow["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.10", "3.11", "3.12", "3.13"]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    called = {name for command in commands for name in re.findall(r"^make ([\w-]+)", command, re.MULTILINE)}
    assert called == {"test", "slow", "docs", "dist"}
    assert called <= set(targets)
