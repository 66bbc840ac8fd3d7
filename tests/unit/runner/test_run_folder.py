# SPDX-License-Identifier: Apache-2.0
"""The run folder is its owner's, whichever user made it, and nothing of the user's own in it is touched."""

import logging
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from megascale_ops.errors import UsageError
from megascale_ops.runner.run_folder import narrow_umask, prepare_run_folder


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    """The umask of most accounts, under which all users read what is written."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_is_closed_and_its_parents_are_the_users(tmp_path: Path) -> None:
    """0700 for the run; what lies above was asked for by the user and follows the umask."""
    folder = prepare_run_folder(tmp_path / "project" / "run", is_named=True)

    assert _mode(folder) == 0o700
    assert _mode(tmp_path / "project") == 0o755


def test_a_users_folder_keeps_its_mode_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What earlier runs left open in it is closed; the script, its checkpoints and links are left alone."""
    caplog.set_level(logging.INFO)
    tmp_path.chmod(0o755)
    for name in ("journal.db", "journal.db-wal", "agent.log", "train.py"):
        (tmp_path / name).touch(mode=0o644)
    for name in ("logs", "logs-b", "incidents", "checkpoints"):
        (tmp_path / name).mkdir(mode=0o755)
    (tmp_path / "controller.log").symlink_to(tmp_path / "train.py")

    prepare_run_folder(tmp_path, is_named=True)

    kept = {path.name for path in tmp_path.iterdir() if _mode(path) & 0o077}
    assert kept == {"train.py", "checkpoints", "controller.log"}
    assert _mode(tmp_path) == 0o755
    (said,) = caplog.messages
    assert said == f"others may enter the run folder {tmp_path} (mode 0755), but read nothing that this run writes"


def test_a_folder_that_we_chose_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A version before has left it open; which was never intended."""
    caplog.set_level(logging.INFO)
    tmp_path.chmod(0o755)

    prepare_run_folder(tmp_path, is_named=False)

    assert _mode(tmp_path) == 0o700
    assert caplog.messages == []


def test_a_closed_folder_is_nothing_to_speak_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The negative control of the line."""
    caplog.set_level(logging.INFO)
    tmp_path.chmod(0o700)

    prepare_run_folder(tmp_path, is_named=True)

    assert caplog.messages == []


def test_a_folder_that_can_not_be_is_one_sentence(tmp_path: Path) -> None:
    """A file is in the way."""
    (tmp_path / "file").touch()

    with pytest.raises(UsageError, match="can't be written to"):
        prepare_run_folder(tmp_path / "file" / "run", is_named=True)
    with pytest.raises(UsageError, match="can't be written to"):
        prepare_run_folder(tmp_path / "file", is_named=True)


def test_the_umask_is_narrow_for_us_and_given_back(tmp_path: Path) -> None:
    """What is written meanwhile is the owner's alone; the ranks are given the umask that was there before."""
    before, widen = narrow_umask()
    (tmp_path / "journal").touch()
    widen()
    (tmp_path / "checkpoint").touch()

    assert before == 0o022
    assert (_mode(tmp_path / "journal"), _mode(tmp_path / "checkpoint")) == (0o600, 0o644)


def _of_length(folder: Path, length: int) -> Path:
    """Return a path below ``folder`` of so many bytes."""
    path = folder
    while (missing := length - len(str(path)) - 1) > 0:
        path /= "d" * (missing if missing <= 200 else min(200, missing - 2))
    assert len(str(path)) == length
    return path


def test_the_longest_run_folder_still_holds_a_journal(tmp_path: Path) -> None:
    """SQLite opens one there, with its log beside it; one byte more is refused, with how many there are."""
    folder = prepare_run_folder(_of_length(tmp_path, 480), is_named=True)

    with closing(sqlite3.connect(folder / "journal.db")) as journal:
        journal.execute("PRAGMA journal_mode=WAL")
        journal.execute("CREATE TABLE one (x)")

    assert (folder / "journal.db-wal").exists() or (folder / "journal.db").stat().st_size
    with pytest.raises(UsageError, match="its path has 481 bytes"):
        prepare_run_folder(_of_length(tmp_path / "other", 481), is_named=True)
    assert not (tmp_path / "other").exists()


def test_a_run_folder_that_no_message_can_name_is_refused(tmp_path: Path) -> None:
    """The negative control is any other sign."""
    with pytest.raises(UsageError, match="not in UTF-8"):
        prepare_run_folder(tmp_path / "caf\udce9", is_named=True)

    assert prepare_run_folder(tmp_path / "café ü 火", is_named=True).is_dir()


def test_a_place_that_takes_nothing_is_told_with_the_option_for_another_one() -> None:
    """As a home that is read-only, or one that only the name of exists."""
    with pytest.raises(UsageError, match=r"/proc/1/runs can't be written to \(.*\): give another one by --run-dir"):
        prepare_run_folder(Path("/proc/1/runs/toy"), is_named=False)
