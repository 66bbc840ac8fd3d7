# SPDX-License-Identifier: Apache-2.0
"""GEMM + all-reduce on emulated ranks: right to the last rounding, ordered, the same bits on every rank."""

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

from megascale_kernels.planning.config import Config  # noqa: E402

from tests.fakes.launched import launched  # noqa: E402
from tests.fakes.products import Case  # noqa: E402

CASES = {
    "one rank": Case(1, 20, 40, 40, bias=True),
    "two ranks, tails everywhere": Case(2, 20, 40, 40, is_nk=False, bias=True),
    "two ranks, odd rows": Case(2, 7, 36, 32, torch.float16),
    "four ranks": Case(4, 16, 32, 32, torch.float16, is_nk=False),
    "four ranks, one row": Case(4, 1, 40, 32, bias=True),
}
SCHEDULES = ("random", "round_robin", "eager")
ONCE = [pytest.param(name, seed, SCHEDULES[seed % 3], id=f"{name}, seed {seed}") for seed, name in enumerate(CASES)]
AGAIN = [
    pytest.param("two ranks, odd rows", seed, "random", id=f"two ranks, odd rows, seed {seed}") for seed in (30, 33)
]


@pytest.mark.parametrize(("name", "seed", "schedule"), [*ONCE, *AGAIN])
def test_every_launch_is_right_ordered_and_the_same_everywhere(name: str, seed: int, schedule: str) -> None:
    """Three launches over both slots of poisoned memory: right, ordered, and all ranks agree bit by bit."""
    done = launched("gemm_ar", CASES[name], seed=seed, schedule=schedule)

    assert done.worst <= 1
    assert done.ranks.world.findings == ()
    assert not any(done.ranks.faults())
    assert all(torch.equal(row[0], out) for row in done.outs for out in row)


def test_neither_a_straggler_nor_the_schedule_changes_a_bit() -> None:
    """A rank that is a hundred times slower, other seeds, other numbers of multiprocessors: the same sums."""
    case = CASES["four ranks, one row"]

    calm = launched("gemm_ar", case, launches=1, schedule="round_robin")
    slow = launched("gemm_ar", case, launches=1, stragglers={1: 100.0}, ctas=1)

    assert slow.ranks.world.findings == ()
    assert calm.same_bits(slow)


def test_a_tile_larger_than_the_output_is_clipped() -> None:
    """One tile of 32 x 64 over 20 x 40 elements, in one piece of K."""
    case = CASES["two ranks, tails everywhere"]._replace(config=Config(32, 64, 64, group_m=1))

    assert launched("gemm_ar", case, launches=1).worst <= 1
