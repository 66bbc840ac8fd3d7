# SPDX-License-Identifier: Apache-2.0
"""What a killed simulation left in memory is removed by the next one; what is held, fresh or foreign stays."""

import fcntl
import os
from pathlib import Path

from megascale_ops.sim.folder import LEAST_AGE_S, PREFIX, journal_folder, sweep

NOW = 1_000_000.0


def left(memory: Path, name: str, age_s: float) -> Path:
    """A folder with a journal in it, last written so long ago."""
    folder = memory / f"{PREFIX}{name}"
    folder.mkdir()
    (folder / "ops.db").write_bytes(b"x")
    os.utime(folder, (NOW - age_s, NOW - age_s))
    return folder


def test_the_folder_is_gone_at_the_end_and_so_is_what_was_left(tmp_path: Path) -> None:
    """Of three folders of dead simulations none is there afterwards."""
    for name in ("a", "b", "c"):
        left(tmp_path, name, LEAST_AGE_S + 1)
    with journal_folder(tmp_path, NOW) as folder:
        assert [folder] == list(tmp_path.iterdir())
        (folder / "ops.db").write_bytes(b"x")
    assert list(tmp_path.iterdir()) == []


def test_what_a_simulation_holds_stays(tmp_path: Path) -> None:
    """A simulation that runs for days is not taken for a dead one; once it has ended, it is."""
    folder = left(tmp_path, "held", 1e6)
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert sweep(tmp_path, NOW) == 0
    assert (folder / "ops.db").exists()
    os.close(handle)
    assert sweep(tmp_path, NOW) == 1
    assert not folder.exists()


def test_two_at_once_leave_each_other_alone(tmp_path: Path) -> None:
    """The second sweeps as it begins, long after the first one's folder was written."""
    with journal_folder(tmp_path, NOW) as first:
        os.utime(first, (NOW - 1e6, NOW - 1e6))
        with journal_folder(tmp_path, NOW) as second:
            assert first.exists()
            assert first != second


def test_what_is_young_a_link_or_no_folder_stays(tmp_path: Path) -> None:
    """It may be about to be locked, or is none of ours."""
    young = left(tmp_path, "young", LEAST_AGE_S - 1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    (tmp_path / f"{PREFIX}file").write_bytes(b"x")
    assert sweep(tmp_path, NOW) == 0
    assert young.exists()
    assert elsewhere.exists()


def test_without_a_file_system_in_memory_it_lies_with_temporary_files(tmp_path: Path) -> None:
    """As on a system that has none."""
    with journal_folder(tmp_path / "none") as folder:
        assert folder.is_dir()
    assert not folder.exists()
