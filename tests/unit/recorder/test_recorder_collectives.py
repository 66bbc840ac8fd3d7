# SPDX-License-Identifier: Apache-2.0
"""Collectives are noted at entry and at end, and a note never changes the call."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.recorder import hook_guard
from megascale_ops.recorder.recording.recording import Recording
from megascale_ops.recorder.torch_hooks.collectives import CollectiveLog, wrap
from megascale_ops.recorder.torch_hooks.waits import wrap_wait


class Group:
    """A process group as far as a note needs one."""

    group_name = "0"

    def __init__(self, backend: str = "gloo") -> None:
        self.seq = 0
        self.backend = backend

    def name(self) -> str:
        """Return the backend, as torch's groups do."""
        return self.backend

    def _get_sequence_number_for_group(self) -> int:
        return self.seq


class Tensor:
    """Ten floats."""

    def numel(self) -> int:
        """Return how many."""
        return 10

    def element_size(self) -> int:
        """Return bytes of each."""
        return 4


class World:
    """A toy torch.distributed with a box behind it."""

    def __init__(self, folder: Path) -> None:
        identity = BoxIdentity(job="j", node="n", rank=0, local_rank=0, world_size=1, pid=1, start_ticks=1, round=1)
        self.recording = Recording(BoxWriter.create(folder, identity))
        self.reader = BoxReader(folder / "0.box")
        self.group: Group | None = Group()
        self.log = CollectiveLog(self.recording, lambda: self.group)
        self.compiling = False
        self.all_reduce = wrap(self._all_reduce, self.log, lambda: self.compiling)
        self.all_gather_object = wrap(self._all_gather_object, self.log, lambda: self.compiling)

    def _all_reduce(self, tensor: Any, op: str = "sum", group: Any = None, async_op: bool = False) -> object:  # noqa: ANN401  as torch's
        """Fail for op "bad", else work."""
        assert group is None or group is self.group or group == -100
        if op == "bad":
            raise RuntimeError("Connection closed by peer")
        if op == "look":
            assert [record.ended_mono_ns for record in self.reader.collectives()] == [0]
        return tensor if async_op else None

    def _all_gather_object(self, things: list[object], thing: object, group: Any = None) -> None:  # noqa: ANN401  as torch's
        """Call another collective, as torch does."""
        things.append(thing)
        self.all_reduce(Tensor(), group=group)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Return a fresh toy world."""
    monkeypatch.setattr(hook_guard, "_said", set())
    return World(tmp_path)


def test_a_blocking_collective_has_an_end(world: World) -> None:
    """It is in the ring while it runs, and has its end afterwards."""
    assert world.all_reduce(Tensor(), "look") is None

    (record,) = world.reader.collectives()
    assert (record.communicator, record.function, record.seq, record.bytes_moved) == ("0", "_all_reduce", 1, 40)
    assert 0 < record.enqueued_mono_ns <= record.started_mono_ns <= record.ended_mono_ns


def test_an_asynchronous_one_has_none(world: World) -> None:
    """Its work object is the script's, and only that sees the end."""
    tensor = Tensor()

    assert world.all_reduce(tensor, async_op=True) is tensor

    assert [record.ended_mono_ns for record in world.reader.collectives()] == [0]


def test_nccl_returns_when_the_gpu_was_told(world: World) -> None:
    """That is no end: who waits for a peer must not seem to have finished."""
    world.group = Group("nccl")

    assert world.all_reduce(Tensor()) is None
    world.all_gather_object([], "x")

    assert [record.ended_mono_ns for record in world.reader.collectives()] == [0, 0]
    assert world.log.waits() == (0.0, "")


def test_a_call_that_lasts_is_known_while_it_lasts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """For how long, and of which group: NCCL forms a communicator inside the first call, and torch counts it later."""
    now_ns = 5_000_000_000
    monkeypatch.setattr("megascale_ops.recorder.torch_hooks.collectives.monotonic_ns", lambda: now_ns)
    during: list[tuple[float, str]] = []

    def barrier(group: object = None) -> None:  # noqa: ARG001  as torch's
        nonlocal now_ns
        now_ns += 1_500_000_000
        during.append(world.log.waits())

    wrap(barrier, world.log, lambda: False)()

    assert during == [(1.5, "0")]
    assert world.log.waits() == (0.0, "")


def test_a_failing_one_raises_and_stays_open(world: World) -> None:
    """The exception is torch's own; the ring shows what never ended; the next call is noted again."""
    with pytest.raises(RuntimeError, match="Connection closed"):
        world.all_reduce(Tensor(), op="bad")
    world.all_reduce([Tensor(), Tensor()])

    assert [bool(record.ended_mono_ns) for record in world.reader.collectives()] == [False, True]
    assert world.reader.collectives()[-1].bytes_moved == 80


def test_the_waits_of_a_call_count_once(world: World) -> None:
    """The wait inside a collective is part of it, also of one that fails; one outside counts by itself."""
    told: list[float] = []
    world.recording.waited = lambda _, seconds, __: told.append(seconds)  # type: ignore[method-assign]  # to see it

    def barrier(group: object = None, *, fails: bool = False) -> None:  # noqa: ARG001  as torch's
        wait()
        if fails:
            raise RuntimeError("Connection closed by peer")

    wait = wrap_wait(lambda: None, world.recording)
    noted = wrap(barrier, world.log, lambda: False)
    noted()
    assert len(told) == 1
    with pytest.raises(RuntimeError, match="Connection closed"):
        noted(fails=True)
    assert len(told) == 2
    wait()

    assert len(told) == 3
    assert world.recording.calls == {}


def test_a_collective_of_objects_waits_only_inside(world: World) -> None:
    """What it packs and unpacks is work, so its inner waits are timed by themselves."""
    seen: list[bool] = []

    def all_gather_object(things: object, group: object = None) -> None:  # noqa: ARG001  as torch's
        seen.extend(told for _, _, told in world.recording.calls.values())

    wrap(all_gather_object, world.log, lambda: False)([])

    assert seen == [False]


def test_a_sparse_tensor_has_bytes_too(world: World) -> None:
    """It knows no ``nbytes``."""
    sparse = torch.zeros(3, 2).to_sparse()

    world.all_reduce(sparse)
    world.all_reduce([torch.zeros(5), sparse])

    assert [record.bytes_moved for record in world.reader.collectives()] == [24, 44]


def test_a_group_in_the_place_of_another_is_known_anew(world: World) -> None:
    """Groups are remembered by identity, and those that are gone must not give their names to others."""
    world.all_reduce(Tensor())
    (known,) = world.log.known.values()
    later = world.group = Group()
    later.group_name = "7"
    world.log.known[id(later)] = known

    world.all_reduce(Tensor())

    assert [record.communicator for record in world.reader.collectives()] == ["0", "7"]


def test_only_the_outermost_call_is_noted(world: World) -> None:
    """What a collective of objects does inside is its own affair."""
    world.all_gather_object([], "x")

    assert [record.function for record in world.reader.collectives()] == ["_all_gather_object"]


def test_no_note_without_a_group_or_while_compiling(world: World) -> None:
    """Before init_process_group, for a group without us, under torch.compile, in a child: the call alone."""
    world.compiling = True
    world.all_reduce(Tensor())
    world.compiling = False
    world.all_reduce(Tensor(), group=-100)
    world.group = None
    world.all_reduce(Tensor())
    world.recording.leave()

    world.all_reduce(Tensor(), "sum")

    assert world.reader.collectives() == []


def test_a_broken_note_costs_no_collective(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """When torch has changed below us we say so once, and the calls go on."""
    assert world.group is not None
    world.group._get_sequence_number_for_group = None  # type: ignore[assignment,method-assign]  # what a change looks like

    for _ in range(3):
        assert world.all_reduce(Tensor()) is None

    assert capsys.readouterr().err.count("the hook on collectives steps aside: TypeError") == 1


def test_a_call_is_noted_with_the_phase_in_which_the_training_thread_made_it(world: World) -> None:
    """What another thread calls has no place among its phases."""
    world.recording.data_begin()
    world.all_reduce(Tensor())
    world.recording.data_end()
    thread = threading.Thread(target=world.all_reduce, args=(Tensor(),))
    thread.start()
    thread.join(90.0)
    world.all_reduce(Tensor())

    records = world.reader.collectives()

    assert [record.passage for record in records] == [1, 0, 2]
    assert world.reader.trail().path == "a0b0"
    assert world.reader.trail().phases == ("data", "forward")
