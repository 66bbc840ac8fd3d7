# SPDX-License-Identifier: Apache-2.0
"""What checkpoint folders promise on disk."""

from pathlib import Path

import pytest

from megascale_ops.checkpoint import deletion, latest, storage
from megascale_ops.checkpoint.manifest import FileEntry, Manifest
from megascale_ops.checkpoint.retention import Rule
from megascale_ops.errors import CheckpointError, UsageError
from tests.fakes.checkpoints import SHARDS, Crash, count_down, sealed

WRITER = 7


def steps(root: Path) -> list[int]:
    """The steps on disk, newest first."""
    return [storage.step_of(path) for path in storage.candidates(root)]


def test_only_whole_folders_are_candidates_newest_first(tmp_path: Path) -> None:
    """Partial folders, files and strangers are not checkpoints; numbers sort as numbers."""
    for step in (5, 120, 123_456_789):
        sealed(tmp_path, step)
    storage.begin(tmp_path, 130, WRITER)
    (tmp_path / "step-00000140").write_text("a file")
    (tmp_path / "step-last").mkdir()

    assert steps(tmp_path) == [123_456_789, 120, 5]
    assert steps(tmp_path / "nowhere") == []


def test_the_next_save_clears_what_interrupted_ones_left(tmp_path: Path) -> None:
    """Space lost to a crash comes back without anybody's help."""
    sealed(tmp_path, 1)
    (storage.begin(tmp_path, 2, WRITER) / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / ".step-00000000.deleted").mkdir()

    storage.begin(tmp_path, 3, WRITER)

    assert sorted(path.name for path in tmp_path.iterdir()) == [".step-00000003.7.partial", "step-00000001"]


def test_an_abandoned_save_leaves_nothing(tmp_path: Path) -> None:
    """Its space is given back at once."""
    storage.begin(tmp_path, 3, WRITER)

    storage.abandon(tmp_path, 3, WRITER)

    assert list(tmp_path.iterdir()) == []


def test_sealing_again_replaces_the_former_checkpoint_of_the_step(tmp_path: Path) -> None:
    """After a fallback the same step is saved again; the new one counts."""
    sealed(tmp_path, 7)

    folder = sealed(tmp_path, 7, {"__0_0.distcp": b"new"})

    assert (folder / "__0_0.distcp").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_a_shard_that_did_not_reach_this_host_is_not_sealed(tmp_path: Path) -> None:
    """A folder that is not shared by all nodes is noticed at the first save, not at the restore."""
    storage.begin(tmp_path, 1, WRITER)
    manifest = Manifest(step=1, world_size=2, written_wall_s=1.0, files=(FileEntry("__1_0.distcp", 1, "aa"),))

    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is not here .* all nodes must share this folder"):
        storage.seal(tmp_path, manifest, WRITER)

    assert steps(tmp_path) == []


def test_a_path_that_cannot_be_a_folder_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """The path and the system's reason, nothing else."""
    (tmp_path / "file").write_text("")

    with pytest.raises(UsageError, match=r"^cannot write checkpoints to .*/file/below: Not a directory$"):
        storage.prepare_root(tmp_path / "file" / "below")


def test_a_crash_at_any_file_operation_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving a step anew and deleting old ones, cut off at every operation in turn: the newest never gets worse."""
    moments = 0
    for moment in range(200):
        root = tmp_path / str(moment)
        sealed(root, 1)
        sealed(root, 2)
        with monkeypatch.context() as patched:
            left = count_down(patched, moment)
            try:
                sealed(root, 2, SHARDS | {"__1_0.distcp": b"again"})
                deletion.carry_out(root, deletion.plan(root, Rule(keep=1), newest_step=2))
            except Crash:
                moments += 1

        choice = latest.newest(root)

        assert choice.newest is not None
        assert choice.newest.step == 2
        assert choice.skipped == ()
        if left[0]:
            assert steps(root) == [2]
            break
    assert moments > 15, "the count did not reach the file operations"
