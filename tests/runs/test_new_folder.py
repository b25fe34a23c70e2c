"""What a failed block wrote is deleted, and nothing else is."""

import multiprocessing
import os
from pathlib import Path

import pytest

from locant.runs import new_folder, run_folder


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def fail_after(*paths: Path, problem: BaseException | None = None) -> None:
    """Writes files, and raises."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    raise problem or ValueError("it")


def link_twice(link: Path, target: Path) -> None:
    link.parent.mkdir()
    link.symlink_to(target)
    link.symlink_to(target)


def test_what_a_block_wrote_is_deleted_and_what_was_there_stays(tmp_path):
    (tmp_path / "old" / "inner").mkdir(parents=True)
    (tmp_path / "old" / "thesis.txt").write_text("kept")
    before = everything(tmp_path)
    paths = [tmp_path / "old", tmp_path / "a" / "b" / "new", tmp_path / "page.html"]
    with pytest.raises(KeyboardInterrupt), new_folder.undone_on_failure(*paths):
        fail_after(paths[0] / "more" / "x", paths[0] / "y", paths[1] / "z", paths[2], problem=KeyboardInterrupt())
    assert everything(tmp_path) == before
    assert (tmp_path / "old" / "thesis.txt").read_text() == "kept"


def test_a_link_is_deleted_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x").touch()
    with pytest.raises(FileExistsError), new_folder.undone_on_failure(tmp_path / "out"):
        link_twice(tmp_path / "out" / "link", tmp_path / "elsewhere")
    assert everything(tmp_path) == ["elsewhere", "elsewhere/x"]


def test_a_new_folder_appears_when_it_is_complete(tmp_path):
    out = tmp_path / "a" / "out"
    with new_folder.new_folder(out) as place:
        (place / "x").touch()
        assert not out.exists()
    assert everything(tmp_path) == ["a", "a/out", "a/out/x"]
    with pytest.raises(ValueError, match="exists and is not empty; name another folder"), new_folder.new_folder(out):
        pass
    with pytest.raises(ValueError, match="is not empty"), new_folder.new_folder(out / "x"):
        pass
    assert everything(tmp_path) == ["a", "a/out", "a/out/x"]


def test_an_empty_folder_is_written_in_place(tmp_path):
    """It may be a mount, which cannot be renamed over."""
    (tmp_path / "out").mkdir()
    same = (tmp_path / "out").stat().st_ino
    with pytest.raises(RuntimeError), new_folder.new_folder(tmp_path / "out") as place:
        fail_after(place / "x", problem=RuntimeError())
    assert everything(tmp_path) == ["out"]
    with new_folder.new_folder(tmp_path / "out") as place:
        (place / "x").touch()
    assert (tmp_path / "out" / "x").exists()
    assert (tmp_path / "out").stat().st_ino == same


def test_an_error_names_the_folder_that_was_asked_for(tmp_path):
    out = tmp_path / "out"
    with (
        pytest.raises(OSError, match=f"^{out} could not be written: .*No space left") as found,
        new_folder.new_folder(out),
    ):
        raise OSError(28, "No space left on device")
    assert f".out.{os.getpid()}" not in str(found.value)
    with pytest.raises(OSError, match=f"'{out}/x'"), new_folder.new_folder(out) as place:
        (place / "x").open()


def test_what_cannot_be_written_is_found(tmp_path, monkeypatch):
    new_folder.check_writable(tmp_path / "a" / "b" / "page.html")
    (tmp_path / "file").touch()
    new_folder.check_writable(tmp_path / "file")
    with pytest.raises(NotADirectoryError, match=r"x/page.html cannot be written: .*file is not a folder"):
        new_folder.check_writable(tmp_path / "file" / "x" / "page.html")
    with pytest.raises(OSError, match=r"^/proc/page.html cannot be written: /proc"):  # root may, and cannot
        new_folder.check_writable(Path("/proc/page.html"))
    assert everything(tmp_path) == ["file"]

    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(new_folder.tempfile, "TemporaryFile", full)
    with pytest.raises(OSError, match="the disk is full"):
        new_folder.check_writable(tmp_path)


def test_a_run_that_has_nothing_to_resume_leaves_no_folder(tmp_path):
    out = tmp_path / "a" / "run"
    with pytest.raises(ValueError, match="it"), run_folder.held(out, resumes=lambda: False):
        fail_after(out / "x")
    assert everything(tmp_path) == []
    with pytest.raises(ValueError, match="it"), run_folder.held(out, resumes=lambda: True):
        fail_after(out / "x")
    assert everything(tmp_path) == ["a", "a/run", "a/run/.lock", "a/run/x"]


def _wait(out: Path, begun, done) -> None:
    begun.set()
    with run_folder.held(out, wait=True):
        (out / "second").touch()
        done.put(sorted(path.name for path in out.iterdir()))


def test_one_who_waits_for_a_run_that_fails_gets_a_folder_of_its_own(tmp_path):
    """The failed run deletes the folder and the lock that the other waits for."""
    context = multiprocessing.get_context("fork")
    begun, done = context.Event(), context.Queue()
    other = context.Process(target=_wait, args=(tmp_path / "run", begun, done))

    def fail_while_it_waits():
        other.start()
        assert begun.wait(30)
        fail_after(tmp_path / "run" / "first")

    with pytest.raises(ValueError, match="it"), run_folder.held(tmp_path / "run", resumes=lambda: False):
        fail_while_it_waits()
    assert done.get(timeout=30) == [".lock", "second"]
    other.join(30)
    assert other.exitcode == 0


def test_an_error_that_has_nothing_to_do_with_the_folder_stays_as_it_is(tmp_path):
    with pytest.raises(OSError, match=r"^cannot connect$"), new_folder.new_folder(tmp_path / "new"):
        raise OSError("cannot connect")
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_deleting_does_not_hide_the_first_one(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("busy")

    monkeypatch.setattr(os, "rmdir", refuse)
    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(ValueError, match="it"), new_folder.undone_on_failure(tmp_path / "out", tmp_path / "page"):
        fail_after(tmp_path / "out" / "inner" / "x", tmp_path / "out" / "y", tmp_path / "page")
