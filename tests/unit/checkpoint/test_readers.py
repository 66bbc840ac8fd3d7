# SPDX-License-Identifier: Apache-2.0
"""Marks of restores in progress, and that nothing is deleted under one."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from megascale_ops.checkpoint import deletion, manifest, processes, readers, storage
from megascale_ops.checkpoint.retention import MARK_LASTS_S, Rule
from megascale_ops.checkpoint.writers import Writer
from tests.fakes.checkpoints import sealed


def steps(root: Path) -> list[int]:
    """What stands there, newest first."""
    return [storage.step_of(path) for path in storage.candidates(root)]


def delete(root: Path, rule: Rule) -> list[int]:
    """Delete by a rule; the steps that went."""
    return [one.step for one in deletion.carry_out(root, deletion.plan(root, rule))]


def mark_of(root: Path, step: int, writer: Writer, age_s: float = 0.0) -> Path:
    """Put another process's mark down, as old as that."""
    path = root / f".reader-{step:08d}.{writer.token}.json"
    path.write_bytes(msgspec.json.encode(writer))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def elsewhere() -> Writer:
    """A process of another machine, of which this one's kernel knows nothing."""
    me = processes.describe_writer(0, 1)
    return msgspec.structs.replace(me, node="node-b", process=msgspec.structs.replace(me.process, host="node-b"))


def test_what_is_read_stays_and_goes_when_it_is_read_no_more(tmp_path: Path) -> None:
    """The mark follows the reader from one step to the next, and is gone with the restore."""
    for step in (1, 2, 3):
        sealed(tmp_path, step)

    with readers.reading(tmp_path, 0, 1) as reader:
        reader.mark(2)
        reader.mark(1)
        assert list(readers.readers_of(tmp_path)) == [1]
        assert delete(tmp_path, Rule(keep=1)) == [2]

    assert steps(tmp_path) == [3, 1]
    assert delete(tmp_path, Rule(keep=1)) == [1]
    assert list(tmp_path.glob(".reader-*")) == []
    assert list(tmp_path.glob(".probe-*")) == []


def test_a_reader_that_comes_while_the_folder_is_moved_away_gets_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decided before the mark was there: whichever comes second sees the other."""
    for step in (1, 2):
        sealed(tmp_path, step)
    decided = deletion.plan(tmp_path, Rule(keep=1))
    away = storage.move_away

    def moved(folder: Path, step: int | None = None) -> Path | None:
        doomed = away(folder, step)
        mark_of(tmp_path, 1, processes.describe_writer(0, 1))
        return doomed

    monkeypatch.setattr(storage, "move_away", moved)

    assert deletion.carry_out(tmp_path, decided) == []
    assert steps(tmp_path) == [2, 1]


def test_the_mark_of_a_dead_process_of_this_machine_ends_at_once(tmp_path: Path) -> None:
    """The kernel knows; the mark is removed with the next deletion."""
    for step in (1, 2):
        sealed(tmp_path, step)
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom megascale_ops.checkpoint import readers\n"
        "with readers.reading(Path(sys.argv[1]), 0, 1) as reader:\n    reader.mark(1)\n    os._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == 9
    assert len(list(tmp_path.glob(".reader-*"))) == 1

    assert delete(tmp_path, Rule(keep=1)) == [1]
    assert list(tmp_path.glob(".reader-*")) == []


@pytest.mark.parametrize(("age_s", "gone"), [(MARK_LASTS_S - 60, []), (MARK_LASTS_S + 60, [1])])
def test_the_mark_of_another_machine_ends_when_it_is_not_renewed(tmp_path: Path, age_s: float, gone: list[int]) -> None:
    """By the time stamps of the file system."""
    for step in (1, 2):
        sealed(tmp_path, step)
    mark_of(tmp_path, 1, elsewhere(), age_s)

    assert delete(tmp_path, Rule(keep=1)) == gone


def test_a_renewal_makes_a_mark_young_again(tmp_path: Path) -> None:
    """It is what the thread of a reader does."""
    reader = readers.Reading(tmp_path, processes.describe_writer(0, 1))
    reader.mark(5)
    path = next(tmp_path.glob(".reader-*"))
    os.utime(path, (1.0, 1.0))

    reader.renew()

    assert path.stat().st_mtime > 1e9
    reader.end()
    reader.renew()  # after the end: nothing comes back
    assert not path.exists()


def test_a_mark_that_is_nonsense_holds_until_it_is_old(tmp_path: Path) -> None:
    """Cut short, a link, or of a later version: perhaps a reader, so ten minutes are given."""
    for step in (1, 2, 3):
        sealed(tmp_path, step)
    (tmp_path / f".reader-00000001.{'a' * 32}.json").write_bytes(b'{"proc')
    (tmp_path / f".reader-00000002.{'b' * 32}.json").symlink_to("/dev/zero")
    (tmp_path / ".reader-00000002.json").write_bytes(b"no mark of ours")

    assert set(readers.readers_of(tmp_path)) == {1, 2}
    os.utime(tmp_path / f".reader-00000001.{'a' * 32}.json", (1.0, 1.0))
    assert delete(tmp_path, Rule(keep=1)) == [1]


def test_a_folder_that_takes_no_mark_is_read_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A restore from a full disk goes on, and says what it lacks."""
    with caplog.at_level(logging.WARNING), readers.reading(tmp_path / "nowhere", 0, 1) as reader:
        reader.mark(7)

    assert [record.message for record in caplog.records] == [
        f"step 7 of {tmp_path}/nowhere is read without a mark, and may be deleted meanwhile: No such file or directory"
    ]


def test_a_glance_sees_what_sizes_tell(tmp_path: Path) -> None:
    """A shard that is missing or cut short, and the metric; a flipped byte takes a digest."""
    whole = deletion.glance(sealed(tmp_path, 1))
    (sealed(tmp_path, 2) / "__0_0.distcp").write_bytes(b"short")
    (sealed(tmp_path, 3) / manifest.FILE_NAME).unlink()
    flipped = sealed(tmp_path, 4) / "__0_0.distcp"
    flipped.write_bytes(b"X" + flipped.read_bytes()[1:])

    assert whole.ok
    assert whole.manifest is not None
    assert whole.size_bytes > sum(entry.size_bytes for entry in whole.manifest.files)
    assert [fault.kind for fault in deletion.glance(storage.final_folder(tmp_path, 2)).faults] == ["size differs"]
    assert [fault.kind for fault in deletion.glance(storage.final_folder(tmp_path, 3)).faults] == ["missing"]
    assert deletion.glance(storage.final_folder(tmp_path, 4)).ok
