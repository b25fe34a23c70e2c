"""The steps of the build, each in this process; `test_build.py` runs them as a whole, in other processes."""

import ctypes
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from locant.attention import build

NEEDED = pytest.mark.skipif(
    sys.platform == "win32" or not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="no C compiler on the path; returns with one",
)


@NEEDED
@pytest.mark.skipif(os.environ.get("LOCANT_FUSED") == "0", reason="switched off by LOCANT_FUSED=0; returns without it")
def test_where_there_is_a_compiler_there_is_a_kernel():
    """All other tests of the kernel are left out where there is none, so this one must fail."""
    built = build.build()
    assert isinstance(built.library, ctypes.CDLL), built.why
    assert built.library.locant_lanes() >= 1
    assert {"-O3", "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno"} <= set(
        shlex.split(built.command)
    )


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Builds of a source of one line, which take 0.1 s, with a cache of their own."""
    (tmp_path / "small.c").write_text("int locant_small(void) { return 41; }\n")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "small.c")
    monkeypatch.setenv("LOCANT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOCANT_FUSED", raising=False)
    return [*(build.find_compiler() or ["cc"]), "-shared", "-fPIC"]


@NEEDED
def test_built_once_then_loaded(small, tmp_path):
    first, again = build._load(small), build._load(small)
    assert (first.why, again.why) == ("built and loaded", "built before and loaded")
    assert first.command == again.command == shlex.join(small)
    assert first.seconds > 0
    assert again.seconds == 0
    assert first.path == again.path
    assert first.path.parent == tmp_path / "cache"
    assert first.path.name.startswith("fused-")
    assert first.path.suffix == ".so"
    assert first.library.locant_small() == again.library.locant_small() == 41
    names = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "cache").iterdir()}
    assert names == {first.path.name: 0o700, first.path.with_suffix(".tag").name: 0o600, "key": 0o600}


@NEEDED
def test_another_source_command_or_cpu_is_another_library(small, tmp_path, monkeypatch):
    paths = [build._load(small).path, build._load([*small, "-O1"]).path]
    build.SOURCE.write_text("int locant_small(void) { return 42; }\n")
    changed = build._load(small)
    assert changed.library.locant_small() == 42
    monkeypatch.setattr(build, "_cpu", lambda: "another")
    paths += [changed.path, build._load(small).path]
    assert len(set(paths)) == 4


def test_the_origin_holds_everything_that_the_library_depends_on(monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\ntest "$*" = --version && echo version "$0"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "SOURCE", tmp_path / "small.c")
    monkeypatch.setattr(build, "_cpu", lambda: "this CPU")
    build.SOURCE.write_text("source\n")
    expected = ["source\n", str(compiler), "-O3", "-x", f"version {compiler}\n", "this CPU"]
    assert build._origin([str(compiler), "-O3", "-x"]).decode().split("\0") == expected
    compiler.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(subprocess.CalledProcessError):
        build._origin([str(compiler)])
    asked = []
    answer = subprocess.CompletedProcess([], 0, stdout="a version")
    monkeypatch.setattr(build.subprocess, "run", lambda command, **how: asked.append((command, how)) or answer)
    assert build._origin(["cc", "-x"]) == b"source\n\0cc\0-x\0a version\0this CPU"
    assert asked == [(["cc", "--version"], {"capture_output": True, "text": True, "timeout": 20, "check": True})]


@NEEDED
def test_a_library_is_ours_only_with_its_own_tag_and_key(small):
    path = build._load(small).path
    origin, tag, key = build._origin(small), path.with_suffix(".tag"), path.parent / "key"
    assert build._is_ours(path, origin)
    assert not build._is_ours(path, origin + b"x")
    kept = {file: file.read_bytes() for file in (path, tag, key)}
    for file, content in kept.items():
        for changed in (content[:-1], content + b"x", bytes([content[0] ^ 1]) + content[1:]):
            file.write_bytes(changed)
            assert not build._is_ours(path, origin), f"{file.name} was changed"
            key.write_bytes(kept[key])  # a key of the wrong length is replaced
            file.write_bytes(content)
        file.unlink()
        assert not build._is_ours(path, origin), f"{file.name} is missing"
        for each, original in kept.items():
            each.write_bytes(original)
    for file, mode in ((path, 0o720), (path, 0o702), (tag, 0o620), (tag, 0o602), (key, 0o640), (key, 0o604)):
        before = file.stat().st_mode
        file.chmod(mode)
        assert not build._is_ours(path, origin), f"{file.name} has mode {mode:o}"
        key.write_bytes(kept[key])
        file.chmod(before)
    key.chmod(0o600)
    assert build._is_ours(path, origin)


def test_a_key_is_secret_and_stays(tmp_path):
    key = build._key(tmp_path)
    assert len(key) == build.KEY_BYTES == 32
    assert (tmp_path / "key").read_bytes() == key == build._key(tmp_path)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    for content, mode in ((key[:-1], 0o600), (key + b"x", 0o600), (b"", 0o600), (key, 0o640), (key, 0o604)):
        (tmp_path / "key").write_bytes(content)
        (tmp_path / "key").chmod(mode)
        fresh = build._key(tmp_path)
        assert fresh not in (key, content)
        assert len(fresh) == 32
        assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_a_tag_depends_on_library_origin_and_key():
    key = b"k" * 32
    tags = {
        build._tag(b"library", b"origin", key),
        build._tag(b"Library", b"origin", key),
        build._tag(b"library", b"Origin", key),
        build._tag(b"library", b"origin", b"K" * 32),
        build._tag(b"nlibrary", b"origi", key),  # the border between the two counts
    }
    assert len(tags) == 5
    assert {len(tag) for tag in tags} == {32}
    assert build._tag_file(Path("/a/fused-1.so")) == Path("/a/fused-1.tag")


def test_the_folder_of_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LOCANT_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("LOCANT_CACHE")
    assert build.cache_folder() == tmp_path / "xdg" / "locant"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.cache_folder() == tmp_path / "home" / ".cache" / "locant"


def program(folder, name):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


def test_which_compiler_is_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CC", raising=False)
    assert build.find_compiler() is None
    for name in ("clang", "gcc", "cc"):  # the later ones come first
        program(tmp_path / "bin", name)
        assert build.find_compiler() == [name]
    program(tmp_path / "bin", "ccache")
    monkeypatch.setenv("CC", "ccache 'a b' -x")
    assert build.find_compiler() == ["ccache", "a b", "-x"]
    for wrong in ("missing cc", "' '", "'"):
        monkeypatch.setenv("CC", wrong)
        assert build.find_compiler() is None


@pytest.fixture
def rebuilt():
    """This process builds or loads the kernel again at its next use, and once more after the test."""
    build.build.cache_clear()
    yield
    build.build.cache_clear()


@pytest.mark.usefixtures("rebuilt")
@pytest.mark.parametrize("works", [0, 1, 2, 3])
def test_flags_are_left_out_until_the_compiler_takes_the_rest(works, monkeypatch):
    tried = []

    def load(command):
        tried.append(command)
        if len(tried) > works:
            return build.Built(ctypes.CDLL(None), "loaded", command=shlex.join(command))
        raise subprocess.CalledProcessError(1, command, stderr=f"noise\nError {len(tried)} of cc\nnoise")

    monkeypatch.setattr(build, "_load", load)
    monkeypatch.setattr(build, "find_compiler", lambda: ["some", "cc"])
    monkeypatch.delenv("LOCANT_FUSED", raising=False)
    built = build.build()
    cpu = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    base = ["some", "cc", *build.FLAGS]
    assert tried == [[*base, cpu, "-fopenmp"], [*base, cpu], base][: works + 1]
    if works == 3:
        assert built == build.Built(None, "some cc could not build it: Error 1 of cc", None, "", 0.0)
    else:
        assert built.command == shlex.join(tried[-1])


@pytest.mark.usefixtures("rebuilt")
def test_reasons_for_which_there_is_no_kernel(monkeypatch):
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    monkeypatch.delenv("LOCANT_FUSED", raising=False)
    assert "no C compiler was found" in build.build().why
    build.build.cache_clear()
    monkeypatch.setattr(sys, "platform", "win32")
    assert "Windows" in build.build().why
    build.build.cache_clear()
    monkeypatch.setenv("LOCANT_FUSED", "0")
    assert build.build() == build.Built(None, "switched off by LOCANT_FUSED=0", None, "", 0.0)


@NEEDED
def test_a_build_for_this_process_alone(small, monkeypatch, tmp_path):
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(build, "cache_folder", lambda: None)
    (tmp_path / "file").touch()
    monkeypatch.setattr(build, "fallback_folder", lambda: tmp_path / "file")
    before = set(tmp_path.iterdir())
    built = build._load(small)
    assert built.library.locant_small() == 41
    assert (built.path, built.command) == (None, shlex.join(small))
    assert built.why.startswith("built and loaded, but not cached: this user has no home folder")
    assert built.seconds > 0
    assert set(tmp_path.iterdir()) == before


@NEEDED
def test_a_cache_that_can_only_be_read(small, monkeypatch, tmp_path):
    path = build._load(small).path
    asked = []

    def read_only(folder):
        asked.append(folder)
        if folder == path.parent:
            raise PermissionError(f"{folder} cannot be written")

    monkeypatch.setattr(build, "check_writable", read_only)
    monkeypatch.setattr(build, "fallback_folder", lambda: tmp_path / "other")
    assert build._load(small).why == "built before and loaded"
    assert asked == []
    path.unlink()
    built = build._load(small)
    assert (built.path, built.trouble) == (tmp_path / "other" / path.name, f"{path.parent} cannot be written")
    assert asked == [path.parent, tmp_path / "other"]
    assert not path.exists()


@NEEDED
def test_a_compiler_that_fails_leaves_nothing_behind(small, tmp_path):
    build.SOURCE.write_text("no C at all\n")
    with pytest.raises(subprocess.CalledProcessError) as raised:
        build._compile(small, tmp_path / "cache" / "library.so")
    assert "error" in build._message(raised.value)
    with pytest.raises(OSError, match="wrote nothing"):
        build._compile(["true"], tmp_path / "cache" / "library.so")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_command_of_the_compiler(monkeypatch, tmp_path):
    """The output is a text, there is a limit of time, and the mathematical library comes last."""
    seen = []

    def run(command, **how):
        seen.append((command, how))
        Path(command[command.index("-o") + 1]).write_bytes(b"library")

    monkeypatch.setattr(build.subprocess, "run", run)
    path = tmp_path / "library.so"
    before = os.umask(0o077)
    try:
        assert build._compile(["cc", "-O3"], path) == path.read_bytes() == b"library"
    finally:
        os.umask(before)
    ((command, how),) = seen
    assert command[:4] == ["cc", "-O3", str(build.SOURCE), "-o"]
    assert command[5:] == ["-lm"]
    assert Path(command[4]).parent == tmp_path  # beside the library, so that it can be renamed
    assert how == {"capture_output": True, "text": True, "timeout": 120, "check": True}
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("first\nan Error here\nlast"), "an Error here"),
        (OSError("  nothing of the kind\n"), "nothing of the kind"),
        (OSError("x" * 300), "x" * 200),
        (subprocess.CalledProcessError(1, "cc", stderr="a\nfatal error: b\nerror: c"), "fatal error: b"),
        (subprocess.CalledProcessError(1, "cc", stderr=""), "Command 'cc' returned non-zero exit status 1."),
    ],
)
def test_the_message_of_a_compiler(error, message):
    assert build._message(error) == message


def test_the_properties_of_the_cpu(monkeypatch):
    lines = "processor : 0\nmodel name : a\nflags : b c\n" * 2 + "Features : d\nCPU part : e\n"
    monkeypatch.setattr(Path, "read_text", lambda self: lines if str(self) == "/proc/cpuinfo" else "")
    assert build._cpu() == "model name : a\nflags : b c\nFeatures : d\nCPU part : e"

    def missing(self):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert build._cpu() == platform.processor() + platform.machine()


@pytest.mark.parametrize(
    ("machine", "flag"), [("arm64", "-mcpu=native"), ("aarch64", "-mcpu=native"), ("x86_64", "-march=native")]
)
def test_the_flag_of_the_cpu(machine, flag, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    spec = importlib.util.find_spec("locant.attention.build")
    there = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(there)
    assert [[flag, "-fopenmp"], [flag], []] == there.OPTIONAL
