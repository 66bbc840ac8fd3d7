# SPDX-License-Identifier: Apache-2.0
"""Ranks seal a set on the nodes together over TCP, or none of them does."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from megascale_ops.checkpoint.manifest import FileEntry, Manifest
from megascale_ops.checkpoint.tiers import gathering
from megascale_ops.checkpoint.tiers.gathering import Gathering, Part, Round, take_part
from megascale_ops.errors import CheckpointError

AUTH, SAVE, WAIT_S = b"a" * 32, "save", 20.0


def manifest_of(files: tuple[FileEntry, ...]) -> Manifest:
    """As rank 0 makes it."""
    return Manifest(step=3, world_size=3, written_wall_s=1.0, files=files)


def part_of(rank: int, *, failure: str = "", auth: bytes = AUTH, save: str = SAVE) -> Part:
    """What a rank tells."""
    files = () if failure else (FileEntry(f"__{rank}_0.tensors", 10, "sha256:" + "0" * 64),)
    return Part(auth, save, rank, files, failure, b"" if rank else b"the plan")


@pytest.fixture
def desk() -> Iterator[Gathering]:
    """Rank 0's end, of three ranks."""
    opened = Gathering("127.0.0.1", AUTH, 3, WAIT_S)
    opened.expect(SAVE, manifest_of)
    yield opened
    opened.close()


def play(
    desk: Gathering, parts: list[Part], seal: Callable[[int, Manifest, bytes], object] = lambda *_: None
) -> list[Future[Manifest]]:
    """All ranks at once, each in a thread; what became of each."""
    with ThreadPoolExecutor(len(parts)) as pool:
        return [
            pool.submit(
                take_part, desk.address, part, lambda made, plan, rank=part.rank: seal(rank, made, plan), WAIT_S
            )
            for part in parts
        ]


def test_every_rank_gets_the_same_manifest_of_all_files_and_the_plan(desk: Gathering) -> None:
    """Each has its node sealed before any is told that all are."""
    sealed: list[tuple[int, Manifest, bytes]] = []

    told = play(desk, [part_of(rank) for rank in range(3)], lambda *given: sealed.append(given))

    (made,) = {each.result().files for each in told}
    assert [entry.name for entry in made] == ["__0_0.tensors", "__1_0.tensors", "__2_0.tensors"]
    assert sorted(rank for rank, _, _ in sealed) == [0, 1, 2]
    assert {(each.files, plan) for _, each, plan in sealed} == {(made, b"the plan")}


def test_a_rank_that_failed_ends_it_for_all_with_its_sentence(desk: Gathering) -> None:
    """No node seals; a rank that comes late hears of it, too."""
    sealed: list[int] = []
    parts = [part_of(1, failure="No space left on device"), part_of(0), part_of(2)]

    told = play(desk, parts, lambda rank, *_: sealed.append(rank))

    assert {str(each.exception()) for each in told} == {"on rank 1: No space left on device"}
    assert sealed == []


def test_a_node_that_cannot_seal_ends_it_for_all(desk: Gathering) -> None:
    """So no copy is sent of a set that is not on all nodes."""

    def refuse(rank: int, *_: object) -> None:
        if rank == 2:
            raise OSError(30, "Read-only file system")

    told = play(desk, [part_of(rank) for rank in range(3)], refuse)

    assert {str(each.exception()) for each in told} == {"on rank 2: Read-only file system"}


def test_a_rank_whose_connection_breaks_ends_it_for_all(desk: Gathering) -> None:
    """Its process was killed after it had come: nothing waits for the deadline."""
    until_s = time.monotonic() + WAIT_S

    def killed() -> None:
        with socket.create_connection(desk.address, timeout=WAIT_S) as connection:
            gathering.send_message(connection, gathering.msgspec.msgpack.encode(part_of(1)))
            gathering.receive_message(connection, 1 << 20)

    dying = threading.Thread(target=killed)
    dying.start()
    told = play(desk, [part_of(0), part_of(2)])
    dying.join(WAIT_S)

    assert {str(each.exception()) for each in told} == {"on rank 1: its connection broke off"}
    assert time.monotonic() < until_s


def test_a_rank_that_does_not_come_is_named() -> None:
    """By the deadline, which here has passed."""
    one = Round(3, manifest_of)
    one.come(part_of(0), 0.0)

    assert one.come(part_of(2), 0.0).failure == "on rank 1: it did not come in time"


@pytest.mark.parametrize("part", [part_of(1, auth=b"b" * 32), part_of(1, save="of before")])
def test_a_stranger_and_a_rank_of_another_save_take_no_part(desk: Gathering, part: Part) -> None:
    """Neither counts as rank 1."""
    with pytest.raises(CheckpointError, match=r"rank 0 closed the connection|the save is over"):
        take_part(desk.address, part, lambda *_: None, WAIT_S)

    assert desk._rounds[SAVE]._parts == {}


def test_without_rank_0_it_is_one_sentence(desk: Gathering) -> None:
    """It has ended."""
    desk.close()

    with pytest.raises(CheckpointError, match="rank 0 could not be reached: Connection refused"):
        take_part(desk.address, part_of(1), lambda *_: None, WAIT_S)
