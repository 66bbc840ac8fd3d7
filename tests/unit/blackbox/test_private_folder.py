# SPDX-License-Identifier: Apache-2.0
"""A folder is ours alone or not used, and what others have put into its place is neither followed nor written into."""

import os
from pathlib import Path

import pytest

from megascale_ops import foreign
from megascale_ops.blackbox.private_folder import (
    NotOursError,
    make_file,
    open_private,
    private_folder,
    who_may_move,
    write_file,
)

ANOTHER = 4711


def mode_of(path: Path) -> int:
    """Return the rights on a file or folder."""
    return path.stat().st_mode & 0o777


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on we are another user than the one whose files the test makes."""
    monkeypatch.setattr(os, "geteuid", lambda: ANOTHER)


def test_a_folder_is_made_for_us_alone(tmp_path: Path) -> None:
    """With its parents, also where the umask leaves less or more; one that is there already is closed to others."""
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)

    with private_folder(tmp_path / "a" / "b"), private_folder(open_to_all):
        pass

    assert [mode_of(path) for path in (tmp_path / "a", tmp_path / "a" / "b", open_to_all)] == [0o700] * 3


def test_a_folder_that_others_could_fill_is_refused_where_that_matters(tmp_path: Path) -> None:
    """Strictly taken what is in it may be theirs."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o770)

    with pytest.raises(NotOursError, match=r"others could write into .*open \(mode 0770\)"):
        open_private(folder, strict=True)


@pytest.mark.parametrize("kind", ["link", "dangling", "file", "fifo"])
def test_what_is_no_folder_is_refused(tmp_path: Path, kind: str) -> None:
    """A link, though it leads to a folder of ours; nothing is made behind one that leads nowhere."""
    path = tmp_path / "box"
    (tmp_path / "elsewhere").mkdir()
    {
        "link": lambda: path.symlink_to(tmp_path / "elsewhere"),
        "dangling": lambda: path.symlink_to(tmp_path / "nowhere"),
        "file": path.touch,
        "fifo": lambda: os.mkfifo(path),
    }[kind]()

    with pytest.raises(NotOursError, match="box is a link or no folder"):
        open_private(path)

    assert not (tmp_path / "nowhere").exists()


@pytest.mark.usefixtures("other")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    """And its rights stay as they are."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    folder.chmod(0o777)

    with pytest.raises(NotOursError, match=rf"theirs belongs to user {os.getuid()}, not to us \(user {ANOTHER}\)"):
        open_private(folder)

    assert mode_of(folder) == 0o777


def test_a_file_is_written_into_the_folder_that_was_opened(tmp_path: Path) -> None:
    """Though its name has become a link since; and a link in the place of the file is replaced, not followed."""
    folder, mine = tmp_path / "folder", tmp_path / "mine"
    mine.mkdir()
    (mine / "round.json").write_text("mine")
    with private_folder(folder) as handle:
        for name in ("round.json", "round.json.new"):
            os.symlink(mine / "round.json", name, dir_fd=handle)
        folder.rename(tmp_path / "moved")
        folder.symlink_to(mine)

        write_file(handle, "round.json", b"new")

    assert (mine / "round.json").read_text() == "mine"
    assert (tmp_path / "moved" / "round.json").read_bytes() == b"new"
    assert [path.name for path in (tmp_path / "moved").iterdir()] == ["round.json"]
    assert mode_of(tmp_path / "moved" / "round.json") == 0o600


def test_a_new_file_takes_the_place_of_an_old_one(tmp_path: Path) -> None:
    """Who has the old one open keeps it."""
    with private_folder(tmp_path) as handle:
        old = make_file(handle, "a")
        new = make_file(handle, "a")
        os.write(old, b"old")
        os.close(old)
        os.close(new)

    assert (tmp_path / "a").read_bytes() == b""


def test_only_files_of_ours_are_read(tmp_path: Path) -> None:
    """No link, no FIFO (which would hold us for ever), no file of another user; and no more than was asked for."""
    (tmp_path / "file").write_text("words")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")

    me = os.geteuid()
    assert foreign.read(tmp_path / "file", 100, owner=me) == b"words"
    with pytest.raises(OSError, match="more than the 2"):
        foreign.read(tmp_path / "file", 2, owner=me)
    for name, why in (("link", "a link"), ("fifo", "a FIFO"), ("missing", "missing")):
        with pytest.raises(OSError, match=why):
            foreign.read(tmp_path / name, 100, owner=me)
    with pytest.raises(PermissionError, match="belongs to user"):
        foreign.read(tmp_path / "file", 100, owner=ANOTHER)


def test_who_may_move_a_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All users where there is no sticky bit, and the owner of what it is in; in the user's own folder, none."""
    tmp_path.chmod(0o777)
    loose = who_may_move(tmp_path / "box")
    tmp_path.chmod(0o1777)
    sticky = who_may_move(tmp_path / "box")
    monkeypatch.setattr(os, "geteuid", lambda: ANOTHER)
    theirs = who_may_move(tmp_path / "box")

    assert loose == f"everybody may move it, since {tmp_path} has no sticky bit"
    assert not sticky
    if os.getuid() != 0:  # root may move everything anywhere, and is no news
        assert theirs == f"user {os.getuid()}, to whom {tmp_path} belongs, may move it"
    else:
        assert not theirs
