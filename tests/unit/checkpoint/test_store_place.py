# SPDX-License-Identifier: Apache-2.0
"""The writers of all ranks make one checkpoint in a store, or none; in fsspec's file system in memory."""

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import fsspec
import pytest

from megascale_ops.checkpoint import plan, processes
from megascale_ops.checkpoint.background import store_place, unfinished, uploads
from megascale_ops.checkpoint.background.messages import FileImage, Job
from megascale_ops.checkpoint.background.shared_save import SharedSave
from megascale_ops.checkpoint.background.shares import Begun, Share
from megascale_ops.checkpoint.manifest import Manifest
from megascale_ops.checkpoint.ranks import EchoError
from megascale_ops.checkpoint.retention import Rule
from megascale_ops.checkpoint.tiers import store_saves
from megascale_ops.checkpoint.tiers.filesystems import Store
from megascale_ops.checkpoint.tiers.store_names import StoreNames
from megascale_ops.errors import CheckpointError
from tests.fakes.checkpoints import Crash
from tests.fakes.save_trainer import SaveTrainer

WRITER = 1
BUFFER = bytes(range(256)) * 40
TOKEN = "a" * 32


@pytest.fixture
def url() -> Iterator[str]:
    """A place in memory that a training process holds; emptied at the end."""
    place = f"memory://{uuid.uuid4().hex}/run7"
    StoreNames(Store(place)).create(WRITER, processes.describe_writer(0, 1))
    yield place
    filesystem, path = fsspec.core.url_to_fs(place)
    filesystem.rm(path, recursive=True)


def job_of(url: str, rank: int, *, world_size: int, step: int = 3, token: str = TOKEN, rule: Rule | None = None) -> Job:
    """A save whose files are two stretches of ``BUFFER``."""
    images = (FileImage(f"__{rank}_0.tensors", 0, 5000), FileImage(f"__{rank}_0.msgpack", 8192, 77))
    sealed = Manifest(step=step, world_size=world_size, written_wall_s=0.0, files=(), metric=0.25)
    plan_of = b"" if rank else b"the plan"
    return Job(token, url, WRITER, rank, len(BUFFER), images, plan_of, sealed, rule or Rule())


def save_of(url: str, rank: int, **more: Any) -> SharedSave:  # noqa: ANN401  of several types
    """One rank's part, whose training process only listens."""
    return SharedSave(job_of(url, rank, **more), SaveTrainer())


def write_rank_1(url: str) -> SharedSave:
    """Rank 1's writer does its part."""
    save = save_of(url, 1, world_size=2)
    save.write(memoryview(BUFFER))
    return save


def files_of(url: str) -> dict[str, bytes]:
    """All that is there but the names of writers."""
    filesystem, path = fsspec.core.url_to_fs(url)
    names = [name for name in filesystem.find(path) if "/.writer-" not in name]
    return {name.removeprefix(f"{path}/"): filesystem.cat_file(name) for name in names}


def test_one_rank_alone_writes_seals_and_deletes(url: str) -> None:
    """Its files, bit for bit, a manifest that promises them, nothing of what writers told; the oldest one goes."""
    for step in (1, 2, 3):
        save = save_of(url, 0, world_size=1, step=step, token=f"{step}" * 32, rule=Rule(2))
        assert save.write(memoryview(BUFFER)) == 5000 + 77 + len(b"the plan")
        assert save.seal()

    there = files_of(url)
    assert {name.partition("/")[0] for name in there} == {"step-00000002", "step-00000003"}
    folder = f"step-00000003/{'3' * 32}"
    seen = store_saves.glance(Store(url), folder)
    assert seen.ok
    assert seen.manifest is not None
    assert (seen.manifest.metric, seen.manifest.world_size, seen.manifest.written_wall_s > 0) == (0.25, 1, True)
    names = {name.rpartition("/")[2]: raw for name, raw in there.items() if name.startswith(f"{folder}/__")}
    assert names == {"__0_0.tensors": BUFFER[:5000], "__0_0.msgpack": BUFFER[8192:8269]}
    assert there[f"{folder}/{plan.FILE_NAME}"] == b"the plan"
    assert len([name for name in there if name.startswith(folder)]) == 4


def test_the_manifest_comes_last_and_when_all_ranks_files_are_there(url: str) -> None:
    """Before the last rank nothing is sealed; rank 1 hears of the seal."""

    def rank_1_comes() -> None:
        assert store_saves.sealed(Store(url)) == []
        others.append(write_rank_1(url))

    others: list[SharedSave] = []
    save = save_of(url, 0, world_size=2)
    save.write(memoryview(BUFFER))
    save._trainer = SaveTrainer(lambda: None, rank_1_comes)

    assert save.seal()

    (one,) = store_saves.sealed(Store(url))
    seen = store_saves.glance(Store(url), one.folder)
    assert seen.ok
    assert seen.manifest is not None
    assert len(seen.manifest.files) == 5
    assert others[0].await_seal()


def test_a_failure_of_another_rank_ends_the_save_on_this_one(url: str) -> None:
    """As an echo, and nothing of it stays."""
    save = save_of(url, 0, world_size=2)
    save.write(memoryview(BUFFER))
    store_place.StorePlace(job_of(url, 1, world_size=2)).tell(Share(TOKEN, 1, failure="503 Slow Down"))

    with pytest.raises(EchoError, match="on rank 1: 503 Slow Down"):
        save.seal()

    save.give_up("on rank 1: 503 Slow Down")
    assert files_of(url) == {}


def test_what_a_rank_gives_up_is_told_and_its_files_go(url: str) -> None:
    """Its writer may have died: then its training process does so."""
    leading = save_of(url, 0, world_size=2)
    leading.write(memoryview(BUFFER))
    write_rank_1(url).give_up("the writer process 7 was killed by signal 9")

    with pytest.raises(EchoError, match="on rank 1: the writer process 7 was killed by signal 9"):
        leading.seal()

    assert not [name for name in files_of(url) if "/__1_" in name]


def test_another_job_that_has_taken_the_store_is_not_sealed_over(url: str) -> None:
    """Neither before the manifest is put nor while."""
    save = save_of(url, 0, world_size=1)
    save.write(memoryview(BUFFER))
    StoreNames(Store(url)).create(WRITER + 1, processes.describe_writer(0, 1))

    with pytest.raises(CheckpointError, match="has taken this place over"):
        save.seal()

    assert store_saves.sealed(Store(url)) == []


def test_files_that_are_cleared_away_while_it_is_sealed_take_the_seal_back(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job came between the last look and the manifest."""
    save = save_of(url, 0, world_size=1)
    save.write(memoryview(BUFFER))
    put = Store.put

    def late(store: Store, name: str, raw: bytes, *, anew: bool = False) -> None:
        put(store, name, raw, anew=anew)
        if name.endswith("manifest.json"):
            store.delete(name.replace("manifest.json", "__0_0.tensors"))

    monkeypatch.setattr(Store, "put", late)
    with pytest.raises(CheckpointError, match="cleared away"):
        save.seal()

    assert store_saves.sealed(Store(url)) == []


def test_a_restart_knows_whom_to_wait_for_until_the_manifest_is_there(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at before each request of the seal; when it is over nothing tells of it any more."""
    save, known = save_of(url, 0, world_size=1), list[str]()
    save.write(memoryview(BUFFER))

    def watched(call: Callable[..., object]) -> Callable[..., object]:
        def look(store: Store, *args: object, **options: object) -> object:
            known.extend(name for name in files_of(url) if name.endswith((store_place.BEGUN, "/manifest.json")))
            return call(store, *args, **options)

        return look

    for name in ("put", "delete"):
        monkeypatch.setattr(Store, name, watched(getattr(Store, name)))
    save.seal()
    monkeypatch.undo()

    kinds = [name.rpartition("/")[2] for name in known]
    assert kinds[:2] == [store_place.BEGUN] * 2, "before the shares go, and before the manifest comes"
    assert set(kinds[2:]) == {store_place.BEGUN, "manifest.json"}
    assert not [name for name in files_of(url) if name.endswith(store_place.BEGUN)]


def test_what_is_sealed_is_not_given_up(url: str) -> None:
    """The manifest is there, and its writer died before it could remove that it had begun."""
    save = save_of(url, 0, world_size=1)
    save.write(memoryview(BUFFER))
    begun = Store(url).read(f"{store_saves.folder_of(3, TOKEN)}/{store_place.BEGUN}", 1 << 16)
    save.seal()
    Store(url).put(f"{store_saves.folder_of(3, TOKEN)}/{store_place.BEGUN}", begun)

    save.give_up("the writer process 7 was killed by signal 9")

    (one,) = store_saves.sealed(Store(url))
    assert store_saves.glance(Store(url), one.folder).ok


def test_a_writer_that_sees_another_store_than_its_training_process_says_so() -> None:
    """As it were with credentials, or a file system, that only one of them has."""
    with pytest.raises(CheckpointError, match="does not see what its training process has written"):
        save_of(f"memory://{uuid.uuid4().hex}/run7", 0, world_size=1).write(memoryview(BUFFER))


def test_a_crash_at_any_request_leaves_what_was_sealed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second save, and the deletion of the first, cut off at every request in turn: whole ones alone are there."""
    found = []
    for moment in range(80):
        place = f"{url}/{moment}"
        StoreNames(Store(place)).create(WRITER, processes.describe_writer(0, 1))
        first = save_of(place, 0, world_size=1, step=1, token="1" * 32, rule=Rule(1))
        first.write(memoryview(BUFFER))
        first.seal()
        left = [moment]
        with monkeypatch.context() as patched:

            def counted(request: Any, left: list[int] = left) -> Any:  # noqa: ANN401  as it is
                def call(*given: Any, **named: Any) -> Any:  # noqa: ANN401  same
                    if not left[0]:
                        raise Crash
                    left[0] -= 1
                    return request(*given, **named)

                return call

            for name in ("put", "opened_to_write", "delete"):
                patched.setattr(Store, name, counted(getattr(Store, name)))
            with suppress(Crash, OSError):
                second = save_of(place, 0, world_size=1, step=2, token="2" * 32, rule=Rule(1))
                second.write(memoryview(BUFFER))
                second.seal()
        whole = [
            (one.step, store_saves.glance(Store(place), one.folder).ok) for one in store_saves.sealed(Store(place))
        ]
        assert whole
        assert all(ok for _, ok in whole)
        found.append(whole[0][0])
        if left[0]:
            break

    assert found == sorted(found)
    assert set(found) == {1, 2}


def test_a_restart_waits_for_an_unsealed_save_of_a_living_process_only(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is sealed; not for one whose process is dead, nor for one that is sealed."""
    save = save_of(url, 0, world_size=1)
    save.write(memoryview(BUFFER))
    looks: list[float] = []

    def pause(wait_s: float) -> None:
        looks.append(wait_s)
        if len(looks) == 3:
            save.seal()

    monkeypatch.setattr(unfinished.time, "sleep", pause)
    unfinished.await_in_store(Store(url))
    assert len(looks) == 3
    unfinished.await_in_store(Store(url))
    assert len(looks) == 3

    dead = processes.this_process()
    dead = type(dead)(dead.host, dead.boot_id, dead.pid_namespace, 2**22 - 1, 1)
    store_place.StorePlace(job_of(url, 0, world_size=1, step=4, token="b" * 32)).begin(Begun("b" * 32, dead))
    unfinished.await_in_store(Store(url))
    assert len(looks) == 3


class _Hanging:
    """A file of a store that takes nothing until it is told to."""

    def __init__(self, going: threading.Event) -> None:
        self._going = going

    def write(self, _block: memoryview) -> None:
        self._going.wait()

    def close(self) -> None:
        pass


def test_a_store_that_takes_nothing_is_given_up_and_an_order_is_heard_meanwhile(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's thread never waits for the store."""
    going = threading.Event()
    monkeypatch.setattr(Store, "opened_to_write", lambda *_: _Hanging(going))
    monkeypatch.setattr(uploads, "_LOOK_S", 0.001)
    heard: list[int] = []

    def give_up(count: int) -> None:
        heard.append(count)
        raise CheckpointError("the training process has given it up")

    with pytest.raises(CheckpointError, match="given it up"):
        uploads.upload_all(Store(url), [("a", "x/a", memoryview(BUFFER))], "sha256", give_up)
    monkeypatch.setattr(uploads, "_STALLED_S", 0.0)
    with pytest.raises(TimeoutError, match=r"writing to memory://.*: nothing was taken for 0 s"):
        uploads.upload_all(Store(url), [("a", "x/a", memoryview(BUFFER))], "sha256", lambda _: None)

    assert heard == [0]
    going.set()


def test_what_a_store_raises_is_one_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever kind it is; no file is begun after it."""
    begun: list[str] = []

    def refuse(_store: Store, name: str, _size: int) -> object:
        begun.append(name)
        raise RuntimeError("AccessDenied\nand a page more")

    monkeypatch.setattr(uploads, "_AT_ONCE", 1)
    monkeypatch.setattr(Store, "opened_to_write", refuse)
    files = [(name, name, memoryview(BUFFER)) for name in "abc"]

    with pytest.raises(OSError, match=r"writing to memory://\S+: RuntimeError: AccessDenied$"):
        uploads.upload_all(Store(url), files, "sha256", lambda _: None)

    assert begun == ["a"]
