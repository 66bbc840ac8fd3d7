# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, ANN401
# (kernels: their types are Triton's to infer, compile-time arguments are capitals; helpers pass options on)
"""What happens when a rank is slow, late, wrong or absent: every wait ends, and the record says who waited for what."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

import triton.language as tl  # noqa: E402
from megascale_kernels.device.layout import ABORTED, COMMUNICATE, EXPIRED, MISMATCH, layout, signature  # noqa: E402
from megascale_kernels.device.signals import Channel, flag_of, peer_words, publish, publish_launch, wait_for  # noqa: E402
from megascale_kernels.emulate import Launch, StuckError, World, events, schedule  # noqa: E402

from tests.fakes.emulated_ranks import emulated_threads  # noqa: E402

RANKS = 4
TILE = 7
CHANNEL = 2


def make_world(**options: Any) -> World:
    """Four ranks without data."""
    return World(layout(RANKS, channels=4, data_bytes=0), deadline_us=100_000, **options)


def channel_of(world: World, rank: int, rows: int = 1) -> Channel:
    """A rank's channel in its first launch; `rows` is the size it believes in."""
    return Channel(
        world.words[rank], world.peers[rank], world.status[rank], world.board(rank)[32:], world.layout.flags(0),
        world.layout.channels, 0, rank, RANKS, 1 << 12 | signature(1, rows, 0, 0, 0), 1, world.deadline_us,
    )  # fmt: skip


@triton.jit
def pass_the_torch(channel, tile, index) -> None:
    """Rank 0 begins, each rank waits for the one before, and rank 0 for the last: one lost flag stops everybody."""
    publish_launch(channel, 1, 0, 0, 0)
    previous = (channel.rank + channel.world_size - 1) % channel.world_size
    following = (channel.rank + 1) % channel.world_size
    flag = flag_of(channel, peer_words(channel, following), channel.rank, index)
    if channel.rank == 0:
        publish(channel, flag)
    code = wait_for(channel, flag_of(channel, channel.control, previous, index), COMMUNICATE, tile, previous, index)
    if code == 0 and channel.rank != 0:
        publish(channel, flag)


def run(
    world: World, ranks: Iterable[int] = range(RANKS), rows: Callable[[int], int] = lambda _: 1
) -> list[dict[str, int]]:
    """One round on some of the ranks."""
    world.launch(
        [Launch(rank, pass_the_torch, 1, (channel_of(world, rank, rows(rank)), TILE, CHANNEL)) for rank in ranks]
    )
    return [world.fault(rank) for rank in range(RANKS)]


def test_without_a_fault_there_is_no_record() -> None:
    """The toy itself ends well, and its events tell the story in order of time."""
    world = make_world(seed=3)

    faults = run(world)

    assert faults == [{}] * RANKS
    assert world.findings == ()
    times = [event.at_ns for event in world.events]
    assert times == sorted(times)
    assert [event.who.rank for event in world.events if event.what == events.NOTIFY] == [0, 1, 2, 3]
    assert [event.who.rank for event in world.events if event.what == events.ARRIVED] == [1, 2, 3, 0]
    waits = {event.who.rank: event for event in world.events if event.what == events.WAIT}
    assert {(waits[rank].peer, waits[rank].channel, waits[rank].tile) for rank in waits} == {
        ((rank - 1) % RANKS, CHANNEL, TILE) for rank in range(RANKS)
    }


@pytest.mark.parametrize("seed", range(3))
def test_a_lost_notify_stops_every_rank_and_is_named(seed: int) -> None:
    """Whoever waits out the deadline first writes whom, which tile and which flag; the others stop because of it."""
    world = make_world(seed=seed, drop=lambda notify: (notify.source, notify.target) == (1, 2))

    faults = run(world)

    codes = {fault["code"] for fault in faults if fault}
    expired = [rank for rank, fault in enumerate(faults) if fault.get("code") == EXPIRED.value]
    # Rank 1 had what it waited for.
    assert faults[1] == {}
    assert codes <= {EXPIRED.value, ABORTED.value}
    assert expired
    for rank in expired:
        record = faults[rank]
        assert (record["tile"], record["peer"], record["channel"]) == (TILE, (rank - 1) % RANKS, CHANNEL)
        assert record["seen"] == 0
        assert record["waited_us"] >= world.deadline_us
    for fault in faults:
        if fault.get("code") == ABORTED.value:
            assert fault["raised_by"] - 1 in expired
    assert [event.channel for event in world.events if event.what == events.DROPPED] == [CHANNEL]
    assert len([event for event in world.events if event.what == events.GAVE_UP]) == RANKS - 1


def test_a_rank_that_never_launches_is_waited_for_until_the_deadline() -> None:
    """Its successor names it."""
    world = make_world()

    faults = run(world, ranks=[0, 2, 3])

    assert faults[1] == {}
    assert all(faults[rank]["code"] in {EXPIRED.value, ABORTED.value} for rank in (0, 2, 3))
    assert faults[2]["peer"] == 1


def test_a_rank_with_other_sizes_is_found_long_before_the_deadline() -> None:
    """Its flags and its greeting carry another signature."""
    world = make_world()

    faults = run(world, rows=lambda rank: 2 if rank == 1 else 1)

    mismatches = [fault for fault in faults if fault.get("code") == MISMATCH.value]
    assert mismatches
    assert all(fault["waited_us"] < world.deadline_us // 2 for fault in mismatches)
    assert EXPIRED.value not in {fault.get("code") for fault in faults}


@pytest.mark.parametrize("slow", range(RANKS))
def test_a_slow_rank_changes_nothing_but_the_time(slow: int) -> None:
    """A straggler is waited for; a thousandfold one takes longer than the deadline, and that is said."""
    quick, late, too_late = make_world(), make_world(stragglers={slow: 20}), make_world(stragglers={slow: 50_000})

    assert run(quick) == run(late) == [{}] * RANKS
    assert late.findings == ()
    assert late.events[-1].at_ns > quick.events[-1].at_ns
    assert any(fault.get("code") == EXPIRED.value for fault in run(too_late))


@triton.jit
def wait_for_ever(channel) -> None:
    """No deadline: a kernel that would hang a device."""
    flag = flag_of(channel, channel.control, 3, 1)
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != channel.stamp:
        pass


def test_a_wait_without_a_deadline_is_an_error_that_names_it() -> None:
    """No hang: rank, program, flag, source rank and channel, and what was seen."""
    world = make_world()

    with pytest.raises(StuckError) as raised:
        world.launch([Launch(1, wait_for_ever, 1, (channel_of(world, 1),))])

    message = str(raised.value)
    assert "nobody has moved" in message
    assert "rank 1 wait_for_ever[0] polls rank 1 workspace: flag of slot 0, source rank 3, channel 1" in message
    assert "saw 0" in message


def test_a_wait_with_too_long_a_deadline_names_what_it_needs() -> None:
    """The emulator gives up before a kernel whose deadline is far beyond the world's."""
    world = make_world()
    channel = channel_of(world, 1)._replace(deadline_us=100 * world.deadline_us)

    with pytest.raises(StuckError) as raised:
        world.launch([Launch(1, pass_the_torch, 1, (channel, TILE, CHANNEL))])

    assert f"waits for rank 0, channel {CHANNEL} (tile {TILE})" in str(raised.value)
    assert f"saw 0, needs {channel.stamp}" in str(raised.value)


@triton.jit
def spin_on_the_clock(channel) -> None:
    """Moves, but never ends."""
    while channel.rank >= 0:
        tl.store(channel.progress, channel.rank)


def test_a_kernel_that_never_ends_spends_its_budget() -> None:
    """The budget of steps is the last resort."""
    world = make_world(max_steps=500, schedule="eager")

    with pytest.raises(StuckError, match=r"after 500 accesses.*\n.*does not wait"):
        world.launch([Launch(0, spin_on_the_clock, 1, (channel_of(world, 0),))])


@triton.jit
def compute_for_ever(channel) -> None:
    """Never touches memory."""
    number = channel.rank
    while number >= 0:
        number += 0


def test_a_kernel_that_computes_for_ever_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real time is looked at only here: a program that makes no step at all is ended, and its thread with it."""
    monkeypatch.setattr(schedule, "SILENCE_S", 0.05)
    world = make_world()
    before = emulated_threads()

    with pytest.raises(StuckError, match="a loop without an end"):
        world.launch([Launch(0, compute_for_ever, 1, (channel_of(world, 0),))])

    assert emulated_threads() <= before
