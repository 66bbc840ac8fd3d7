# SPDX-License-Identifier: Apache-2.0
"""Reading a checkpoint once: what a file's stream sees, what is told on the way, and what a damaged file costs."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch

from megascale_ops.checkpoint import CheckpointManager, storage
from megascale_ops.checkpoint.allowed import Allowed
from megascale_ops.checkpoint.loading import reading
from megascale_ops.checkpoint.loading.landing import Landing, LandingField, Piece
from megascale_ops.checkpoint.loading.progress import LOG_EVERY_S, ProgressMeter
from megascale_ops.checkpoint.loading.reading import ReadingThreads
from megascale_ops.checkpoint.loading.restore import Restore
from megascale_ops.checkpoint.loading.sources import FolderSource, Opened
from megascale_ops.checkpoint.loading.stream import BlockStream, covering
from megascale_ops.checkpoint.manifest import CheckpointReport, FileEntry, Manifest
from megascale_ops.checkpoint.notify import Progress, progress_observers
from megascale_ops.checkpoint.plan import Chunk
from megascale_ops.checkpoint.ranks import Ranks
from megascale_ops.errors import CheckpointError

MEGABYTE = 1 << 20


@pytest.fixture
def threads() -> Iterator[ReadingThreads]:
    """What reads ahead."""
    made = ReadingThreads(2)
    yield made
    made.close()


def streamed(folder: Path, entry: FileEntry, threads: ReadingThreads) -> tuple[bytes, BlockStream]:
    """All blocks of a file, of 7 bytes each."""
    stream = BlockStream(FolderSource(folder), entry, 7, threads)
    blocks = -(-entry.size_bytes // 7)
    return b"".join(stream.take().numpy().tobytes() for _ in range(blocks)), stream


def test_a_stream_gives_the_bytes_and_their_digest(tmp_path: Path, threads: ReadingThreads) -> None:
    """Of a file as it was sealed."""
    (tmp_path / "a").write_bytes(bytes(range(100)))
    entry = storage.digest(tmp_path / "a")

    data, stream = streamed(tmp_path, entry, threads)

    assert data == bytes(range(100))
    assert stream.close() == storage.observe(tmp_path, entry)


@pytest.mark.parametrize("change", ["cut", "longer", "gone", "a link"])
def test_a_stream_goes_on_where_the_file_is_not_what_it_was(
    tmp_path: Path, threads: ReadingThreads, change: str
) -> None:
    """As many blocks come as were promised, for other ranks wait for them; what was wrong comes at the end."""
    path = tmp_path / "a"
    path.write_bytes(bytes(range(100)))
    entry = storage.digest(path)
    if change == "gone":
        path.unlink()
    elif change == "a link":
        path.rename(tmp_path / "b")
        path.symlink_to(tmp_path / "b")
    else:
        path.write_bytes(bytes(range(50 if change == "cut" else 101)))

    data, stream = streamed(tmp_path, entry, threads)
    seen = stream.close()

    assert len(data) == 100
    expected = {"cut": (50, ""), "longer": (101, ""), "gone": (None, ""), "a link": (None, "not a regular file")}
    assert (seen.size_bytes, seen.digest) == (expected[change][0], None)
    assert expected[change][1] in seen.error


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    """Entries with large tensors stand in files of their own; small ones share theirs."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"model": {"w": torch.ones(MEGABYTE), "b": torch.ones(3)}, "moments": torch.ones(2 * MEGABYTE)})

    manager.restore({"model": {"w": torch.zeros(MEGABYTE), "b": torch.zeros(3)}})

    assert manager.traffic.read_bytes < 4 * MEGABYTE + 1000
    assert sorted(manager.traffic.read_by_file) == ["__0_0.msgpack", "__0_0.tensors", "__0_1.tensors"]


def test_damage_in_what_is_not_needed_costs_nothing_and_is_found_where_it_is(tmp_path: Path) -> None:
    """The model is loaded although a moment flipped; all of the state is not, and no older one is there."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"model": torch.ones(MEGABYTE), "moments": torch.ones(MEGABYTE)})
    shards = sorted(storage.final_folder(tmp_path, 1).glob("*.tensors"))
    data = bytearray(shards[1].read_bytes())
    data[5] ^= 1
    shards[1].write_bytes(data)

    model = {"model": torch.zeros(MEGABYTE)}
    assert manager.restore(model) == 1
    assert torch.equal(model["model"], torch.ones(MEGABYTE))
    with pytest.raises(CheckpointError, match=r"none of the 1 .* __0_1.tensors digest differs"):
        manager.restore({"model": torch.zeros(MEGABYTE), "moments": torch.zeros(MEGABYTE)})


def test_a_state_that_does_not_fit_stays_as_it_was(tmp_path: Path) -> None:
    """It is refused before any tensor is read."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"a": torch.ones(5), "b": torch.ones(6)})
    state = {"a": torch.zeros(5), "b": torch.zeros(7)}

    with pytest.raises(CheckpointError, match="'b' does not fit"):
        manager.restore(state)

    assert state["a"].tolist() == [0] * 5


def test_observers_hear_how_far_a_restore_has_come(tmp_path: Path) -> None:
    """At its end at least: all of what it needs."""
    told: list[Progress] = []
    CheckpointManager(tmp_path).save(4, {"a": torch.ones(MEGABYTE)})
    progress_observers.append(told.append)
    try:
        CheckpointManager(tmp_path).restore({"a": torch.zeros(MEGABYTE)})
    finally:
        progress_observers.remove(told.append)

    assert told[-1].step == 4
    assert told[-1].done_bytes == told[-1].total_bytes > 4 * MEGABYTE


def test_an_observer_of_progress_that_fails_costs_no_restore(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is told of once and not called again."""

    def broken(_: Progress) -> None:
        raise RuntimeError("a listener's mistake")

    CheckpointManager(tmp_path).save(4, {"a": 1})
    progress_observers.append(broken)

    with caplog.at_level(logging.ERROR, "megascale_ops.checkpoint"):
        assert CheckpointManager(tmp_path).restore({"a": 0}) == 4

    assert broken not in progress_observers


def test_a_line_is_logged_every_few_seconds_and_not_before() -> None:
    """A short restore is silent; a long one says how far it is, how fast, and how long it will take."""
    meter = ProgressMeter(7, now_s=100.0)
    meter.expect(4_000_000_000)

    told = [meter.add(400_000_000, now_s) for now_s in (101.0, 100.0 + LOG_EVERY_S, 106.0)]

    assert [line for _, line in told] == [
        "",
        "restoring step 7: 0.80 of 4.00 GB of this rank (20%), 0.16 GB/s, about 20 s left",
        "",
    ]
    assert [progress.done_bytes for progress, _ in told if progress] == [400_000_000, 800_000_000, 1_200_000_000]


def test_a_restore_that_moves_quickly_tells_observers_seldom() -> None:
    """Ten times a second at most."""
    meter = ProgressMeter(7, now_s=0.0)

    assert [meter.add(1, at / 64)[0] is not None for at in range(1, 29)].count(True) == 4


class Watched(FolderSource):
    """A folder of which is known into which memory its files were read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.places: list[tuple[int, int]] = []

    @contextmanager
    def opened(self, name: str) -> Iterator[Opened]:
        """A file."""
        with super().opened(name) as file:
            yield WatchedFile(file, self.places)


class WatchedFile:
    """A file that notes addresses."""

    def __init__(self, file: Opened, places: list[tuple[int, int]]) -> None:
        self._file, self._places, self.size_bytes = file, places, file.size_bytes

    def read_into(self, view: memoryview) -> int:
        """Read, and note where to."""
        count = self._file.read_into(view)
        address = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
        self._places.append((address, address + count))
        return count


def restored_from(folder: Path, state: dict[str, torch.Tensor]) -> Watched:
    """Load a state, and tell where its bytes went."""
    source, step = Watched(storage.final_folder(folder, 1)), 1
    restore = Restore(source, step, Ranks(None))
    sealed = restore.manifest()
    assert isinstance(sealed, Manifest)
    assert restore.load(sealed, state, Allowed.of((), (), old_pickles=False)).ok
    return source


def bytes_read_into(source: Watched, tensor: torch.Tensor) -> int:
    """How many bytes were read right into a tensor."""
    first = tensor.data_ptr()
    last = first + tensor.numel() * tensor.element_size()
    return sum(stop - start for start, stop in source.places if first <= start and stop <= last)


def test_large_tensors_are_read_right_into_their_memory(tmp_path: Path) -> None:
    """Of each every byte, beside small ones, which are copied; what lies otherwise in memory is put together beside."""
    generator = torch.Generator().manual_seed(3)
    saved = {f"w{number}": torch.randn(300_000, generator=generator) for number in range(3)}
    saved |= {f"b{number}": torch.randn(number + 1, generator=generator) for number in range(40)}
    saved |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4)}
    CheckpointManager(tmp_path).save(1, saved)
    state = {name: torch.zeros_like(each) for name, each in saved.items()}

    source = restored_from(tmp_path, state)

    assert all(torch.equal(state[name], each) for name, each in saved.items())
    assert [bytes_read_into(source, state[f"w{number}"]) for number in range(3)] == [1_200_000] * 3
    assert bytes_read_into(source, state["b30"]) == 0
    CheckpointManager(tmp_path / "square").save(1, {"w": torch.arange(360_000.0).reshape(600, 600)})
    transposed = torch.zeros(600, 600).t()
    source = restored_from(tmp_path / "square", {"w": transposed})
    assert torch.equal(transposed, torch.arange(360_000.0).reshape(600, 600))
    assert bytes_read_into(source, transposed) == 0


def whole_file(field: LandingField, data: bytes) -> list[Piece]:
    """The pieces of a file, its gaps included, filled and checked to be in order."""
    pieces = list(covering(field.pieces(), len(data)))
    assert [each.start for each in pieces] == [0, *(each.stop for each in pieces)][: len(pieces)]
    assert not pieces or pieces[-1].stop == len(data)
    return pieces


@pytest.mark.parametrize("tied", [(0, 200_000), (100_000, 300_000), (0, 600_000), (199_936, 200_064)])
def test_bytes_that_two_tensors_share_reach_both(tied: tuple[int, int]) -> None:
    """One chunk for two tensors, wholly or in part: such are not read right into either, and both get every byte."""
    data = bytes(np.random.default_rng(1).integers(0, 256, 600_000, dtype=np.uint8))
    spans = [(0, 200_000), (200_000, 400_000), (400_000, 600_000), tied]
    targets = [torch.zeros(stop - start, dtype=torch.uint8) for start, stop in spans]
    landings = [
        Landing(Chunk((0,), (stop - start,), 0, start, stop - start), torch.uint8, (0,), (stop - start,), target)
        for (start, stop), target in zip(spans, targets, strict=True)
    ]
    field = LandingField(landings)

    for piece in whole_file(field, data):
        part = data[piece.start : piece.stop]
        if piece.memory is not None:
            piece.memory[:] = part
        else:
            field.put(piece.start, torch.frombuffer(bytearray(part), dtype=torch.uint8))

    assert [bytes(target.numpy()) for target in targets] == [data[start:stop] for start, stop in spans]


class Hanging(FolderSource):
    """A folder in which the large files hang at their second read, until the test is over."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.is_over = Event()

    @contextmanager
    def opened(self, name: str) -> Iterator[Opened]:
        """A file."""
        with super().opened(name) as file:
            yield HangingFile(file, self.is_over) if name.endswith(".tensors") else file


class HangingFile:
    """A file whose second read does not come back."""

    def __init__(self, file: Opened, is_over: Event) -> None:
        self._file, self._is_over, self._reads, self.size_bytes = file, is_over, 0, file.size_bytes

    def read_into(self, view: memoryview) -> int:
        """Read once."""
        self._reads += 1
        if self._reads > 1:
            assert self._is_over.wait(90)
        return self._file.read_into(view)


@pytest.mark.parametrize("transposed", [False, True], ids=["into the tensor", "by blocks"])
def test_storage_that_hangs_ends_a_restore_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, transposed: bool
) -> None:
    """And no older checkpoint is loaded over what the hanging read may still fill; the control has patience."""
    CheckpointManager(tmp_path).save(1, {"w": torch.ones(3000, 3000)})
    source, target = Hanging(storage.final_folder(tmp_path, 1)), torch.zeros(3000, 3000)
    restore = Restore(source, 1, Ranks(None))
    sealed = restore.manifest()
    assert isinstance(sealed, Manifest)

    def load() -> CheckpointReport:
        state = {"w": target.t() if transposed else target}
        return restore.load(sealed, state, Allowed.of((), (), old_pickles=False))

    monkeypatch.setattr(reading, "PATIENCE_S", 0.05)
    with pytest.raises(
        CheckpointError,
        match=r"^restoring step 1 from .* failed on rank 0: __0_0.tensors is unreadable \(nothing was read for 0 s\)$",
    ):
        load()
    source.is_over.set()
    monkeypatch.undo()
    assert load().ok
    assert target.eq(1).all()


def test_a_file_may_be_slow_as_long_as_another_one_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience is with all of them: what waits for a thread that is busy elsewhere is not late."""
    monkeypatch.setattr(reading, "PATIENCE_S", 0.05)
    threads = ReadingThreads(1)
    left: list[float] = []

    def get(left_s: float) -> str:
        left.append(left_s)
        if len(left) == 5:
            return "there"
        threads.moved()
        raise TimeoutError

    assert threads.await_read(get) == "there"
    assert all(0 < each <= 0.05 for each in left)
    with pytest.raises(reading.LateError):  # the control: nothing moves
        threads.await_read(Future[None]().result)
    threads.close()


def peak_of(work: Callable[[], object]) -> int:
    """By how many bytes the memory of this process has grown at most while it worked."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as exc:
        pytest.skip(f"this kernel does not forget a process's peak: {exc}")

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024

    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def test_a_restore_needs_no_second_copy_of_the_state(tmp_path: Path) -> None:
    """128 MB come back within blocks of 8 MB; the control, a tensor that has to be put together beside, needs more."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"a": torch.ones(4000, 8000), "b": torch.ones(10)})
    plain, transposed = torch.full((4000, 8000), 2.0), torch.full((8000, 4000), 2.0).t()
    manager.restore({"a": plain, "b": torch.zeros(10)})  # imports what a restore imports

    straight = peak_of(lambda: manager.restore({"a": plain, "b": torch.zeros(10)}))
    beside = peak_of(lambda: manager.restore({"a": transposed, "b": torch.zeros(10)}))

    assert plain.eq(1).all()
    assert transposed.eq(1).all()
    assert straight < 48 * MEGABYTE
    assert beside > 100 * MEGABYTE
