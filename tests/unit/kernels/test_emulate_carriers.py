# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, ANN401, N803
# (kernels: their types are Triton's to infer, compile-time arguments are capitals; helpers pass options on)
"""What orders what the TMA unit, the copy engine, atomics and the host do, and what does not."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

import triton.language as tl  # noqa: E402
from megascale_kernels.device.layout import COMPUTE, layout, signature  # noqa: E402
from megascale_kernels.device.signals import (  # noqa: E402
    Channel,
    drain_tma_stores,
    fence_before_tma,
    flag_of,
    peer_words,
    publish,
    wait_for,
)
from megascale_kernels.emulate import (  # noqa: E402
    RACE,
    UNDRAINED,
    UNFENCED,
    Call,
    Launch,
    World,
    copy,
)
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

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
def pass_on_by_tma(channel, x_desc, there_desc, here_desc, out_desc, DRAIN: tl.constexpr, FENCE: tl.constexpr) -> None:
    """The same with the TMA unit, and a poll written out."""
    other = 1 - channel.rank
    there_desc.store([0, 0], x_desc.load([0, 0]))
    if DRAIN:
        drain_tma_stores()
    publish(channel, flag_of(channel, peer_words(channel, other), channel.rank, 0))
    flag = flag_of(channel, channel.control, other, 0)
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != channel.stamp:
        pass
    if FENCE:
        fence_before_tma()
    out_desc.store([0, 0], here_desc.load([0, 0]))


@pytest.mark.parametrize(
    ("drain", "fence", "expected"),
    [(True, True, set()), (False, True, {UNDRAINED}), (True, False, {UNFENCED})],
    ids=["right", "no drain", "no fence"],
)
def test_the_tma_unit_needs_a_drain_before_and_a_fence_after(drain: bool, fence: bool, expected: set[str]) -> None:
    """A TMA store is published only once drained, a TMA load sees an acquire only through a fence; each is named."""
    world = make_world(2)
    x = [torch.full((4, WIDTH // 4), rank + 1.0) for rank in range(2)]
    out = [torch.zeros(4, WIDTH // 4) for _ in range(2)]

    def descriptor(tensor: Any) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [4, WIDTH // 4])

    def slot(rank: int) -> Any:
        return world.data(rank, 0, (4, WIDTH // 4), torch.float32)

    world.launch(
        [
            Launch(
                rank,
                pass_on_by_tma,
                1,
                (channel_of(world, rank), *map(descriptor, (x[rank], slot(1 - rank), slot(rank), out[rank]))),
                {"DRAIN": drain, "FENCE": fence},
            )
            for rank in range(2)
        ]
    )

    assert torch.equal(out[0], x[1])
    assert {finding.kind for finding in world.findings} == expected


@triton.jit
def count(counter_ptr, out_ptr, PLAIN: tl.constexpr) -> None:
    """Every program counts itself; some only look."""
    if PLAIN:
        tl.store(out_ptr + tl.program_id(0), tl.load(counter_ptr))
    else:
        tl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu")


def test_atomics_do_not_race_with_each_other_but_with_plain_loads() -> None:
    """Programs of one rank may count without order; a plain load of the same word on another stream may not look."""
    world = make_world(2)
    counter, out = torch.zeros(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)

    world.launch([Launch(0, count, 4, (counter, out, False))])
    assert (int(counter), world.findings) == (4, ())

    world.launch([Launch(0, count, 1, (counter, out, True), stream="other")])
    assert {(finding.kind, finding.region) for finding in world.findings} == {(RACE, "count.counter_ptr")}


@triton.jit
def announce(channel) -> None:
    """Tell the other rank that the copy before this kernel has been made."""
    publish(channel, flag_of(channel, peer_words(channel, 1 - channel.rank), channel.rank, 0))


@triton.jit
def receive(channel, data_ptr, out_ptr, WIDTH: tl.constexpr) -> None:
    """Wait for the copy, then read it."""
    other = 1 - channel.rank
    cols = tl.arange(0, WIDTH)
    if wait_for(channel, flag_of(channel, channel.control, other, 0), COMPUTE, 0, other, 0) == 0:
        tl.store(out_ptr + cols, tl.load(data_ptr + cols))


def operations_of_a_copy(
    world: World, out: Any, announce_stream: str, after: tuple[str, ...] = ()
) -> list[Launch | Call]:
    """Rank 0 copies to rank 1 by its copy engine, and a kernel announces it."""
    data = world.data(1, 0, (WIDTH,), torch.float32)
    return [
        copy(0, data, torch.ones(WIDTH)),
        Launch(0, announce, 1, (channel_of(world, 0),), stream=announce_stream, after=after),
        Launch(1, receive, 1, (channel_of(world, 1), data, out, WIDTH)),
    ]


@pytest.mark.parametrize(("stream", "after"), [("copy", ()), ("compute", ("copy",))])
def test_a_stream_orders_what_is_put_on_it(stream: str, after: tuple[str, ...]) -> None:
    """A kernel behind the copy on its stream, or behind that stream, may announce it."""
    world = make_world(2)
    out = torch.zeros(WIDTH)

    world.launch(operations_of_a_copy(world, out, stream, after))

    assert world.report() == "no findings"
    assert torch.equal(out, torch.ones(WIDTH))


def test_a_copy_that_another_stream_announces_is_found() -> None:
    """Two streams of a rank are ordered by nothing."""
    world = make_world(2)

    world.launch(operations_of_a_copy(world, torch.zeros(WIDTH), "compute"))

    assert {(finding.kind, finding.first.who.kernel) for finding in world.findings} >= {(RACE, "copy engine")}


def test_host_operations_read_and_write_in_order() -> None:
    """A call sees what the stream did before it, and its own accesses are checked like a kernel's."""
    world = make_world(2)
    tensor = world.name(0, "mine", torch.zeros(WIDTH))
    seen = []

    world.launch(
        [
            Call(0, lambda host: host.write(tensor, 3.0)),
            Call(0, lambda host: seen.append(host.read(tensor))),
            Call(0, lambda host: host.write(tensor[::2], torch.ones(WIDTH // 2)), stream="other"),
        ]
    )

    assert {finding.region for finding in world.findings} == {"mine"}
    assert seen[0][1] == 3.0
