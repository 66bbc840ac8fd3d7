# SPDX-License-Identifier: Apache-2.0
"""What a heartbeat carries: everything first and now and then, otherwise what changed."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest
from megascale_agents.ranks.rounds import Rounds
from megascale_agents.uplink.heartbeat import Composer

from megascale_ops.blackbox.layout import HEADER_BYTES, NOW, PULSE, Ring
from megascale_ops.schema.health import HostReading
from megascale_ops.schema.messages import MAX_BODY_BYTES, Heartbeat
from megascale_ops.schema.ranges import encode
from tests.fakes.node import FakeNode

HOST = HostReading(cpu_busy=0.5, cores=8)


class Composing:
    """A composer over a real node, with a clock we set."""

    def __init__(self, node: FakeNode) -> None:
        self.node = node
        self.rounds = Rounds(str(node.root), node.node, lambda _: None)
        self.composer = Composer(node.node, "agent-1")

    def at(self, now_s: float, *, urgent: bool = False, done: tuple[str, ...] = ()) -> Heartbeat:
        """Look, then build the heartbeat of this moment."""
        self.rounds.refresh(now_s)
        for _, rank in self.rounds.ranks():
            rank.look_at_box()
        return self.composer.compose(self.rounds.ranks(), HOST, (now_s, now_s + 1e9), done, urgent=urgent)


@pytest.fixture
def composing(tmp_path: Path) -> Iterator[Composing]:
    """A node with two ranks."""
    node = FakeNode(tmp_path)
    node.start_round(2)
    made = Composing(node)
    yield made
    made.rounds.close()
    node.kill_all()


def ranks_in(heartbeat: Heartbeat) -> list[int]:
    """Which ranks a heartbeat speaks of."""
    return [report.rank for job in heartbeat.jobs for report in job.ranks]


def test_the_first_heartbeat_is_full(composing: Composing) -> None:
    """It introduces the agent: all ranks, the host, number one."""
    first = composing.at(100.0)

    assert (first.full, first.seq, ranks_in(first), first.host) == (True, 1, [0, 1], HOST)
    assert first.jobs[0].run_dir == str(composing.node.run_dir)


def test_afterwards_only_what_changed_is_said(composing: Composing) -> None:
    """A rank that stands still costs nothing; one that steps is told."""
    composing.at(100.0)
    composing.at(101.0)

    composing.node.step(1, 5)
    second = composing.at(102.0)
    third = composing.at(103.0)

    assert (second.full, ranks_in(second)) == (False, [1])
    assert ranks_in(third) == []
    assert third.seq == 4


def test_everything_again_twice_a_minute_and_when_asked(composing: Composing) -> None:
    """So that the controller is not wrong for long about what was lost on the way."""
    composing.at(100.0)

    assert not composing.at(129.0).full
    assert composing.at(130.0).full
    composing.composer.want_full()
    assert composing.at(131.0).full
    assert not composing.at(132.0).full


def test_the_host_comes_every_five_seconds_and_with_urgent_news(composing: Composing) -> None:
    """The verdict of a killed rank needs how much memory was left just then."""
    composing.at(100.0)

    assert composing.at(101.0).host is None
    assert composing.at(102.0, urgent=True).host == HOST
    assert composing.at(107.0).host == HOST


def test_done_orders_are_passed_on(composing: Composing) -> None:
    """The controller waits for them."""
    assert composing.at(100.0, done=("o-1",)).done_orders == ("o-1",)


@pytest.mark.parametrize("seed", range(8))
def test_a_box_that_was_written_over_spoils_no_heartbeat(composing: Composing, seed: int) -> None:
    """What its own script scribbled into it is brought into range and told; the rank beside is told as it is."""
    composing.node.step(0, 5)
    composing.node.step(1, 5)
    composing.at(100.0)
    draw = Random(seed)  # noqa: S311  no secret
    with (composing.node.job_folder / "0.box").open("r+b") as file:
        data = bytearray(file.read())
        for _ in range(2000):
            data[draw.randrange(HEADER_BYTES, len(data))] = draw.randrange(256)
        # Whole records of what can't be, which noise alone would seldom be taken for.
        put_word(data, NOW, "step", draw.choice((-7, 2**62)))
        put_word(data, PULSE, "moved_mono_s", draw.choice((-1.0, 4e9)))
        file.seek(0)
        file.write(data)
    composing.node.step(1, 6)

    raw, changed = encode(composing.at(101.0))

    told = {one.rank: one for job in msgspec.json.decode(raw, type=Heartbeat).jobs for one in job.ranks}
    assert any("moved_mono_s" in one for one in changed)
    assert told[1].progress is not None
    assert told[1].progress.step == 6


def put_word(data: bytearray, ring: Ring, name: str, value: float) -> None:
    """Write over one field of all slots of a ring."""
    field = ring.field(name)
    for at in range(ring.offset + field.offset, ring.offset + ring.size, ring.stride):
        struct.pack_into(f"<{field.code}", data, at, value)


def test_a_node_of_64_ranks_with_many_last_words_fits(tmp_path: Path) -> None:
    """The receiver refuses larger bodies, so the largest node at its worst must stay below that."""
    node = FakeNode(tmp_path)
    file = node.start_round(1, boxes=False)
    log = tmp_path / "log"
    kinds = [
        "Segmentation fault",
        "Killed",
        "Aborted",
        "CUDA error: ",
        "ncclSystemError",
        "std::bad_alloc",
        "Errno 28]",
    ]
    log.write_text("".join(f"{kind}{' ' * 20}{'x' * 280}\n" for kind in kinds))
    ranks = tuple(
        type(file.ranks[0])(rank=n, local_rank=n, pid=os.getpid(), start_ticks=0, stderr_path=str(log))
        for n in range(64)
    )
    node.write_round(msgspec.structs.replace(file, ranks=ranks))
    composing = Composing(node)
    composing.rounds.refresh(0.0)
    for _, rank in composing.rounds.ranks():
        rank.log.poll_stderr()

    heartbeat = composing.at(1.0)

    assert len(ranks_in(heartbeat)) == 64
    assert len(msgspec.json.encode(heartbeat)) < MAX_BODY_BYTES
    composing.rounds.close()
    node.kill_all()


def test_finished_steps_are_told_once(composing: Composing) -> None:
    """To the microsecond, by the heartbeat after them; a look in between takes none away."""
    composing.at(100.0)
    composing.node.step(1, 5)
    composing.node.step(1, 6)
    ((_, rank),) = [found for found in composing.rounds.ranks() if found[1].rank == 1]
    assert rank.untold_steps() == 2
    assert rank.report(100.5).work == ()

    told = composing.at(101.0)
    after = composing.at(102.0)

    assert [work.step for work in told.jobs[0].ranks[0].work] == [5, 6]
    assert told.jobs[0].ranks[0].work[0].wall_s == 0.05
    assert rank.untold_steps() == 0
    assert after.jobs == ()


def test_steps_of_many_ranks_fit_into_a_heartbeat(tmp_path: Path) -> None:
    """Of 32 ranks with 100 new steps each the newest 20 are told, and the body stays below what is taken."""
    node = FakeNode(tmp_path)
    node.start_round(32)
    made = Composing(node)
    try:
        for rank in range(32):
            for step in range(100):
                node.step(rank, step)

        heartbeat = made.at(100.0)

        assert {tuple(work.step for work in report.work) for report in heartbeat.jobs[0].ranks} == {
            tuple(range(80, 100))
        }
        assert len(msgspec.json.encode(heartbeat)) < MAX_BODY_BYTES
    finally:
        made.rounds.close()
        node.kill_all()
