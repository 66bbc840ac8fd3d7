# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, N803
# (kernels: their types are Triton's to infer, compile-time arguments are capitals)
"""The schedule is the seed's: repeatable, different for different seeds, and independent of real time."""

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

import triton.language as tl  # noqa: E402
from megascale_kernels.device.layout import layout  # noqa: E402
from megascale_kernels.device.signals import now_ns, sm_number  # noqa: E402
from megascale_kernels.emulate import Call, EmulationError, Event, Host, Launch, World  # noqa: E402

from tests.fakes.emulated_ranks import emulated_threads  # noqa: E402


@triton.jit
def sign_up(order_ptr, count_ptr, out_ptr, STEPS: tl.constexpr) -> None:
    """Each program takes a number, again and again: the numbers are the schedule."""
    cta = tl.program_id(0)
    for step in range(STEPS):
        mine = tl.atomic_add(count_ptr, 1, sem="relaxed", scope="sys")
        tl.store(order_ptr + mine, cta.to(tl.int32) * 100 + step)
    tl.store(out_ptr + cta, now_ns())


def schedule_of(seed: int, schedule: str = "random", *, launches: int = 1) -> tuple[list[list[int]], tuple[Event, ...]]:
    """Who ran when, and the events."""
    world = World(layout(1, 1, 0), seed=seed, schedule=schedule)
    orders = []
    for _ in range(launches):
        order, count = torch.zeros(24, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        world.launch([Launch(0, sign_up, 4, (order, count, torch.zeros(4, dtype=torch.int64), 6))])
        orders.append(order.tolist())
    return orders, world.events


@pytest.mark.parametrize("schedule", ["random", "round_robin", "eager"])
def test_the_same_seed_gives_the_same_schedule(schedule: str) -> None:
    """To the nanosecond, over several launches."""
    assert schedule_of(5, schedule, launches=2) == schedule_of(5, schedule, launches=2)


def test_different_seeds_and_launches_give_different_schedules() -> None:
    """Eight seeds, eight orders; and the second launch is not the first again."""
    firsts = [schedule_of(seed, launches=2)[0] for seed in range(8)]

    assert len({tuple(orders[0]) for orders in firsts}) == 8
    assert all(orders[0] != orders[1] for orders in firsts)


def test_the_policies_do_what_they_are_called() -> None:
    """Round robin takes turns, eager runs a program until it waits."""
    turns = [number // 100 for number in schedule_of(0, "round_robin")[0][0]]
    runs = [number // 100 for number in schedule_of(0, "eager")[0][0]]

    assert turns == sorted(turns[:4]) * 6
    assert runs == sorted(runs)


def test_an_unknown_policy_is_refused() -> None:
    """At once, with the choices."""
    with pytest.raises(ValueError, match="random, round_robin, eager"):
        World(layout(1, 1, 0), schedule="fair")


@triton.jit
def read_clock(out_ptr) -> None:
    """Two readings of the clock, and the multiprocessor."""
    out = out_ptr + 3 * tl.program_id(0)
    tl.store(out, now_ns())
    tl.store(out + 1, now_ns())
    tl.store(out + 2, sm_number().to(tl.int64))


def test_the_clock_advances_and_goes_on_in_the_next_launch() -> None:
    """%globaltimer is virtual, monotone over launches; %smid is the program."""
    world = World(layout(1, 1, 0))
    out = torch.zeros(2, 2, 3, dtype=torch.int64)

    for launch in range(2):
        world.launch([Launch(0, read_clock, 2, (out[launch],))])

    assert (out[:, :, 1] > out[:, :, 0]).all()
    assert out[1, :, 0].min() > out[0, :, 1].max()
    assert out[0, :, 2].tolist() == [0, 1]


def test_operations_of_one_stream_do_not_overlap() -> None:
    """The second kernel of a stream starts after the first has ended; another stream's need not wait."""
    world = World(layout(1, 1, 0), seed=2)
    out = torch.zeros(3, 4, 3, dtype=torch.int64)

    world.launch(
        [
            Launch(0, read_clock, 4, (out[0],)),
            Launch(0, read_clock, 4, (out[1],)),
            Launch(0, read_clock, 4, (out[2],), stream="other"),
        ]
    )

    assert out[1, :, 0].min() > out[0, :, 1].max()
    assert out[2, :, 0].min() < out[0, :, 1].max()


def test_what_a_program_raises_comes_out_and_nothing_stays_behind() -> None:
    """The error carries who it was; no thread is left, and the next launch works."""
    world = World(layout(1, 1, 0))
    out = torch.zeros(4, 3, dtype=torch.int64)

    before, during = emulated_threads(), set()

    def fail(_host: Host) -> None:
        during.update(emulated_threads())
        raise LookupError("lost")

    with pytest.raises(LookupError, match="lost") as raised:
        world.launch([Launch(0, read_clock, 4, (out,)), Call(0, fail, "loser")])

    assert raised.value.__notes__ == ["in rank 0 loser[0]"]
    assert emulated_threads() <= before
    assert during - before  # the control: those of a launch are seen
    world.launch([Launch(0, read_clock, 4, (out,))])
    assert (out[:, 0] > 0).all()


def test_one_emulation_at_a_time() -> None:
    """The language is patched for the whole process, so a launch inside a launch is refused."""
    world, other = World(layout(1, 1, 0)), World(layout(1, 1, 0))

    with pytest.raises(EmulationError, match="another emulation is running"):
        world.launch([Call(0, lambda _host: other.launch([]))])
