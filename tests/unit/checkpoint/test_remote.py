# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at URLs, in fsspec's file system in memory: the same promises as in a folder, without a rename."""

import builtins
import logging
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from megascale_ops.checkpoint import CheckpointManager, LocalTier
from megascale_ops.checkpoint import manifest as manifests
from megascale_ops.checkpoint.tiers import filesystems, store_saves
from megascale_ops.checkpoint.tiers.filesystems import Store, bounded
from megascale_ops.checkpoint.writer_lock import KEEPER
from megascale_ops.cli.checkpoint import stores
from megascale_ops.errors import CheckpointError, UsageError
from tests.fakes.checkpoints import Crash


@pytest.fixture
def url() -> Iterator[str]:
    """A folder in memory, emptied at the end."""
    place = f"memory://{uuid.uuid4().hex}/run7"
    yield place
    filesystem, path = fsspec.core.url_to_fs(place)
    if filesystem.exists(path):
        filesystem.rm(path, recursive=True)


def files_of(url: str, ending: str = "") -> list[str]:
    """All files below a URL whose names end so."""
    filesystem, path = fsspec.core.url_to_fs(url)
    return [name.removeprefix(f"{path}/") for name in sorted(filesystem.find(path)) if name.endswith(ending)]


def change(url: str, name: str, data: bytes | None) -> None:
    """Write a file past the store, or delete it."""
    filesystem, path = fsspec.core.url_to_fs(url)
    if data is None:
        filesystem.rm(f"{path}/{name}")
    else:
        filesystem.pipe_file(f"{path}/{name}", data)


def states(seed: int) -> dict[str, Any]:
    """A state with a large tensor, a small one and a number."""
    whole = torch.randn(400_000, generator=torch.Generator().manual_seed(seed))
    return {"large": whole, "small": whole[:3].clone(), "tokens": seed}


def test_a_state_comes_back_bit_for_bit(url: str) -> None:
    """The newest, into a manager that has not saved."""
    manager = CheckpointManager(url)
    for step in (1, 2):
        manager.save(step, states(step))
    state = states(0)

    assert CheckpointManager(url).restore(state) == 2
    assert torch.equal(state["large"], states(2)["large"])
    assert state["tokens"] == 2


def test_a_folder_that_was_copied_to_a_store_is_no_silent_start_from_nothing(url: str, tmp_path: Path) -> None:
    """What to do is said, by the restore and by `ls`; done so, it comes back. The control: an empty place is none."""
    CheckpointManager(tmp_path).save(7, states(7))
    assert CheckpointManager(url).restore(states(0)) == -1
    for path in (tmp_path / "step-00000007").iterdir():
        change(url, f"step-00000007/{path.name}", path.read_bytes())

    with pytest.raises(CheckpointError, match="was copied from a folder") as caught:
        CheckpointManager(url).restore(states(0))
    with pytest.raises(UsageError, match="was copied from a folder"):
        stores.store_of(url)
    deeper = str(caught.value).rpartition("files to ")[2].removeprefix(f"{url}/")
    for path in (tmp_path / "step-00000007").iterdir():
        change(url, f"{deeper}{path.name}", path.read_bytes())
        change(url, f"step-00000007/{path.name}", None)
    state = states(0)

    assert CheckpointManager(url).restore(state) == 7
    assert torch.equal(state["large"], states(7)["large"])


def test_only_what_is_needed_is_read(url: str) -> None:
    """A file of which nothing is needed stays where it is."""
    manager = CheckpointManager(url)
    manager.save(1, states(1))

    assert manager.restore({"small": torch.zeros(3)}) == 1
    assert manager.traffic.read_bytes < 2000


def test_nothing_saved_yet_is_minus_one(url: str) -> None:
    """An empty place."""
    assert CheckpointManager(url).restore({"a": 1}) == -1


@pytest.mark.parametrize("damage", ["flipped", "missing", "manifest"])
def test_a_damaged_newest_is_passed_over(url: str, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """By its digest, its size, its manifest."""
    manager = CheckpointManager(url)
    for step in (1, 2):
        manager.save(step, states(step))
    ending = manifests.FILE_NAME if damage == "manifest" else "_1.tensors"
    name = files_of(url, ending)[-1]
    filesystem, path = fsspec.core.url_to_fs(url)
    data = bytearray(filesystem.cat_file(f"{path}/{name}"))
    data[len(data) // 2] ^= 1
    change(url, name, None if damage == "missing" else bytes(data))
    state = states(0)

    with caplog.at_level(logging.WARNING, "megascale_ops.checkpoint"):
        assert manager.restore(state) == 1

    assert torch.equal(state["large"], states(1)["large"])
    assert [report.step for report in manager.skipped] == [2]
    assert caplog.text.count("skipped: checkpoint of step 2 is damaged") == 1


def test_without_its_manifest_a_save_is_not_there_and_the_next_one_clears_it(url: str) -> None:
    """The manifest is written last: a save that broke off left everything else."""
    manager = CheckpointManager(url)
    for step in (1, 2):
        manager.save(step, states(step))
    change(url, files_of(url, manifests.FILE_NAME)[-1], None)

    assert manager.restore(states(0)) == 1
    manager.save(3, states(3))
    assert {name.partition("/")[0] for name in files_of(url, "tensors")} == {"step-00000001", "step-00000003"}


def test_what_has_no_reason_to_stay_goes_and_a_step_saved_again_replaces_the_former(url: str) -> None:
    """The newest two, the best, and of step 5 the later save alone."""
    manager = CheckpointManager(url, keep=2, keep_best=1)
    for step, loss in enumerate([3.0, 1.0, 2.0, 4.0], start=2):
        manager.save(step, states(step), metric=loss)
    manager.save(5, states(55), metric=4.0)
    state = states(0)

    sealed = files_of(url, manifests.FILE_NAME)
    assert [name.partition("/")[0] for name in sealed] == ["step-00000003", "step-00000004", "step-00000005"]
    assert manager.restore(state) == 5
    assert state["tokens"] == 55


def test_a_save_that_fails_leaves_nothing_and_the_one_before_stays(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store refuses the second file."""
    manager = CheckpointManager(url)
    manager.save(1, states(1))
    before, upload = files_of(url), Store.upload

    def refused(store: Store, local: str, name: str, size_bytes: int) -> None:
        if name.endswith("_1.tensors"):
            raise OSError("503 Slow Down")
        upload(store, local, name, size_bytes)

    monkeypatch.setattr(Store, "upload", refused)
    with pytest.raises(CheckpointError, match=f"saving step 2 to {url} failed: 503 Slow Down"):
        manager.save(2, states(2))

    assert files_of(url) == before


def test_a_crash_at_any_request_leaves_the_newest_that_was_sealed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second save, and the deletion of the first, cut off at every request in turn."""
    found = []
    for moment in range(60):
        place = f"{url}/{moment}"
        CheckpointManager(place, keep=1).save(1, states(1))
        with monkeypatch.context() as patched:
            left = [moment]

            def counted(request: Any, left: list[int] = left) -> Any:  # noqa: ANN401  as it is
                def call(*given: Any, **named: Any) -> Any:  # noqa: ANN401  same
                    if threading.current_thread().name == KEEPER:  # it comes when its time has come
                        return request(*given, **named)
                    if not left[0]:
                        raise Crash
                    left[0] -= 1
                    return request(*given, **named)

                return call

            manager = CheckpointManager(place, keep=1)
            for name in ("put", "upload", "delete"):
                patched.setattr(Store, name, counted(getattr(Store, name)))
            with suppress(Crash):
                manager.save(2, states(2))
        state = states(0)
        step = CheckpointManager(place).restore(state)
        assert torch.equal(state["large"], states(step)["large"])
        found.append(step)
        if left[0]:
            break

    assert found == sorted(found)
    assert set(found) == {1, 2}


def test_a_second_writer_is_refused_by_name(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another job on another machine, whose lease was renewed while one looked."""
    import msgspec

    from megascale_ops.checkpoint import processes, writer_lock

    other = processes.describe_writer(0, 1)
    elsewhere = msgspec.structs.replace(other.process, host="node-b", boot_id="b", pid=7)
    other = msgspec.structs.replace(other, process=elsewhere, node="node-b", job="demo")
    change(url, ".writer-00000003.json", msgspec.json.encode(other))
    manager = CheckpointManager(url)
    monkeypatch.setattr(
        writer_lock.time, "sleep", lambda _: change(url, ".writer-00000003.json", msgspec.json.encode(other))
    )

    with pytest.raises(CheckpointError, match=r"saving step 1 .* job demo \(rank 0, pid 7 on node-b"):
        manager.save(1, states(1))


def test_an_ended_writer_is_replaced(url: str) -> None:
    """The name of this job stands there afterwards, alone."""
    first = CheckpointManager(url)
    first.save(1, states(1))
    first.close()

    CheckpointManager(url).save(2, states(2))

    assert files_of(url, ".json")[0] == ".writer-00000002.json"


def test_the_nodes_are_the_near_tier_of_a_store(url: str, tmp_path: Any) -> None:  # noqa: ANN401  a path
    """Every step on the node, every tenth in the store; the identity stands in the store."""
    manager = CheckpointManager(url, local=LocalTier(tmp_path), shared_every=10)
    for step in (1, 2, 3):
        manager.save(step, states(step))
    state = states(0)

    assert CheckpointManager(url, local=LocalTier(tmp_path), shared_every=10).restore(state) == 3
    assert state["tokens"] == 3
    assert CheckpointManager(url).restore(state) == 1
    assert ".identity" in files_of(url)


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("gopher://here/run7", r"checkpoints at gopher://here/run7: fsspec knows no gopher://, but for example s3://"),
        ("gdrive://here/run7", r"checkpoints at gdrive://here/run7 need a package that is not installed: .*gdrive"),
        ("http://127.0.0.1:9/run7", r"cannot write checkpoints to http://127.0.0.1:9/run7: "),
    ],
)
def test_a_place_that_cannot_be_is_refused_in_one_sentence(place: str, sentence: str) -> None:
    """An unknown kind, a missing package, a store that can only be read."""
    with pytest.raises(UsageError, match=sentence) as caught:
        CheckpointManager(place)

    assert "\n" not in str(caught.value)


def test_without_fsspec_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra, though torch usually brings it."""
    real = builtins.__import__

    def without(name: str, *given: Any) -> Any:  # noqa: ANN401  as it is
        if name.startswith("fsspec"):
            raise ImportError(name)
        return real(name, *given)

    monkeypatch.setattr(builtins, "__import__", without)

    with pytest.raises(UsageError, match=r"need the package fsspec: pip install 'megascale-ops\[storage\]'"):
        CheckpointManager("s3://bucket/run7")


def test_a_store_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call goes on in a thread that holds nothing up."""
    import threading

    monkeypatch.setattr(filesystems, "_ANSWER_S", 0.01)
    held = threading.Event()

    with pytest.raises(TimeoutError, match="looking: no answer in 0 s"):
        bounded("looking", held.wait)

    held.set()


def test_whatever_a_library_raises_is_an_error_of_the_store() -> None:
    """In one line, with what was being done."""

    def fail() -> None:
        raise RuntimeError("InvalidAccessKeyId\nand a page more")

    with pytest.raises(OSError, match=r"listing: RuntimeError: InvalidAccessKeyId$"):
        bounded("listing", fail)


def test_what_a_restore_reads_is_marked_and_not_deleted_meanwhile(url: str) -> None:
    """A job that keeps one checkpoint saves the next one in the middle of the restore; the mark goes at the end."""
    from megascale_ops.checkpoint import notify
    from megascale_ops.checkpoint.tiers import store_readers

    writing = CheckpointManager(url, keep=1)
    writing.save(1, states(1))
    read: list[set[int]] = []

    def save_meanwhile(*_: object) -> None:
        if not read:
            read.append(set(store_readers.readers_of(Store(url))))
            writing.save(2, states(2))

    state = states(0)
    notify.progress_observers.append(save_meanwhile)
    try:
        assert CheckpointManager(url).restore(state) == 1
    finally:
        notify.progress_observers.remove(save_meanwhile)

    assert read == [{1}]
    assert torch.equal(state["large"], states(1)["large"])
    assert store_readers.readers_of(Store(url)) == {}
    writing.save(3, states(3))
    assert {name.partition("/")[0] for name in files_of(url, manifests.FILE_NAME)} == {"step-00000003"}


def test_what_is_being_deleted_is_not_read(url: str) -> None:
    """A deletion has begun with the newest, and broke off: the one before is restored, and the next save clears up."""
    manager = CheckpointManager(url)
    for step in (1, 2):
        manager.save(step, states(step))
    (newest,) = [name for name in files_of(url, manifests.FILE_NAME) if "step-00000002" in name]
    change(url, newest.replace(manifests.FILE_NAME, ".doomed"), b"")

    assert manager.restore(states(0)) == 1
    manager.save(3, states(3))
    assert not [name for name in files_of(url) if "step-00000002" in name]


def test_half_a_checkpoint_pushes_no_whole_one_out(url: str) -> None:
    """Of the newest a file is missing: it counts for nothing."""
    manager = CheckpointManager(url, keep=2)
    for step in (1, 2):
        manager.save(step, states(step))
    change(url, next(name for name in files_of(url, "_1.tensors") if "step-00000002" in name), None)
    manager.save(3, states(3))

    assert [one.step for one in store_saves.sealed(Store(url)) if store_saves.glance(Store(url), one.folder).ok] == [
        3,
        1,
    ]
