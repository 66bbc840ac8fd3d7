# SPDX-License-Identifier: Apache-2.0
"""All-gather + GEMM on emulated ranks: right to the last rounding, ordered by more than luck, whatever the schedule."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

from megascale_kernels.ag_gemm.launch import planned  # noqa: E402
from megascale_kernels.emulate import events  # noqa: E402
from megascale_kernels.planning.config import Config  # noqa: E402

from tests.fakes.emulated_ranks import EmulatedRanks  # noqa: E402
from tests.fakes.launched import Launched, launched, prepared, put  # noqa: E402
from tests.fakes.products import Case  # noqa: E402
from tests.matrix import wide  # noqa: E402

IN_UNITS = Config(16, 32, 32, group_m=2, splits=2)
BY_SM = Config(16, 32, 32, group_m=2, carrier="sm", comm_ctas=1, splits=2)
CASES = {
    "one rank": Case(1, 32, 32, 64),
    "two ranks, tails everywhere": Case(2, 20, 40, 40, is_nk=False, bias=True),
    "two ranks, rows no TMA can store": Case(2, 16, 36, 32, torch.float16, bias=True),
    "four ranks": Case(4, 16, 64, 32, torch.float16, is_nk=False),
    "four ranks in units": Case(4, 20, 32, 32, config=IN_UNITS),
    "copied by multiprocessors": Case(4, 32, 32, 32, config=BY_SM._replace(comm_ctas=2)),
    "copied by multiprocessors, tails": Case(2, 40, 40, 24, torch.float16, bias=True, config=BY_SM),
    "counted by the device": Case(2, 32, 32, 32, counted=True, config=IN_UNITS),
    "one column shard by shard, the rest together": Case(4, 20, 90, 32, bias=True, config=IN_UNITS._replace(lead=1)),
    "less rows than a tile": Case(4, 3, 32, 32, bias=True),
}
SCHEDULES = ("random", "round_robin", "eager")
# Four ranks that take whole tiles do what four do in units, and two in whole tiles.
ONCE = [pytest.param(name, seed, SCHEDULES[seed % 3], id=f"{name}, seed {seed}") for seed, name in enumerate(CASES)]
AGAIN = [
    pytest.param(name, seed, "random", id=f"{name}, seed {seed}")
    for name in ("two ranks, tails everywhere", "copied by multiprocessors, tails", "counted by the device")
    for seed in (30, 33)
]


@pytest.mark.parametrize(
    ("name", "seed", "schedule"),
    wide([*ONCE, *AGAIN], keep=[case.id for case in ONCE if case.values[0] != "four ranks"]),
)
def test_every_launch_is_right_and_ordered(name: str, seed: int, schedule: str) -> None:
    """Three launches over both slots of poisoned memory: no wrong element, no unordered access, no fault."""
    done = launched("ag_gemm", CASES[name], seed=seed, schedule=schedule)

    assert done.worst <= 1
    assert done.ranks.world.findings == ()
    assert not any(done.ranks.faults())


@pytest.mark.parametrize(("name", "straggler"), [("less rows than a tile", 0), ("copied by multiprocessors, tails", 1)])
def test_a_straggler_changes_nothing(name: str, straggler: int) -> None:
    """A rank that is a hundred times slower is waited for, and the numbers stay right."""
    done = launched("ag_gemm", CASES[name], stragglers={straggler: 100.0}, schedule="round_robin")

    assert done.worst <= 1
    assert done.ranks.world.findings == ()
    waits = [event for event in done.ranks.world.events if event.what == events.WAIT]
    assert straggler in {event.peer for event in waits}


def test_bits_do_not_depend_on_the_schedule() -> None:
    """The same input gives the same bits, whoever was fast, whoever carried the rows and however many multiplied."""
    case = CASES["copied by multiprocessors, tails"]

    first = launched("ag_gemm", case, seed=3)

    assert first.same_bits(launched("ag_gemm", case, seed=4))
    assert first.same_bits(launched("ag_gemm", case._replace(config=IN_UNITS), seed=5, ctas=2))


def test_own_rows_are_multiplied_without_waiting() -> None:
    """No rank waits for itself; the others' rows are taken in the order in which they are sent."""
    done = launched("ag_gemm", CASES["four ranks"], launches=1, ctas=1)

    waits = [event for event in done.ranks.world.events if event.what == events.WAIT]
    for rank in range(4):
        others = [(rank + step) % 4 for step in (1, 2, 3)]
        assert [event.peer for event in waits if event.who.rank == rank] == [
            other for other in others for _ in range(2)
        ]


def test_all_shards_are_walked_together_behind_the_first_columns() -> None:
    """A program that does everything takes one column of each shard in the order of arrival, then columns of all."""
    config = Config(16, 32, 32, group_m=8, lead=1)
    done = launched("ag_gemm", Case(4, 16, 96, 32, config=config), launches=1, ctas=1)

    waits = [event.peer for event in done.ranks.world.events if event.what == events.WAIT and event.who.rank == 0]
    assert waits == [1, 2, 3] * 3
    assert done.worst <= 1


def test_gathered_rows_are_handed_out() -> None:
    """What the launcher returns holds every other rank's rows."""
    case = CASES["two ranks, tails everywhere"]
    ranks = EmulatedRanks(case.ranks, case.dtype)
    given, outs = prepared("ag_gemm", case, seed=0)

    rows = put("ag_gemm", case, ranks, given, outs)
    ranks.run()

    assert [row.shape for row in rows] == [(2, case.m, case.k)] * 2
    assert all(torch.equal(rows[rank][1 - rank], given[1 - rank].x) for rank in range(2))


@pytest.mark.parametrize("config", [None, IN_UNITS, Config(kernel="cublas"), Config(kernel="cublas", pieces=1)])
@pytest.mark.parametrize("counted", [False, True])
def test_rows_that_are_kept_hold_our_own_as_well(config: Config | None, *, counted: bool) -> None:
    """With `own` the gathered rows are whole behind each launch, and the order is one of more than luck."""
    case = CASES["two ranks, tails everywhere"]._replace(counted=counted)
    case = case if config is None else case._replace(config=config)
    ranks = EmulatedRanks(case.ranks, case.dtype, counted=counted, seed=3)
    made = [prepared("ag_gemm", case, seed) for seed in range(3)]
    kept: list[list[torch.Tensor]] = []

    for given, outs in made:

        def host(workspace: Any, given: Any = given, outs: Any = outs) -> Any:  # noqa: ANN401 (emulated)
            mine, out = given[workspace.rank], outs[workspace.rank]
            plan = planned(mine.x, mine.weight, out, mine.bias, workspace, case.config, own=True)
            assert plan.has_own
            slot = plan.run(mine.x, mine.weight.matrix, out, mine.bias)
            return plan.gathered(mine.x, slot)

        kept.append(ranks.call(host))
    ranks.run()

    done = Launched("ag_gemm", case, ranks, [given for given, _ in made], [outs for _, outs in made])
    assert done.worst <= 1
    assert ranks.world.findings == ()
    everything = torch.stack([one.x for one in made[-1][0]])
    assert all(torch.equal(rows, everything) for rows in kept[-1])


def test_the_device_may_take_over_the_counting() -> None:
    """Launches counted by the host, then by the device, then by the host again: no stamp is skipped or used twice."""
    case = CASES["two ranks, tails everywhere"]
    ranks = EmulatedRanks(case.ranks, case.dtype, seed=6)
    made = [prepared("ag_gemm", case, seed) for seed in range(4)]

    for (given, outs), counted in zip(made, (False, True, True, False), strict=True):
        ranks.counted = counted
        put("ag_gemm", case, ranks, given, outs)
    ranks.run()

    done = Launched("ag_gemm", case, ranks, [given for given, _ in made], [outs for _, outs in made])
    assert done.worst <= 1
    assert ranks.world.findings == ()
    assert not any(ranks.faults())
