# SPDX-License-Identifier: Apache-2.0
"""The writers of all ranks make one checkpoint of one save, or none."""

from pathlib import Path

import msgspec
import pytest

from megascale_ops.checkpoint import latest, lock_files, plan, processes, storage
from megascale_ops.checkpoint.background import shared_save, shares
from megascale_ops.checkpoint.background.messages import FileImage, Job
from megascale_ops.checkpoint.background.shared_save import SharedSave
from megascale_ops.checkpoint.background.shares import Begun, Share
from megascale_ops.checkpoint.manifest import Manifest
from megascale_ops.checkpoint.ranks import EchoError
from megascale_ops.checkpoint.retention import Rule
from megascale_ops.errors import CheckpointError
from tests.fakes.save_trainer import SaveTrainer

WRITER = 1
BUFFER = bytes(range(256)) * 40


def job_of(root: Path, rank: int, *, world_size: int, step: int = 3, rule: Rule | None = None, save: str = "t") -> Job:
    """A save whose files are two stretches of ``BUFFER``."""
    images = (FileImage(f"__{rank}_0.tensors", 0, 5000), FileImage(f"__{rank}_0.msgpack", 8192, 77))
    sealed = Manifest(step=step, world_size=world_size, written_wall_s=0.0, files=(), metric=0.25)
    plan_of = b"" if rank else b"the plan"
    return Job(save, str(root), WRITER, rank, len(BUFFER), images, plan_of, sealed, rule or Rule())


def folder_of(root: Path) -> Path:
    """Where a save is written."""
    return storage.partial_folder(root, 3, WRITER)


def write_rank_1(root: Path) -> SharedSave:
    """Rank 1's writer does its part."""
    save = SharedSave(job_of(root, 1, world_size=2), SaveTrainer())
    save.write(memoryview(BUFFER))
    return save


def test_one_rank_alone_writes_seals_and_deletes(tmp_path: Path) -> None:
    """The checkpoint verifies, says what the training process said, holds nothing else; the oldest one goes."""
    for step in (1, 2, 3):
        save = SharedSave(job_of(tmp_path, 0, world_size=1, step=step, rule=Rule(2)), SaveTrainer())
        assert save.write(memoryview(BUFFER)) == 5000 + 77 + len(b"the plan")
        assert save.seal()

    report = latest.inspect(tmp_path / "step-00000003")
    assert report.ok
    assert report.manifest is not None
    assert (report.manifest.metric, report.manifest.world_size) == (0.25, 1)
    assert report.manifest.written_wall_s > 0
    final = tmp_path / "step-00000003"
    names = {path.name: path.read_bytes() for path in final.iterdir() if path.name != "manifest.json"}
    assert names == {"__0_0.tensors": BUFFER[:5000], "__0_0.msgpack": BUFFER[8192:8269], plan.FILE_NAME: b"the plan"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_restart_knows_whom_to_wait_for_up_to_the_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files are there and nothing is visible yet: a restart that looks now must not go on with an older one."""
    save, known = SharedSave(job_of(tmp_path, 0, world_size=1), SaveTrainer()), list[Begun | None]()
    save.write(memoryview(BUFFER))
    rename = Path.rename

    def write_manifest(*_: object, **__: object) -> None:
        known.append(shares.begun_in(folder_of(tmp_path)))

    def rename_folder(path: Path, to: Path) -> Path:
        known.append(shares.begun_in(path))
        return rename(path, to)

    monkeypatch.setattr(storage, "write_whole", write_manifest)
    monkeypatch.setattr(Path, "rename", rename_folder)

    save.seal()

    assert known == [Begun("t", processes.this_process()), None]


def test_files_are_digested_as_the_training_process_said(tmp_path: Path) -> None:
    """By the algorithm of its manager; each is verified by that."""
    for step, algorithm in ((3, "xxh3_128"), (4, "sha256")):
        job = job_of(tmp_path, 0, world_size=1, step=step)
        save = SharedSave(msgspec.structs.replace(job, algorithm=algorithm), SaveTrainer())
        save.write(memoryview(BUFFER))
        save.seal()

        report = latest.inspect(storage.final_folder(tmp_path, step))
        assert report.ok
        assert report.manifest is not None
        assert {entry.digest.partition(":")[0] for entry in report.manifest.files} == {algorithm}


def test_the_seal_waits_for_the_files_of_all_ranks(tmp_path: Path) -> None:
    """Before the last one nothing is visible; then both ranks' files are in the manifest, and rank 1 hears of it."""

    def rank_1_comes() -> None:
        assert not (tmp_path / "step-00000003").exists()
        others.append(write_rank_1(tmp_path))

    others: list[SharedSave] = []
    save = SharedSave(job_of(tmp_path, 0, world_size=2), SaveTrainer())
    save.write(memoryview(BUFFER))
    save._trainer = SaveTrainer(lambda: None, rank_1_comes)

    assert save.seal()

    report = latest.inspect(tmp_path / "step-00000003")
    assert report.ok
    assert report.manifest is not None
    assert len(report.manifest.files) == 5
    assert others[0].await_seal()


def test_a_failure_of_another_rank_ends_the_save_on_this_one(tmp_path: Path) -> None:
    """As an echo: the cause is the other rank's. Nothing is sealed."""
    save = SharedSave(job_of(tmp_path, 0, world_size=2), SaveTrainer())
    save.write(memoryview(BUFFER))
    shares.tell(folder_of(tmp_path), Share("t", 1, failure="No space left on device"))

    with pytest.raises(EchoError, match="on rank 1: No space left on device"):
        save.seal()

    assert storage.candidates(tmp_path) == []


def test_a_save_that_another_rank_gave_up_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is gone and no checkpoint of these files came."""
    monkeypatch.setattr(shared_save, "_SETTLES_S", -1.0)
    shares.begin(tmp_path, 3, WRITER, Begun("t", processes.this_process()))
    save = write_rank_1(tmp_path)
    storage.abandon(tmp_path, 3, WRITER)

    with pytest.raises(EchoError, match="another rank's part"):
        save.await_seal()


def test_an_older_checkpoint_of_the_same_step_is_not_taken_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is saved again: what counts is that this rank's very files were sealed."""
    first = SharedSave(job_of(tmp_path, 0, world_size=1), SaveTrainer())
    first.write(memoryview(BUFFER))
    first.seal()
    monkeypatch.setattr(shared_save, "_SETTLES_S", -1.0)
    shares.begin(tmp_path, 3, WRITER, Begun("t", processes.this_process()))
    save = write_rank_1(tmp_path)
    storage.abandon(tmp_path, 3, WRITER)

    with pytest.raises(EchoError):
        save.await_seal()


def test_a_rank_waits_for_the_folder_of_its_own_save(tmp_path: Path) -> None:
    """One of an earlier save under the same name is not its folder; when its own comes, it writes there."""
    shares.begin(tmp_path, 3, WRITER, Begun("older", processes.this_process()))
    begin = lambda: shares.begin(tmp_path, 3, WRITER, Begun("t", processes.this_process()))  # noqa: E731
    trainer = SaveTrainer(lambda: None, begin, *[lambda: None] * 9)

    SharedSave(job_of(tmp_path, 1, world_size=2), trainer).write(memoryview(BUFFER))

    assert (folder_of(tmp_path) / "__1_0.tensors").read_bytes() == BUFFER[:5000]
    with pytest.raises(CheckpointError, match="given it up"):
        SharedSave(job_of(tmp_path, 1, world_size=2, save="other"), SaveTrainer()).write(memoryview(BUFFER))


def test_a_training_process_that_is_gone_needs_no_outcome(tmp_path: Path) -> None:
    """Nor does one that sends the next job: the rank's writer stops watching, and reports nothing."""
    shares.begin(tmp_path, 3, WRITER, Begun("t", processes.this_process()))
    save = write_rank_1(tmp_path)
    save._trainer = SaveTrainer(orphaned=True)

    assert not save.await_seal()


def test_a_save_whose_training_process_ended_before_it_began_is_none(tmp_path: Path) -> None:
    """A restart may have looked for it already."""
    save = SharedSave(job_of(tmp_path, 0, world_size=1), SaveTrainer(orphaned=True))

    with pytest.raises(CheckpointError, match="ended before the folder was made"):
        save.write(memoryview(BUFFER))


def test_a_folder_that_another_job_has_taken_is_not_sealed(tmp_path: Path) -> None:
    """The lock's newest number is another one's by now."""
    save = SharedSave(job_of(tmp_path, 0, world_size=1), SaveTrainer())
    save.write(memoryview(BUFFER))
    lock_files.create(tmp_path, WRITER + 1, processes.describe_writer(0, 1))

    with pytest.raises(CheckpointError, match="has taken this folder over"):
        save.seal()

    assert storage.candidates(tmp_path) == []


def test_a_rank_that_ended_before_it_handed_its_copy_over_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training processes are gone, and of rank 1 nothing comes: the restart that waits is more urgent."""

    def everything_ends() -> None:
        trainer.orphaned = True

    save = SharedSave(job_of(tmp_path, 0, world_size=2), SaveTrainer())
    save.write(memoryview(BUFFER))
    save._trainer = trainer = SaveTrainer(everything_ends, *[lambda: None] * 9)
    monkeypatch.setattr(shared_save, "ORPHAN_PATIENCE_S", -1.0)

    with pytest.raises(CheckpointError, match="waiting until all ranks' writers are done"):
        save.seal()

    assert trainer.heard == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_comes_before_the_end_of_another_shows_that_it_failed(tmp_path: Path, rank: int) -> None:
    """Rank 0's writer waits for no rank any more, and rank 1's not for the folder."""

    def the_next_job_comes() -> None:
        trainer.told = True

    trainer = SaveTrainer()
    save = SharedSave(job_of(tmp_path, rank, world_size=2), trainer)
    if rank == 0:
        save.write(memoryview(BUFFER))
    trainer._events = [the_next_job_comes, *[lambda: None] * 9]

    with pytest.raises(EchoError, match="gone on to another save"):
        save.seal() if rank == 0 else save.write(memoryview(BUFFER))

    assert storage.candidates(tmp_path) == []


def test_patience_ends_where_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the sentence says what was waited for."""
    save = SharedSave(job_of(tmp_path, 0, world_size=2), SaveTrainer())
    save.write(memoryview(BUFFER))
    save._trainer = SaveTrainer(*[lambda: None] * 9)
    monkeypatch.setattr(shared_save, "PATIENCE_S", -1.0)

    with pytest.raises(CheckpointError, match="waiting until all ranks' writers are done"):
        save.seal()
