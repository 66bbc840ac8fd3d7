# SPDX-License-Identifier: Apache-2.0
"""GEMM + reduce-scatter on emulated ranks: right to the last rounding, ordered, the same every time."""

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

from megascale_kernels.emulate import events  # noqa: E402
from megascale_kernels.planning.config import Config  # noqa: E402

from tests.fakes.launched import launched  # noqa: E402
from tests.fakes.products import Case  # noqa: E402
from tests.matrix import wide  # noqa: E402

BY_STORES = Config(16, 32, 32, group_m=2, push_tma=False)
CASES = {
    "one rank": Case(1, 24, 40, 40, bias=True),
    "two ranks by TMA, tails everywhere": Case(2, 20, 40, 40, is_nk=False, bias=True),
    "two ranks by stores, tails everywhere": Case(2, 20, 40, 24, torch.float16, config=BY_STORES),
    "two ranks, rows no TMA can store": Case(2, 16, 36, 32, torch.float16, bias=True),
    "four ranks by TMA": Case(4, 16, 64, 32),
    "four ranks by stores": Case(4, 16, 32, 64, is_nk=False, bias=True, config=BY_STORES),
    "less rows than a tile": Case(4, 3, 40, 32, torch.float16),
}
SCHEDULES = ("random", "round_robin", "eager")
ONCE = [pytest.param(name, seed, SCHEDULES[seed % 3], id=f"{name}, seed {seed}") for seed, name in enumerate(CASES)]
AGAIN = [
    pytest.param(name, seed, "random", id=f"{name}, seed {seed}")
    for name in ("two ranks by TMA, tails everywhere", "two ranks by stores, tails everywhere")
    for seed in (30, 33)
]


@pytest.mark.parametrize(("name", "seed", "schedule"), wide([*ONCE, *AGAIN], keep=[case.id for case in ONCE]))
def test_every_launch_is_right_and_ordered(name: str, seed: int, schedule: str) -> None:
    """Three launches over both slots of poisoned memory: no wrong element, no unordered access, no fault."""
    done = launched("gemm_rs", CASES[name], seed=seed, schedule=schedule)

    assert done.worst <= 1
    assert done.ranks.world.findings == ()
    assert not any(done.ranks.faults())


@pytest.mark.parametrize("straggler", [0, 2])
def test_a_straggler_changes_nothing(straggler: int) -> None:
    """A rank that is a hundred times slower is waited for by everybody, and the numbers stay right."""
    case = CASES["four ranks by stores"]

    done = launched("gemm_rs", case, launches=2, stragglers={straggler: 100.0}, schedule="round_robin")

    assert done.worst <= 1
    assert done.ranks.world.findings == ()
    waits = [event for event in done.ranks.world.events if event.what == events.WAIT]
    assert {event.who.rank for event in waits if event.peer == straggler} == {0, 1, 2, 3} - {straggler}


def test_bits_do_not_depend_on_the_schedule() -> None:
    """The sum runs in the order of ranks: the same bits whoever was fast, whatever carried the partials."""
    case = CASES["less rows than a tile"]

    first = launched("gemm_rs", case, seed=3, launches=2)

    assert first.same_bits(launched("gemm_rs", case, seed=4, launches=2, ctas=2))
    assert first.same_bits(launched("gemm_rs", case._replace(config=BY_STORES), seed=5, launches=2))


@pytest.mark.parametrize(("mixed", "columns"), [(False, 1), (True, 2)])
def test_peers_are_served_first_and_own_rows_last(columns: int, *, mixed: bool) -> None:
    """A rank waits only when it has announced all that it owes, in all or, mixed, in each column: so no circle."""
    case = CASES["four ranks by TMA"]
    case = case._replace(config=case.config._replace(mixed=mixed))

    done = launched("gemm_rs", case, launches=1, ctas=1)

    for rank in range(4):
        mine = [event for event in done.ranks.world.events if event.who.rank == rank]
        kinds = [event.what for event in mine if event.what in (events.WAIT, events.NOTIFY)]
        assert kinds == ([events.NOTIFY] * (6 // columns) + [events.WAIT] * (6 // columns)) * columns
