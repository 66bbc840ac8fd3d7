# SPDX-License-Identifier: Apache-2.0
"""A file that is written beside and renamed: what was there is kept until all is well, and only a file is replaced."""

import os
import stat
from pathlib import Path

import pytest

from megascale_ops.errors import UsageError
from megascale_ops.trace.beside import open_beside


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
        with pytest.raises(UsageError, match=f"is {what}: give a file"), open_beside(path):
            pass

    assert pipe.is_fifo()
    assert link.is_symlink()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "pipe"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    """What it leads to is written, as with any program that is told to write there."""
    (tmp_path / "runs").mkdir()
    link = tmp_path / "latest.html"
    link.symlink_to(tmp_path / "runs" / "7.html")

    with open_beside(link) as file:
        file.write(b"page")

    assert link.is_symlink()
    assert (tmp_path / "runs" / "7.html").read_bytes() == b"page"
