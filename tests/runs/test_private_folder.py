"""Folders in which only this user and root can have written."""

import grp
import os
import pwd
from types import SimpleNamespace

import pytest

from locant.runs.private_folder import private_folder, read_private

STRANGER = 65534
"""The user "nobody": neither root nor the one who runs the tests."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def test_a_missing_folder_is_made_private(tmp_path):
    before = os.umask(0)
    try:
        made = private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert made == tmp_path / "a" / "b"
    assert [path.stat().st_mode & 0o777 for path in (made, made.parent)] == [0o700, 0o700]
    assert private_folder(made) == made


@pytest.fixture
def group_of(monkeypatch):
    """Gives the group of every file a name and members. The user is called me."""
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="me"))

    def name(group, *members):
        found = SimpleNamespace(gr_name=group, gr_mem=list(members))
        monkeypatch.setattr(grp, "getgrgid", lambda gid: found)

    return name


def test_the_group_of_the_user_alone_is_not_others(group_of, tmp_path):
    (tmp_path / "it").mkdir()
    (tmp_path / "it").chmod(0o775)
    for members in ((), ("me",)):
        group_of("me", *members)
        assert private_folder(tmp_path / "it" / "below") == tmp_path / "it" / "below"
        assert private_folder(tmp_path / "it") == tmp_path / "it"
    for group, members in (("staff", ()), ("staff", ("me",)), ("me", ("me", "you"))):
        group_of(group, *members)
        with pytest.raises(PermissionError, match=f"other users can write in {tmp_path}/it"):
            private_folder(tmp_path / "it")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777, 0o720])
def test_a_folder_that_others_can_write_is_refused(mode, group_of, tmp_path):
    group_of("staff", "me", "you")
    (tmp_path / "it").mkdir()
    (tmp_path / "it").chmod(mode)
    with pytest.raises(PermissionError, match=f"other users can write in {tmp_path}/it"):
        private_folder(tmp_path / "it")


def test_a_folder_below_one_that_others_can_write_is_refused_and_not_made(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError, match=f"other users can write in {tmp_path}/open"):
        private_folder(tmp_path / "open" / "a" / "b")
    assert not list((tmp_path / "open").iterdir())


def test_a_folder_of_ours_in_a_sticky_folder_is_used(tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    assert private_folder(tmp_path / "tmp" / "a") == tmp_path / "tmp" / "a"


def test_links_of_ours_are_followed_and_their_way_is_checked(tmp_path):
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "link").symlink_to("real")
    assert private_folder(tmp_path / "link") == tmp_path / "real"
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "link").symlink_to(tmp_path / "real")
    (tmp_path / "two").symlink_to(tmp_path / "open" / "link")
    with pytest.raises(PermissionError, match=f"other users can write in {tmp_path}/open"):
        private_folder(tmp_path / "two" / "cache")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="too many symbolic links"):
        private_folder(tmp_path / "loop")


@needs_root
def test_folders_and_links_of_another_user_are_refused(tmp_path):
    """Also in a sticky folder, where another user may have been first."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    (tmp_path / "tmp" / "cache").mkdir(0o700)
    os.chown(tmp_path / "tmp" / "cache", STRANGER, -1)
    for path in ("tmp/cache", "tmp/cache/below"):
        with pytest.raises(PermissionError, match=rf"cache belongs to another user \({STRANGER}\)"):
            private_folder(tmp_path / path)
    (tmp_path / "tmp" / "link").symlink_to(tmp_path)
    os.lchown(tmp_path / "tmp" / "link", STRANGER, -1)
    with pytest.raises(PermissionError, match=rf"link belongs to another user \({STRANGER}\)"):
        private_folder(tmp_path / "tmp" / "link" / "cache")


def test_folders_of_this_user_are_foreign_to_another(tmp_path, monkeypatch):
    """The same without root: this process claims to be another user."""
    (tmp_path / "cache").mkdir(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    with pytest.raises(PermissionError, match="belongs to another user"):
        private_folder(tmp_path / "cache")
    (tmp_path / "file").write_text("content")
    assert read_private(tmp_path / "file") is None


def test_only_regular_files_that_nobody_else_can_change_are_read(tmp_path):
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    file.write_bytes(b"content")
    file.chmod(0o644)
    link.symlink_to(file)
    os.mkfifo(pipe)
    assert read_private(file) == b"content"
    assert read_private(file, others=0o077) is None
    assert [read_private(path) for path in (link, pipe, tmp_path, tmp_path / "none")] == [None] * 4
    file.chmod(0o664)
    assert read_private(file) is None


@needs_root
def test_files_of_another_user_are_not_read(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    os.chown(tmp_path / "file", STRANGER, -1)
    assert read_private(tmp_path / "file") is None


def test_a_folder_that_another_process_makes_at_the_same_moment(tmp_path, monkeypatch):
    mkdir = os.mkdir

    def late(path, mode):
        mkdir(path, mode)
        raise FileExistsError(path)

    monkeypatch.setattr(os, "mkdir", late)
    assert private_folder(tmp_path / "new") == tmp_path / "new"
