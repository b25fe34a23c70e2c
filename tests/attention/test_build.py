"""The build of the fused kernel: its cache, and the reasons for which there is no kernel."""

import hashlib
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import locant
from locant.attention import build, diagnosis
from tests.runs.test_private_folder import STRANGER, needs_root

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
test -e {folder}/library || {shlex.join(build.find_compiler())} "$@" -o {folder}/$$ || exit 1
test -e {folder}/library || mv {folder}/$$ {folder}/library || exit 1
while test "$1" != -o; do shift; done
cp {folder}/library "$2"
"""
    )
    script.chmod(0o755)
    return str(script)


BUILD = f"""
import runpy
b = runpy.run_path({str(Path(build.__file__))!r})["build"]()
print(b.path, b.seconds, b.library is not None, b.why, b.trouble, sep="|")
"""
"""build.py in a process of its own, which a broken library could end; without torch, which it does not need."""


class Outcome(NamedTuple):
    path: Path | None
    seconds: float
    loaded: bool
    why: str
    trouble: str = ""


def run_build(**environment) -> Outcome:
    done = run_python(BUILD, **environment)
    assert done.returncode == 0, done.stderr
    path, seconds, loaded, why, trouble = done.stdout.strip().split("|")
    return Outcome(None if path == "None" else Path(path), float(seconds), loaded == "True", why, trouble)


@pytest.mark.slow
def test_an_empty_cache_is_filled_and_a_broken_library_replaced(tmp_path, compiler):
    environment = {"LOCANT_CACHE": str(tmp_path), "CC": compiler}
    first = run_build(**environment)
    assert first.seconds > 0  # it was compiled, not found; bench/results has the time
    assert run_build(**environment) == Outcome(first.path, 0, True, "built before and loaded")
    whole = first.path.read_bytes()
    for broken in (whole[: len(whole) // 2], b""):
        first.path.write_bytes(broken)
        assert run_build(**environment).loaded
        assert len(first.path.read_bytes()) == len(whole)


@pytest.mark.parametrize("place", ["file", "/proc/locant"])
def test_in_place_of_a_cache_folder_that_cannot_be_written_another_is_used(tmp_path, compiler, place):
    (tmp_path / "file").write_text("")
    environment = {"LOCANT_CACHE": str(tmp_path / place), "CC": compiler, "TMPDIR": str(tmp_path)}
    first, again = run_build(**environment), run_build(**environment)
    assert first.path.parent == tmp_path / f"locant-{os.geteuid()}"
    assert first.path.parent.stat().st_mode & 0o777 == 0o700
    assert str(tmp_path / place) in first.trouble
    assert again == Outcome(first.path, 0, True, "built before and loaded", first.trouble)


@pytest.mark.slow
def test_processes_that_build_at_once_all_get_a_library(tmp_path, compiler):
    environment = {**os.environ, "LOCANT_CACHE": str(tmp_path / "new"), "CC": compiler}
    processes = [
        subprocess.Popen([sys.executable, "-c", BUILD], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    printed = [process.communicate(timeout=200)[0].strip().split("|") for process in processes]
    assert {(each[0], each[2]) for each in printed} == {(printed[0][0], "True")}
    assert not [path for path in (tmp_path / "new").iterdir() if path.name.startswith(".")]


def test_the_cache_is_private_whatever_the_umask_is(tmp_path, compiler):
    before = os.umask(0)
    try:
        built, again = [run_build(LOCANT_CACHE=str(tmp_path / "new" / "cache"), CC=compiler) for _ in range(2)]
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in (built.path, *built.path.parents)}
    assert modes[built.path] == modes[tmp_path / "new"] == modes[tmp_path / "new" / "cache"] == 0o700
    assert (built.path.parent / "key").stat().st_mode & 0o777 == 0o600
    assert again.why == "built before and loaded"


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A library that writes a file when it is loaded: (library, file)."""
    folder = tmp_path_factory.mktemp("foreign")
    source, library, marker = folder / "foreign.c", folder / "foreign.so", folder / "was-loaded"
    source.write_text(
        f"""#include <stdio.h>
__attribute__((constructor)) static void loaded(void) {{ fclose(fopen("{marker}", "w")); }}
"""
    )
    subprocess.run([*build.find_compiler(), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return library, marker


def check_not_loaded(foreign, environment):
    """Builds, and returns the outcome: the kernel must be loaded and the foreign library not."""
    outcome = run_build(**environment)
    assert outcome.loaded
    assert not foreign[1].exists(), "the foreign library was loaded"
    return outcome


def test_a_library_with_a_checksum_of_its_own_is_not_loaded(tmp_path, compiler, foreign):
    environment = {"LOCANT_CACHE": str(tmp_path), "CC": compiler}
    path = run_build(**environment).path
    library = foreign[0].read_bytes()
    path.write_bytes(library)
    path.with_suffix(".sha256").write_text(hashlib.sha256(library).hexdigest())
    path.with_suffix(".tag").write_bytes(hashlib.sha256(library).digest())
    check_not_loaded(foreign, environment)
    assert path.read_bytes() != library


def test_a_tag_is_valid_for_one_origin_only():
    """An older build of the same user, with its valid tag, is not taken for a build of the present source."""
    key = b"k" * build.KEY_BYTES
    assert build._tag(b"library", b"old source", key) != build._tag(b"library", b"new source", key)
    assert build._tag(b"library", b"source", key) != build._tag(b"library", b"source", b"other key")


@needs_root
@pytest.mark.parametrize("also", ["library", "library, tag and key", "folder"])
def test_what_another_user_put_into_the_cache_is_not_loaded(also, tmp_path, compiler, foreign):
    cache = tmp_path / "cache"
    environment = {"LOCANT_CACHE": str(cache), "CC": compiler, "TMPDIR": str(tmp_path)}
    path = run_build(**environment).path
    key, origin = b"k" * build.KEY_BYTES, build._origin([compiler, *build.FLAGS, *build.OPTIONAL[0]])
    path.write_bytes(foreign[0].read_bytes())
    path.with_suffix(".tag").write_bytes(build._tag(path.read_bytes(), origin, key))
    (cache / "key").write_bytes(key)  # the tag is right, so that only the owner gives it away
    for file in {"library": [path], "folder": [cache]}.get(also, list(cache.iterdir())):
        os.chown(file, STRANGER, -1)
    outcome = check_not_loaded(foreign, environment)
    if also == "folder":
        assert outcome.path.parent == tmp_path / f"locant-{os.geteuid()}"
        assert outcome.trouble == f"{cache} belongs to another user ({STRANGER})"


def test_an_empty_home_is_no_home(monkeypatch):
    """Its cache would be in the root of the file system."""
    for name in ("LOCANT_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, "")
    assert build.cache_folder() is None


def test_without_a_home_no_folder_that_others_have_made_is_used(tmp_path, compiler, foreign):
    """The folder that takes the place of the cache is there already, with a foreign library; others can write in it."""
    name = run_build(LOCANT_CACHE=str(tmp_path / "once"), CC=compiler).path.name
    planted = tmp_path / f"locant-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    (planted / name).write_bytes(foreign[0].read_bytes())
    (planted / name).with_suffix(".sha256").write_text(hashlib.sha256(foreign[0].read_bytes()).hexdigest())
    homeless = """
import pathlib
def home(): raise RuntimeError("Could not determine home directory.")
pathlib.Path.home = home
"""
    environment = {"LOCANT_CACHE": "", "XDG_CACHE_HOME": "", "TMPDIR": str(tmp_path), "CC": compiler}
    done = run_python(homeless + BUILD, **environment)
    path, _, loaded, why, _ = done.stdout.strip().split("|")
    assert (path, loaded) == ("None", "True"), done.stderr
    assert "this user has no home folder; set LOCANT_CACHE" in why
    assert f"other users can write in {planted}" in why
    assert not foreign[1].exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == [planted.name, "once"]  # its own folder is deleted


def test_no_kernel_is_built_where_others_can_replace_it(tmp_path, compiler):
    """Neither the cache nor the temporary folder is safe, so nothing is loaded."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    outcome = run_build(LOCANT_CACHE=str(shared / "cache"), TMPDIR=str(shared), CC=compiler)
    assert not outcome.loaded
    assert f"other users can write in {shared}" in outcome.why
    assert not list(shared.iterdir())


def test_doctor_shows_why_the_cache_is_not_used(tmp_path, compiler, monkeypatch, rebuilt):
    shared, other = tmp_path / "shared", tmp_path / "other"
    shared.mkdir()
    shared.chmod(0o777)
    other.mkdir()
    reason = f"{shared} is not used: other users can write in {shared} (chmod go-w {shared})"
    monkeypatch.setenv("LOCANT_CACHE", str(shared))
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(build.tempfile, "tempdir", str(other))
    details = {finding.name: finding for finding in diagnosis.diagnose()}
    place = other / f"locant-{os.geteuid()}"
    assert details["its library"].detail.startswith(f"{place}/fused-")
    assert details["cache folder"].active is False
    assert f"{reason}. {place} is used instead. Mend it, or set LOCANT_CACHE" in details["cache folder"].detail
    place.chmod(0o777)
    build.build.cache_clear()
    details = {finding.name: finding for finding in diagnosis.diagnose()}
    assert details["its library"].active is False
    assert "every process builds the kernel again" in details["cache folder"].detail
