"""The build of the fused kernel: its cache, and the reasons for which there is no kernel."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import locant
from locant.attention import build

pytestmark = pytest.mark.skipif(
    build.build().library is None, reason=f"no kernel here: {build.build().why}; returns with a C compiler"
)


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env={**os.environ, **environment}
    )


@pytest.fixture
def rebuilt():
    """This process builds or loads the kernel again at its next use, and once more after the test."""
    build.build.cache_clear()
    yield
    build.build.cache_clear()


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"LOCANT_FUSED": "0"}, "switched off by LOCANT_FUSED=0"),
        ({"CC": "no-such-compiler"}, "no C compiler was found"),
        ({"CC": "false"}, "could not build it"),
        ({"CC": "true"}, "wrote nothing"),
        ({"CC": ' "'}, "no C compiler was found"),
    ],
)
@pytest.mark.usefixtures("rebuilt")
def test_without_a_compiler_everything_still_works(environment, why, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCANT_CACHE", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    q, k, v = (torch.randn(1, 4, 20, 8, requires_grad=True) for _ in range(3))
    for spec in ("tisa", "huang3", "huang4", "shaw"):
        locant.attend(q, k, v, locant.scheme(spec, n_heads=4, head_dim=8)).sum().backward()
    with pytest.raises(ValueError, match=why):
        locant.attend(q, k, v, impl="fused")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """A C compiler that compiles once, and copies the result when it is called again."""
    folder = tmp_path_factory.mktemp("compiler")
    script = folder / "cc"
    script.write_text(
        f"""#!/bin/sh
test "$1" = --version && exec {shlex.join(build.find_compiler())} --version
test -e {folder}/library || {shlex.join(build.find_compiler())} "$@" -o {folder}/library || exit 1
while test "$1" != -o; do shift; done
cp {folder}/library "$2"
"""
    )
    script.chmod(0o755)
    return str(script)


BUILD = f"""
import runpy
b = runpy.run_path({str(Path(build.__file__))!r})["build"]()
print(b.path, b.seconds, b.library is not None)
"""
"""build.py in a process of its own, which a broken library could end; without torch, which it does not need."""


def test_an_empty_cache_is_filled_and_a_broken_library_replaced(tmp_path, compiler):
    environment = {"LOCANT_CACHE": str(tmp_path), "CC": compiler}
    first = run_python(BUILD, **environment).stdout.split()
    assert float(first[1]) > 0
    assert float(first[1]) < 30  # under 10 s on an idle machine; see bench/results
    again = run_python(BUILD, **environment).stdout.split()
    assert again == [first[0], "0.0", "True"]
    whole = Path(first[0]).read_bytes()
    for broken in (whole[: len(whole) // 2], b""):
        Path(first[0]).write_bytes(broken)
        mended = run_python(BUILD, **environment).stdout.split()
        assert mended[2] == "True"
        assert len(Path(first[0]).read_bytes()) == len(whole)


def test_a_cache_folder_that_cannot_be_written(tmp_path, compiler):
    (tmp_path / "file").write_text("")
    done = run_python(BUILD, LOCANT_CACHE=str(tmp_path / "file"), CC=compiler)
    assert done.stdout.split() == ["None", *done.stdout.split()[1:2], "True"]
