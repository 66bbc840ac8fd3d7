# SPDX-License-Identifier: Apache-2.0
"""Writer processes meet in the folder that they write to, and take nothing from another save."""

from pathlib import Path

import pytest

from megascale_ops.checkpoint import processes, storage
from megascale_ops.checkpoint.background import shares
from megascale_ops.checkpoint.background.messages import FileImage, Job
from megascale_ops.checkpoint.background.shares import Begun, Share
from megascale_ops.checkpoint.manifest import FileEntry, Manifest
from megascale_ops.checkpoint.retention import Rule

WRITER = 4
ENTRY = FileEntry("__1_0.tensors", 5, "xxh3_128:" + "ab" * 16)


def job_of(root: Path, rank: int, save: str = "t") -> Job:
    """A save of step 3 by two ranks."""
    sealed = Manifest(step=3, world_size=2, written_wall_s=0.0, files=())
    return Job(save, str(root), WRITER, rank, 0, (FileImage(f"__{rank}_0.tensors", 0, 5),), b"", sealed, Rule())


def begun(root: Path, save: str = "t") -> Path:
    """The folder of a save."""
    return shares.begin(root, 3, WRITER, Begun(save, processes.this_process()))


def test_what_ranks_tell_is_found_once_and_by_its_token(tmp_path: Path) -> None:
    """A share of another save, of another rank's name or of no sense counts nothing."""
    folder, known = begun(tmp_path), {0: Share("t", 0)}
    shares.tell(folder, Share("t", 1, (ENTRY,)))
    shares.tell(folder, Share("older", 2, (ENTRY,)))
    (folder / ".share-3.json").write_bytes((folder / ".share-1.json").read_bytes())
    (folder / ".share-4.json").write_text("{")
    (folder / ".share-5.json").mkdir()

    shares.collect(folder, "t", known)

    assert known == {0: Share("t", 0), 1: Share("t", 1, (ENTRY,))}


def test_nothing_of_what_was_told_is_left_to_be_sealed(tmp_path: Path) -> None:
    """Whether all ranks told something or not; who makes the save is known up to the seal, and not after it."""
    folder = begun(tmp_path)
    shares.tell(folder, Share("t", 1, (ENTRY,)))

    shares.clear(folder, 2)

    assert [path.name for path in folder.iterdir()] == [shares.BEGUN]
    sealed = storage.seal(tmp_path, job_of(tmp_path, 0).sealed, WRITER, without=shares.BEGUN)
    assert [path.name for path in sealed.iterdir()] == ["manifest.json"]


def test_the_leading_rank_gives_up_by_removing_the_folder(tmp_path: Path) -> None:
    """Of this save, and of no other that stands under the same name by now."""
    folder = begun(tmp_path)

    shares.give_up(tmp_path, job_of(tmp_path, 0, "older"), "full")
    assert folder.exists()
    shares.give_up(tmp_path, job_of(tmp_path, 0), "full")
    assert not folder.exists()


def test_another_rank_gives_its_space_back_and_says_why(tmp_path: Path) -> None:
    """Its own files go, those of other ranks stay: the leading rank removes them with the folder."""
    folder, known = begun(tmp_path), dict[int, Share]()
    for rank in (0, 1):
        (folder / f"__{rank}_0.tensors").write_bytes(b"12345")

    shares.give_up(tmp_path, job_of(tmp_path, 1), "No space left on device")

    shares.collect(folder, "t", known)
    assert known == {1: Share("t", 1, failure="No space left on device")}
    assert sorted(path.name for path in folder.glob("__*")) == ["__0_0.tensors"]


def test_a_save_shows_that_it_goes_on_by_a_time_stamp(tmp_path: Path) -> None:
    """And a folder that is not there shows nothing."""
    folder = begun(tmp_path)
    before_ns = shares.renewed_ns(folder)
    assert before_ns > 0

    shares.renew(folder)
    storage.abandon(tmp_path, 3, WRITER)

    assert shares.renewed_ns(folder) == 0


@pytest.mark.parametrize("text", ["", "[]", '{"token": 3}', "nul"])
def test_a_folder_of_no_sense_is_not_begun(tmp_path: Path, text: str) -> None:
    """Whatever stands in the file."""
    (tmp_path / ".begun.json").write_text(text)

    assert shares.begun_in(tmp_path) is None
