# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, ANN401, N803
# (kernels: their types are Triton's to infer, compile-time arguments are capitals; helpers pass options on)
"""What the emulator finds: accesses that nothing orders, also where the numbers came out right."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

import triton.language as tl  # noqa: E402
from megascale_kernels.device.layout import COMPUTE, EPOCH, layout, signature  # noqa: E402
from megascale_kernels.device.signals import (  # noqa: E402
    Channel,
    finish_launch,
    flag_of,
    line_of,
    make_stamp,
    peer_words,
    publish,
    publish_launch,
    wait_for,
)
from megascale_kernels.emulate import (  # noqa: E402
    NARROW,
    RACE,
    UNSYNCED,
    Launch,
    World,
)

WIDTH = 16


def make_world(ranks: int = 2, **options: Any) -> World:
    """A world whose data slots hold one row of floats per rank."""
    return World(layout(ranks, channels=4, data_bytes=4 * WIDTH * ranks), **options)


def channel_of(world: World, rank: int, slot: int = 0, epoch: int = 1) -> Channel:
    """The channel of a rank's only program."""
    return Channel(
        world.words[rank],
        world.peers[rank],
        world.status[rank],
        world.board(rank)[32:],
        world.layout.flags(slot),
        world.layout.channels,
        slot,
        rank,
        world.world_size,
        epoch << 12 | signature(1, WIDTH, 0, 0, 0),
        1,
        world.deadline_us,
    )


@triton.jit
def pass_on(channel, x_ptr, out_ptr, data_bytes, WIDTH: tl.constexpr, NOTIFY: tl.constexpr, WAIT: tl.constexpr) -> None:
    """Give a row to the next rank, take one from the previous rank."""
    publish_launch(channel, WIDTH, 0, 0, 0)
    cols = tl.arange(0, WIDTH)
    following = (channel.rank + 1) % channel.world_size
    previous = (channel.rank + channel.world_size - 1) % channel.world_size
    target = (tl.load(channel.peers + following) + data_bytes).to(tl.pointer_type(tl.float32))
    tl.store(target + cols, tl.load(x_ptr + cols))
    flag = flag_of(channel, peer_words(channel, following), channel.rank, 0)
    if NOTIFY == "release":
        publish(channel, flag)
    elif NOTIFY == "relaxed":
        tl.debug_barrier()
        tl.atomic_xchg(flag, channel.stamp, sem="relaxed", scope="sys")
    elif NOTIFY == "gpu":
        tl.debug_barrier()
        tl.atomic_xchg(flag, channel.stamp, sem="release", scope="gpu")
    elif NOTIFY == "no barrier":
        tl.atomic_xchg(flag, channel.stamp, sem="release", scope="sys")
    mine = (tl.load(channel.peers + channel.rank) + data_bytes).to(tl.pointer_type(tl.float32))
    code = 0
    if WAIT:
        code = wait_for(channel, flag_of(channel, channel.control, previous, 0), COMPUTE, 7, previous, 0)
    if code == 0:
        tl.store(out_ptr + cols, tl.load(mine + cols))


def pass_rows(
    world: World, notify: str = "release", *, wait: bool = True, slots: tuple[int, ...] = (0,), first: int = 1
) -> bool:
    """Run `pass_on` once for each slot; returns whether every rank got its neighbour's row at last."""
    ranks = range(world.world_size)
    for epoch, slot in enumerate(slots, start=first):
        x = [torch.arange(WIDTH, dtype=torch.float32) + 100 * rank + epoch for rank in ranks]
        out = [torch.zeros(WIDTH) for _ in ranks]
        constants = {"WIDTH": WIDTH, "NOTIFY": notify, "WAIT": wait}
        world.launch(
            [
                Launch(
                    rank,
                    pass_on,
                    1,
                    (channel_of(world, rank, slot, epoch), x[rank], out[rank], world.layout.data(slot)),
                    constants,
                )
                for rank in ranks
            ]
        )
    return all(torch.equal(out[rank], x[rank - 1]) for rank in ranks)


@triton.jit
def gather_sum(control, peers, status, board, x_ptr, out_ptr, flags, channels, slot, rank, world_size, signature,
               deadline_us, data_bytes, WIDTH: tl.constexpr) -> None:  # fmt: skip
    """Out = sum of all ranks' rows, a row per program: what a whole operator looks like."""
    cta = tl.program_id(0)
    ctas = tl.num_programs(0)
    stamp = make_stamp(tl.load(control + EPOCH) + 1, signature)
    channel = Channel(
        control, peers, status, line_of(board, cta), flags, channels, slot, rank, world_size, stamp, 1, deadline_us
    )
    if cta == 0:
        publish_launch(channel, WIDTH, 0, 0, 0)
    cols = tl.arange(0, WIDTH)
    total = tl.load(x_ptr + cta * WIDTH + cols)
    own = total
    for step in range(1, world_size):
        peer = (rank + step) % world_size
        base = (tl.load(peers + peer) + data_bytes).to(tl.pointer_type(tl.float32))
        tl.store(base + (rank * ctas + cta) * WIDTH + cols, own)
        publish(channel, flag_of(channel, peer_words(channel, peer), rank, cta))
    mine = (tl.load(peers + rank) + data_bytes).to(tl.pointer_type(tl.float32))
    code = 0
    for step in range(1, world_size):
        peer = (rank + step) % world_size
        if code == 0:
            code = wait_for(channel, flag_of(channel, control, peer, cta), COMPUTE, cta, peer, cta)
        if code == 0:
            total += tl.load(mine + (peer * ctas + cta) * WIDTH + cols)
    if code == 0:
        tl.store(out_ptr + cta * WIDTH + cols, total)
    finish_launch(channel, ctas, 0)


@pytest.mark.parametrize("seed", range(4))
def test_a_right_operator_has_no_findings(seed: int) -> None:
    """Four ranks of two programs, three launches over two slots: right numbers, nothing unordered, with any seed."""
    ranks, programs = 4, 2
    world = World(layout(ranks, channels=programs, data_bytes=4 * WIDTH * ranks * programs), seed=seed)
    x = [torch.rand(programs, WIDTH) for _ in range(ranks)]
    out = [torch.zeros(programs, WIDTH) for _ in range(ranks)]

    for launch in range(3):
        slot = launch % 2
        operations = [
            Launch(
                rank,
                gather_sum,
                programs,
                (world.words[rank], world.peers[rank], world.status[rank], world.board(rank), x[rank], out[rank]),
                {
                    "flags": world.layout.flags(slot), "channels": world.layout.channels, "slot": slot, "rank": rank,
                    "world_size": ranks, "signature": 5, "deadline_us": world.deadline_us,
                    "data_bytes": world.layout.data(slot), "WIDTH": WIDTH, "num_warps": 4,
                },
            )
            for rank in range(ranks)
        ]  # fmt: skip
        world.launch(operations)

    assert world.report() == "no findings"
    assert all(torch.allclose(mine, sum(x)) for mine in out)


@pytest.mark.parametrize("seed", range(6))
def test_a_release_and_an_acquire_order(seed: int) -> None:
    """The toy itself is right."""
    world = make_world(3, seed=seed)

    right = pass_rows(world)

    assert right
    assert world.report() == "no findings"


@pytest.mark.parametrize("seed", range(4))
def test_a_relaxed_notify_is_found_though_the_numbers_are_right(seed: int) -> None:
    """Without a release nothing of the data is ordered; the finding names both sides, their lines and the bytes."""
    world = make_world(2, seed=seed)

    right = pass_rows(world, "relaxed")

    assert right
    assert {finding.kind for finding in world.findings} == {RACE}
    finding = world.findings[0]
    assert (finding.first.operation, finding.second.operation) == ("store", "load")
    assert finding.first.who.rank == 1 - finding.second.who.rank
    assert finding.owner == finding.second.who.rank
    assert "data slot 0, byte 0" in finding.place
    assert "test_emulate_order.py:" in finding.first.where
    assert "pass_on" in str(finding)


@pytest.mark.parametrize("seed", range(4))
def test_a_missing_wait_is_found_in_every_schedule(seed: int) -> None:
    """A load that nothing holds back is unordered, whichever of the two happened to come first."""
    world = make_world(2, seed=seed)

    pass_rows(world, wait=False)

    assert RACE in {finding.kind for finding in world.findings}


def test_a_scope_that_leaves_the_peer_out_does_not_synchronise() -> None:
    """A release at gpu scope orders nothing for another rank, and the flag itself is no longer strong."""
    world = make_world(2)

    right = pass_rows(world, "gpu")

    assert right
    assert {finding.kind for finding in world.findings} == {RACE, NARROW}


def test_a_release_without_a_barrier_publishes_one_thread_only() -> None:
    """The other threads of the CTA may not have stored yet: named as such."""
    world = make_world(2)

    right = pass_rows(world, "no barrier")

    assert right
    assert {finding.kind for finding in world.findings} == {UNSYNCED}


def test_reusing_a_buffer_that_may_still_be_read_is_found() -> None:
    """One slot, two launches: the second store may overtake the first load of the peer."""
    world = make_world(2)

    right = pass_rows(world, slots=(0, 0))

    assert right
    finding = world.findings[0]
    assert (finding.kind, finding.first.operation, finding.second.operation) == (RACE, "load", "store")


def test_two_slots_in_turn_are_enough() -> None:
    """A rank reaches the next but one launch only after the peer has begun the next one."""
    world = make_world(2)

    right = pass_rows(world, slots=(0, 1, 0, 1))

    assert right
    assert world.report() == "no findings"


def test_a_meeting_of_the_hosts_orders_everything() -> None:
    """After `synchronize` even one slot may be reused."""
    world = make_world(2)

    pass_rows(world)
    world.synchronize()
    pass_rows(world, first=2)

    assert world.report() == "no findings"
