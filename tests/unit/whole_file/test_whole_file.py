# SPDX-License-Identifier: Apache-2.0
"""A file that is written beside and renamed: what was there is kept until all is well, and only a file is replaced."""

import os
import resource
import signal
import stat
from pathlib import Path

import pytest

from megascale_ops.errors import UsageError
from megascale_ops.whole_file import PRIVATE, open_beside, write_whole


def fail(path: Path) -> None:
    """Write a half, then end with an exception."""
    with open_beside(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt


def test_what_was_there_stays_until_all_is_written(tmp_path: Path) -> None:
    """A failure keeps the old file, and leaves nothing beside it."""
    path = tmp_path / "r.html"
    path.write_bytes(b"old")

    with pytest.raises(KeyboardInterrupt):
        fail(path)
    before = path.read_bytes(), [one.name for one in tmp_path.iterdir()]
    with open_beside(path) as file:
        file.write(b"new")

    assert before == (b"old", ["r.html"])
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) & 0o400


def test_a_pipe_or_a_folder_is_not_replaced(tmp_path: Path) -> None:
    """Renamed over, a device of root's would be a file from then on; it is refused in a sentence, and stays."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)

    for path, what in ((pipe, "a device or a pipe"), (link, "a device or a pipe"), (tmp_path, "a folder")):
        with pytest.raises(UsageError, match=f"is {what}: give a file"), open_beside(path, follow=True):
            pass

    assert pipe.is_fifo()
    assert link.is_symlink()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "pipe"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    """What it leads to is written, as with any program that is told to write there."""
    (tmp_path / "runs").mkdir()
    link = tmp_path / "latest.html"
    link.symlink_to(tmp_path / "runs" / "7.html")

    with open_beside(link, follow=True) as file:
        file.write(b"page")

    assert link.is_symlink()
    assert (tmp_path / "runs" / "7.html").read_bytes() == b"page"


def test_a_name_of_our_own_is_replaced_whatever_stands_there(tmp_path: Path) -> None:
    """A link placed in a folder of the product redirects no write."""
    (tmp_path / "elsewhere").write_bytes(b"kept")
    (tmp_path / "port").symlink_to(tmp_path / "elsewhere")

    write_whole(tmp_path / "port", b"7070")

    assert not (tmp_path / "port").is_symlink()
    assert ((tmp_path / "port").read_bytes(), (tmp_path / "elsewhere").read_bytes()) == (b"7070", b"kept")


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_who_may_read_it_is_settled_before_its_first_byte(tmp_path: Path, umask: int) -> None:
    """A shared one has what the umask leaves, also while it is written; a private one is its owner's."""
    before = os.umask(umask)
    try:
        with open_beside(tmp_path / "shared"), open_beside(tmp_path / "private", mode=PRIVATE):
            unfinished = {one.name.split(".")[1]: stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir()}
    finally:
        os.umask(before)

    assert unfinished == {"shared": 0o666 & ~umask, "private": 0o600}
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o600


def test_the_longest_name_there_can_be_is_written(tmp_path: Path) -> None:
    """The name beside it is no longer than a file system takes, of characters of four bytes, too."""
    for name in ("x" * 255, "\N{GRINNING FACE}" * 63):
        write_whole(tmp_path / name, b"all")

        assert (tmp_path / name).read_bytes() == b"all"


def test_two_writers_of_one_name_do_not_meet(tmp_path: Path) -> None:
    """Threads of one process, or machines that share a folder: the last to end stands there, whole."""
    with open_beside(tmp_path / "f") as first, open_beside(tmp_path / "f") as second:
        first.write(b"first")
        second.write(b"second")

    assert (tmp_path / "f").read_bytes() == b"first"
    assert [one.name for one in tmp_path.iterdir()] == ["f"]


def test_written_durably_it_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk refuses, the former content stays and nothing lies beside it."""
    target = tmp_path / "manifest.json"
    write_whole(target, b"former", durably=True)

    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_whole(target, b"newer", durably=True)
    kept = target.read_bytes()
    write_whole(target, b"newest")

    assert (kept, target.read_bytes()) == (b"former", b"newest")
    assert list(tmp_path.iterdir()) == [target]


def test_written_anew_it_takes_nobody_s_place(tmp_path: Path) -> None:
    """The first is written, the second is refused, and nothing lies beside."""
    write_whole(tmp_path / "token", b"first", anew=True)

    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "token", b"second", anew=True)

    assert (tmp_path / "token").read_bytes() == b"first"
    assert [one.name for one in tmp_path.iterdir()] == ["token"]


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_place_without_a_name_is_a_folder(name: str) -> None:
    """What an unset variable of a shell gives is refused as the system refuses a folder."""
    with pytest.raises(IsADirectoryError):
        write_whole(Path(name), b"new")


def test_a_write_that_fails_names_the_file(tmp_path: Path) -> None:
    """The system does not say which one is too large; a person has to know."""
    path = tmp_path / "page.html"
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_whole(path, bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
        signal.signal(signal.SIGXFSZ, before)

    assert caught.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []
